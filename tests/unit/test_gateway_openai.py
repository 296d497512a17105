"""The OpenAI doors over a real engine: the same words as its worker gives, in the API's form, and honest refusals."""

import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from kvbus.events import InstanceRecord
from kvbus.gateway.models import Served, meant
from kvbus.roles.registry import Registered
from tests.unit.gateway_parts import stage
from tests.unit.openai_parts import Room, room, run_dir_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "Once upon a time a page was lent. " * 3
CHAT = {"messages": [{"role": "user", "content": "x"}]}
PLAIN = {"prompt": "x"}
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here() -> AsyncIterator[Room]:
    with tempfile.TemporaryDirectory(prefix="kvoai-") as folder:
        async with room(Path(folder)) as one:
            yield one
            await one.at_rest()


def text_of(chunks: list[dict[str, Any]]) -> str:
    """The text that a stream's chunks give together."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def test_a_completion_says_what_the_engine_says_whole_and_as_a_stream(here: Room) -> None:
    alone = await here.alone(text=TEXT, max_tokens=12)
    told = await here.complete(prompt=TEXT, max_tokens=12)
    chunks = await here.streamed("/v1/completions", prompt=TEXT, max_tokens=12)
    assert told["choices"] == [{"index": 0, "text": alone.text, "logprobs": None, "finish_reason": "length"}]
    assert text_of(chunks) == alone.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 12 + ["length"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert (told["object"], told["model"], chunks[0]["object"]) == ("text_completion", "toy@b", "text_completion")


async def test_a_chat_says_what_the_engine_says_whole_and_as_a_stream(here: Room) -> None:
    alone = await here.alone(messages=TURNS, max_tokens=9)
    told = await here.told("/v1/chat/completions", messages=TURNS, max_completion_tokens=9)
    chunks = await here.streamed("/v1/chat/completions", messages=TURNS, max_tokens=9)
    assert told["choices"][0]["message"] == {"role": "assistant", "content": alone.text, "refusal": None}
    assert text_of(chunks) == alone.text
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (chunks[-1]["choices"][0]["delta"], chunks[-1]["choices"][0]["finish_reason"]) == ({}, "length")
    assert (told["object"], chunks[0]["object"]) == ("chat.completion", "chat.completion.chunk")


async def test_text_in_parts_is_the_same_text_and_an_answer_may_come_back_as_it_was_given(here: Room) -> None:
    answer = (await here.told("/v1/chat/completions", messages=TURNS, max_tokens=4))["choices"][0]["message"]
    again = [{"role": "user", "content": "Hello there"}, answer]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]}]
    told = await here.told("/v1/chat/completions", messages=[*parts, answer], max_tokens=4)
    plain = await here.told("/v1/chat/completions", messages=again, max_tokens=4)
    assert told["choices"] == plain["choices"]


async def test_token_ids_are_a_prompt_and_so_is_a_list_of_one(here: Room) -> None:
    ids = list(TEXT.encode())
    plain = (await here.complete(prompt=TEXT))["choices"]
    for prompt in (ids, [ids], [TEXT]):
        assert (await here.complete(prompt=prompt))["choices"] == plain
    assert len(plain[0]["text"]) == 16  # the API's default


async def test_usage_says_how_much_of_the_prompt_came_from_pages(here: Room) -> None:
    text = "A prompt that nobody has sent before. " * 2  # 76 tokens: nine blocks of eight
    first = (await here.complete(prompt=text, max_tokens=3))["usage"]
    assert first == {
        "prompt_tokens": 76, "completion_tokens": 3, "total_tokens": 79, "prompt_tokens_details": {"cached_tokens": 0}
    }  # fmt: skip
    chunks = await here.streamed("/v1/completions", prompt=text, max_tokens=3, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == first | {"prompt_tokens_details": {"cached_tokens": 72}}
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    salted = await here.complete(prompt=text, max_tokens=3, cache_salt="another tenant")
    assert salted["usage"] == first


async def test_a_stop_string_ends_the_answer_before_it_and_the_engine_stops(here: Room) -> None:
    whole = (await here.alone(text=TEXT, max_tokens=40)).text
    stop = whole[17:20]
    cut = whole[: whole.index(stop)]
    told = await here.complete(prompt=TEXT, max_tokens=1_000, stop=["no such text", stop])
    assert (told["choices"][0]["text"], told["choices"][0]["finish_reason"]) == (cut, "stop")
    assert told["usage"]["completion_tokens"] == len(cut) + len(stop)  # a toy's token is a character
    chunks = await here.streamed("/v1/completions", prompt=TEXT, max_tokens=1_000, stop=stop)
    assert text_of(chunks) == cut
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_model_goes_by_its_instance_and_by_both_names(here: Room) -> None:
    listed = (await here.client.get("/v1/models")).json()
    assert [one["id"] for one in listed["data"]] == ["toy@b", "b"]
    for name in ("toy@b", "b", "toy"):
        described = await here.client.get(f"/v1/models/{name}")
        assert described.json()["id"] == name
        assert (await here.complete(model=name, prompt="x", max_tokens=1))["model"] == "toy@b"
    below = await here.client.post("/instances/b/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert below.json()["model"] == "toy@b"
    assert (await here.client.get("/instances/b/v1/models")).json() == listed


@pytest.mark.parametrize(
    ("path", "model", "words"),
    [
        ("", "gpt-4", "there is no model 'gpt-4' here; there are toy@a, toy@b"),
        ("/instances/b", "a", "there is no model 'a' here; there are toy@b"),
        ("/instances/zz", "b", "this gateway serves no instance 'zz'"),
        ("", "a", "instance 'a' has no worker that this gateway can reach: ask a gateway that runs on its host"),
    ],
)
async def test_a_name_that_nothing_here_goes_by_is_answered_404(here: Room, path: str, model: str, words: str) -> None:
    answered = await here.client.post(f"{path}/v1/completions", json={"model": model, "prompt": "x"})
    assert answered.status_code == 404
    assert answered.json()["error"]["message"].startswith(words)
    assert (await here.client.get(f"{path}/v1/models/{model}")).status_code == 404


async def test_a_model_of_several_instances_is_no_answer_and_they_are_named(here: Room, tmp_path: Path) -> None:
    run_dir = run_dir_of(here.worker, tmp_path, "a", "b")
    async with stage(run_dir=run_dir) as both:
        for model in ({"model": "toy"}, {}):
            answered = await both.client.post("/v1/completions", json={"prompt": "x", **model})
            assert (answered.status_code, answered.json()["error"]["code"]) == (400, "model_ambiguous")
            assert "name one of toy@a, toy@b" in answered.json()["error"]["message"]
        for name in ("a", "b"):
            assert (await meant(both.parts, name, "")) == Served(name, "toy")


async def test_an_instance_of_several_ranks_has_no_engine_that_answers_for_it(here: Room) -> None:
    directory = here.stage.parts.directory
    (one,) = directory.instances["b"].values()
    record = InstanceRecord.model_validate({**one.record.model_dump(), "ranks": 2})
    assert isinstance(directory.instances, dict)
    directory.instances["b"] = {"m0": Registered("b", "m0", one.epoch, record)}
    assert "several ranks" in here.stage.parts.engines.unreachable("b")
    await directory.refresh()
    assert here.stage.parts.engines.unreachable("b") == ""


async def test_answers_are_as_described(here: Room) -> None:
    described = (await here.client.get("/openapi.json")).json()["paths"]
    for method, path, sent in (
        ("post", "/v1/completions", PLAIN),
        ("post", "/v1/completions", PLAIN | {"n": 2}),
        ("post", "/v1/completions", PLAIN | {"model": "none"}),
        ("post", "/v1/chat/completions", CHAT),
        ("get", "/v1/models", None),
        ("get", "/v1/models/{model}", None),
    ):
        answered = await here.client.request(method, path.format(model="b"), json=sent)
        response = described[path][method]["responses"][str(answered.status_code)]
        jsonschema.validate(answered.json(), response["content"]["application/json"]["schema"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (PLAIN | {"n": 2}, "n"),
        (PLAIN | {"n": True}, "n"),
        (PLAIN | {"best_of": 3}, "best_of"),
        (PLAIN | {"logprobs": 0}, "logprobs"),
        (PLAIN | {"echo": True}, "echo"),
        (PLAIN | {"suffix": "end"}, "suffix"),
        (PLAIN | {"temperature": 0.7}, "temperature"),
        (PLAIN | {"top_p": 0.9}, "top_p"),
        (PLAIN | {"presence_penalty": 1}, "presence_penalty"),
        (PLAIN | {"logit_bias": {"5": 100}}, "logit_bias"),
        (PLAIN | {"max_tokens": 0}, "max_tokens"),
        (PLAIN | {"max_tokens": "5"}, "max_tokens"),
        (PLAIN | {"max_tokens": True}, "max_tokens"),
        (PLAIN | {"max_tokens": 10**30}, "max_tokens"),
        (PLAIN | {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        (PLAIN | {"stop": ["a"] * 5}, "stop"),
        (PLAIN | {"stop": ""}, "stop"),
        (PLAIN | {"stop": 5}, "stop"),
        (PLAIN | {"stream": 1}, "stream"),
        (PLAIN | {"stream_options": {"include_usage": True}}, "stream_options"),
        (PLAIN | {"stream": True, "stream_options": []}, "stream_options"),
        (PLAIN | {"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        (PLAIN | {"model": 5}, "model"),
        (PLAIN | {"model": "m" * 201}, "model"),
        (PLAIN | {"cache_salt": ["s"]}, "cache_salt"),
        (PLAIN | {"kv_transfer_params": "a"}, "kv_transfer_params"),
        (PLAIN | {"kv_transfer_params": {"kvbus": "a"}}, "kv_transfer_params"),
        (PLAIN | {"kv_transfer_params": {"kvbus": {"source": "a", "budget_s": 0}}}, "kv_transfer_params"),
        (PLAIN | {"kv_transfer_params": {"kvbus": {"source": ["a"]}}}, "kv_transfer_params"),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        (CHAT | {"tools": [{"type": "function"}]}, "tools"),
        (CHAT | {"tool_choice": "auto"}, "tool_choice"),
        (CHAT | {"functions": [{}]}, "functions"),
        (CHAT | {"logprobs": True}, "logprobs"),
        (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT | {"modalities": ["audio"]}, "modalities"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0]"),
    ],
)
async def test_what_is_not_supported_or_does_not_fit_is_refused_by_name(
    here: Room, body: dict[str, object], param: str
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answered = await here.client.post(path, content=json.dumps({"model": "b", **body}))
    error = answered.json()["error"]
    assert (answered.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param.partition("[")[0] in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (PLAIN | {"temperature": 0.7}, "temperature 0.7 is not supported: engines answer greedily here; leave it out"),
        (PLAIN | {"n": 2}, "n 2 is not supported: there is one answer to a prompt here; leave it out, or send 1"),
        (PLAIN | {"logprobs": True}, "logprobs true is not supported; leave it out, or send false"),
        (PLAIN | {"max_tokens": "5"}, "max_tokens must be a whole number, got a string"),
        (PLAIN | {"stop": ["a", 5]}, "stop must be a string, or a list of them, of 1…256 characters, got 5"),
        (
            PLAIN | {"kv_transfer_params": {"kvbus": {"source": 3}}},
            "kv_transfer_params.kvbus.source must be a string, got a number",
        ),
        (
            PLAIN | {"kv_transfer_params": {"kvbus": {"source": "a", "budget_s": "x"}}},
            "kv_transfer_params.kvbus.budget_s must be a number between 0 and 60, got 'x'",
        ),
        ({"prompt": ""}, "prompt is empty: there is nothing to answer"),
        ({"prompt": [1, "b"]}, "prompt must be one string or one list of token ids, got 'b' at place 1"),
        ({"prompt": [-1]}, "prompt token 0 must lie in"),
        ({"messages": []}, "messages is empty: there is nothing to answer"),
        ({"messages": [{"role": "user"}]}, "messages[0]: content must be a string or a list of parts, got nothing"),
        ({"messages": [{"role": None, "content": "x"}]}, "messages[0]: role must be a string, got null"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0]: parts of content must be of type 'text', got 'image_url'",
        ),
    ],
)
async def test_a_refusal_says_what_was_found_and_what_was_expected(
    here: Room, body: dict[str, object], words: str
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answered = await here.client.post(path, content=json.dumps({"model": "b", **body}))
    assert answered.json()["error"]["message"].startswith(words)


async def test_values_that_change_nothing_are_taken(here: Room) -> None:
    plain = await here.complete(prompt=TEXT)
    same = {
        "n": 1, "best_of": 1, "temperature": 0.0, "top_p": 1, "presence_penalty": 0.0, "logit_bias": {}, "stop": None,
        "logprobs": None, "echo": False, "user": "me", "seed": 7, "store": False, "max_tokens": 16, "unknown": [1],
    }  # fmt: skip
    assert (await here.complete(prompt=TEXT, **same))["choices"] == plain["choices"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_answered_400_with_its_words(here: Room, *, stream: bool) -> None:
    for body, words in (
        ({"prompt": "x" * 3_000}, "the prompt has 3000 tokens, toy takes at most 2047"),
        ({"prompt": [1, 99_999]}, "a token id is out of range"),
    ):
        answered = await here.client.post("/v1/completions", json={"model": "b", "stream": stream, **body})
        assert answered.status_code == 400, answered.text
        assert words in answered.json()["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"{", 400, "body is not JSON"),
        (b"[]", 400, "body must be a JSON object"),
        (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, "nested too deeply"),
        (b'{"prompt": "' + b"x" * (2 << 20) + b'"}', 413, "body is longer"),
        (b'{"model": "b", "prompt": "' + b"x" * (3 << 19) + b'"}', 400, "the prompt is too long"),
    ],
    ids=["no JSON", "no object", "deep", "long body", "long prompt"],
)
async def test_a_body_that_is_none_is_refused_in_the_apis_form(
    here: Room, sent: bytes, status: int, words: str
) -> None:
    answered = await here.client.post("/v1/completions", content=sent)
    assert answered.status_code == status
    assert words in answered.json()["error"]["message"]
