"""What a body asks for: the fields that count, and a sentence for each that does not fit."""

import pytest

from kvbus.gateway.asked import BUDGET_MAX_S, asked
from kvbus.names import request_hash
from kvbus.parts import Prompt
from kvbus.publisher import checked_prompt

TURN = {"role": "user", "content": "hello"}


def hash_of(**body: object) -> str:
    return asked({"source": "a", **body}).request_hash("a")


def test_a_request_is_read_whole() -> None:
    body: dict[str, object] = {
        "source": "a", "prompt": [1, 2, 3], "model": "m", "cache_salt": "s", "destination": "b",
        "on_miss": "partial", "budget_s": 5,
    }  # fmt: skip
    one = asked(body)
    assert (one.source, one.prompt, one.model, one.salt, one.destination) == ("a", [1, 2, 3], "m", "s", "b")
    assert (one.on_miss, one.budget_s) == ("partial", 5.0)


def test_null_stands_for_a_field_that_was_not_given_and_unknown_fields_are_ignored() -> None:
    fields = ("messages", "model", "cache_salt", "destination", "on_miss", "budget_s")
    plain = asked({"source": "a", "prompt": "x"})
    assert asked({"source": "a", "prompt": "x", **dict.fromkeys(fields)}) == plain
    assert asked({"source": "a", "prompt": "x", "temperature": 0.5, "stream": True, "n": [{}]}) == plain


# H2
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "source is missing"),
        ({"prompt": "x"}, "source is missing"),
        ({"source": "", "prompt": "x"}, "source is missing"),
        ({"source": None, "prompt": "x"}, "source is missing"),
        ({"source": "a"}, "messages or prompt is missing"),
        ({"source": "a", "prompt": None, "messages": None}, "messages or prompt is missing"),
    ],
)
def test_what_is_missing_is_named(body: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        asked(body)


# H2
@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": []}, {"messages": []}])
def test_an_empty_prompt_counts_as_one(body: dict[str, object]) -> None:
    one = asked({"source": "a", **body})
    assert one.is_empty
    assert len(one.request_hash("a")) == 32


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"source": ["a"]}, "source must be a string, got an array"),
        ({"source": {"a": 1}}, "source must be a string, got an object"),
        ({"source": 5}, "source must be a string, got a number"),
        ({"source": "a" * 5_000}, "source is longer"),
        ({"prompt": {"text": "x"}}, "prompt must be a string or a list of token ids"),
        ({"source": True}, "source must be a string, got true"),
        ({"prompt": 5}, "prompt must be a string or a list of token ids, got a number"),
        ({"prompt": ["x"]}, "one string or one list of token ids, got 'x' at place 0"),
        ({"prompt": [[1, 2]]}, "one string or one list of token ids"),
        ({"prompt": [True]}, "one string or one list of token ids"),
        ({"prompt": [7, 1.5]}, "one string or one list of token ids, got 1.5 at place 1"),
        ({"prompt": [7, None]}, "one string or one list of token ids, got null at place 1"),
        ({"prompt": [-1]}, "prompt token 0 must lie in"),
        ({"prompt": [2**32]}, "prompt token 0 must lie in"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"source": "\udfff"}, "surrogate"),
        ({"messages": "x"}, "messages must be a list"),
        ({"messages": {}}, "messages must be a list"),
        ({"messages": ["x"]}, "message 0 must be an object"),
        ({"messages": [TURN, {"role": "user"}]}, "message 1: content must be a string, got nothing"),
        ({"messages": [{"content": "x"}]}, "message 0: role must be a string, got nothing"),
        ({"messages": [{"role": None, "content": "x"}]}, "message 0: role must be a string, got null"),
        ({"messages": [{"role": "", "content": "x"}]}, "role"),
        ({"messages": [{"role": "u" * 33, "content": "x"}]}, "role"),
        ({"messages": [{**TURN, "tool_calls": [{}]}]}, "message 0: 'tool_calls' is not carried"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"model": 5}, "model must be a string"),
        ({"model": "m" * 201}, "model is longer"),
        ({"cache_salt": []}, "cache_salt must be a string"),
        ({"destination": {}}, "destination must be a string"),
        ({"on_miss": "guess"}, "on_miss must be one of prefill, partial, fail, got 'guess'"),
        ({"on_miss": ["fail"]}, "on_miss must be one of prefill, partial, fail, got an array"),
        ({"budget_s": "5"}, "budget_s must be a number, got a string"),
        ({"budget_s": True}, "budget_s must be a number"),
        ({"budget_s": 0}, "budget_s must lie between 0 and 3600, got 0"),
        ({"budget_s": BUDGET_MAX_S + 1}, "budget_s must lie between"),
        ({"budget_s": float("nan")}, "budget_s must lie between"),
        ({"budget_s": float("inf")}, "budget_s must lie between"),
    ],
)
def test_a_field_that_does_not_fit_is_named(body: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        asked({"source": "a", "prompt": "x", **body})


# H6
def test_messages_win_over_a_prompt() -> None:
    assert hash_of(messages=[TURN], prompt="other") == hash_of(messages=[TURN])
    assert hash_of(messages=[TURN], prompt=5) == hash_of(messages=[TURN])
    assert asked({"source": "a", "messages": [], "prompt": "x"}).is_empty


# H7
def test_key_order_and_null_fields_make_no_other_request() -> None:
    turned = {"content": "hello", "role": "user"}
    assert hash_of(messages=[turned]) == hash_of(messages=[TURN]) == hash_of(messages=[{**TURN, "name": None}])


# H7
def test_no_two_kinds_of_prompt_share_a_hash() -> None:
    hashes = [
        hash_of(messages=[TURN]),
        hash_of(prompt='[{"content": "hello", "role": "user"}]'),
        hash_of(prompt='[["user", "hello"]]'),
        hash_of(prompt="[1]"),
        hash_of(prompt=[1]),
        hash_of(prompt="1"),
        hash_of(prompt=""),
        hash_of(messages=[]),
        hash_of(messages=[{"role": "user", "content": ""}]),
    ]
    assert len(set(hashes)) == len(hashes)


# H8
def test_the_hash_covers_model_source_and_salt() -> None:
    one = asked({"source": "a", "prompt": "x"})
    hashes = [
        one.request_hash("a"),
        one.request_hash("c"),
        hash_of(prompt="x", model="m"),
        hash_of(prompt="x", cache_salt="m"),
    ]
    assert len(set(hashes)) == 4


def test_the_hash_is_that_of_the_request_on_the_bus() -> None:
    prompts = ("text", [1, 2, 3], [TURN])
    for prompt in prompts:
        canonical = checked_prompt(prompt).canonical()
        on_bus = request_hash(model="m", salt="s", source="a", prompt=canonical)
        field = "messages" if prompt == [TURN] else "prompt"
        assert hash_of(**{field: prompt}, model="m", cache_salt="s") == on_bus
    assert Prompt(text="text").canonical() == checked_prompt("text").canonical()
