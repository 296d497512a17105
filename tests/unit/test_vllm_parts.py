"""What the vLLM connector is told, and what it tells of itself: settings, versions, models, look-ups, servers."""

import http.server
import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbus.engines.client import LocalClient
from kvbus.engines.link import EngineError
from kvbus.engines.vllm_lookups import Lookups
from kvbus.engines.vllm_model import VllmFacts, changes_of, describe, layout_of, only_spec
from kvbus.engines.vllm_server import Server
from kvbus.engines.vllm_settings import PageForm, StorePolicy, VllmSettings, check_version
from kvbus.errors import ConfigError, PeerError
from kvbus.pool.layout import PageLayout
from tests.tiny_llama import make_tiny_llama
from tests.unit.engine_parts import worker_with
from tests.waiting import until, wait_until

FACTS = VllmFacts("0.32.0", "cpu", "vec", "float32", "auto", "float32", 2, 1, 32, 32, "/nowhere", "tiny", 512, 2048)


def facts(**other: object) -> VllmFacts:
    return VllmFacts(**{name: getattr(FACTS, name) for name in VllmFacts.__slots__} | other)


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({}, "socket is missing"),
        ({"socket": "/s", "stor": "every"}, "stor is unknown; there are"),
        ({"socket": "/s", "store": "sometimes"}, "one of every, asked, none"),
        ({"socket": "/s", "server": "localhost:8000"}, "a base URL such as"),
        ({"socket": "/s", "lookup_budget_s": -1}, "lookup_budget_s is -1"),
        ({"socket": "/s", "min_blocks": 0}, "min_blocks is 0"),
        ({"socket": "/s", "allow_untested_version": "yes"}, "true or false"),
        ({"socket": "/s", "model_folder": 3}, "model_folder is int"),
        ({"socket": "/" + "s" * 200}, "longer than the 107 bytes"),
    ],
)
def test_a_setting_that_does_not_fit_is_named_with_what_would(raw: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        VllmSettings.from_plain(raw)


def test_settings_that_are_not_given_store_every_prompt_and_choose_the_form_of_pages() -> None:
    settings = VllmSettings.from_plain({"socket": "/run/a.sock", "server": "http://127.0.0.1:8000/"})
    assert (settings.store, settings.pages) == (StorePolicy.EVERY, PageForm.AUTO)
    assert settings.server == "http://127.0.0.1:8000"


def test_a_release_that_was_not_tested_is_refused_in_words_unless_that_is_wanted() -> None:
    check_version("0.32.0")
    check_version("0.33.0", allow_untested=True)
    for version in ("0.33.0", "0.3.2", "1.0"):
        with pytest.raises(ConfigError, match=f"tested with vLLM 0.32.x, and this is vLLM {version}"):
            check_version(version)


# Models and layouts --------------------------------------------------------------------------------------------------


def test_a_known_packing_gives_the_layout_that_every_engine_states_for_the_model() -> None:
    layout = layout_of(FACTS, "ab12", PageForm.AUTO)
    assert layout == PageLayout("kv", 2, 1, 32, 32, "float32", 0, 1, "ab12")


@pytest.mark.parametrize(
    "other", [{"packing": "vec16"}, {"dtype": "bfloat16"}, {"platform": "cuda"}, {"model_dtype": "bfloat16"}]
)
def test_an_unknown_packing_gives_opaque_pages_that_fit_equal_kernels_only(other: dict[str, object]) -> None:
    layout = layout_of(facts(**other), "ab12", PageForm.AUTO)
    layout.require_valid()
    known = layout_of(FACTS, "ab12", PageForm.OPAQUE)
    assert layout.kind == known.kind == "opaque"
    assert known.page_bytes == layout_of(FACTS, "ab12", PageForm.CANONICAL).page_bytes
    assert len({layout.fingerprint(), known.fingerprint(), layout_of(FACTS, "ab12", PageForm.AUTO).fingerprint()}) == 3
    assert layout_of(facts(**other, version="0.32.1"), "ab12", PageForm.AUTO).fingerprint() != layout.fingerprint()
    with pytest.raises(ConfigError, match="set pages to auto or opaque"):
        layout_of(facts(**other), "ab12", PageForm.CANONICAL)


def test_caches_of_bytes_that_mean_different_numbers_have_different_fingerprints() -> None:
    kinds = [("fp8_e4m3", "float32"), ("fp8_e5m2", "float32"), ("fp8_e4m3", "bfloat16")]
    layouts = [
        layout_of(facts(dtype="uint8", cache_dtype=kind, model_dtype=of), "ab12", PageForm.AUTO) for kind, of in kinds
    ]
    assert len({layout.fingerprint() for layout in layouts}) == 3


def test_the_digest_is_the_folders_and_another_one_where_settings_change_what_it_computes() -> None:
    from kvbus.engines.model_files import folder_digest

    with tempfile.TemporaryDirectory() as name:
        folder = make_tiny_llama(Path(name) / "tiny")
        about = describe(facts(model=str(folder)), folder="", form=PageForm.AUTO)
        assert about.model_digest == about.layout.model_digest == folder_digest(folder)
        named = describe(facts(model="org/tiny"), folder=str(folder), form=PageForm.AUTO)
        assert named.layout.fingerprint() == about.layout.fingerprint()
        changed = describe(facts(model=str(folder), changes=("dummy seed=0",)), folder="", form=PageForm.AUTO)
        assert changed.layout.fingerprint() != about.layout.fingerprint()


def test_a_model_that_is_no_folder_is_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match="model_folder in kv_connector_extra_config"):
        describe(facts(model="org/model"), folder="", form=PageForm.AUTO)


class FullAttentionSpec(SimpleNamespace):
    """Bears the name of vLLM's own."""


def config(**other: object) -> SimpleNamespace:
    """What vLLM would hand to the connector, as far as it is looked at."""
    transfer = {"kv_load_failure_policy": "recompute", "kv_role": "kv_both"}
    parallel: dict[str, object] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    parallel |= {"data_parallel_size": 1, "data_parallel_rank": 0, "data_parallel_index": 0}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**{name: other.get(name, value) for name, value in transfer.items()}),
        parallel_config=SimpleNamespace(**{name: other.get(name, value) for name, value in parallel.items()}),
        speculative_config=other.get("speculative_config"),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(rope_parameters=other.get("rope_parameters"))),
    )


def caches(*specs: object) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_one_group_of_full_attention_on_one_rank_is_taken() -> None:
    spec = FullAttentionSpec(block_size=32, sliding_window=None)
    assert only_spec(config(), caches(spec)) is spec


@pytest.mark.parametrize(
    ("other", "specs", "text"),
    [
        ({"tensor_parallel_size": 2}, 1, "tensor and pipeline parallel size 1"),
        ({"data_parallel_size": 2}, 1, "without data parallelism"),
        ({"data_parallel_rank": 1}, 1, "without data parallelism"),
        ({"data_parallel_index": 1}, 1, "without data parallelism"),
        ({"kv_load_failure_policy": "fail"}, 1, "kv_load_failure_policy to recompute"),
        ({"kv_role": "kv_consumer"}, 1, "kv_role to kv_both"),
        ({"speculative_config": object()}, 1, "without speculative decoding"),
        ({"rope_parameters": {"rope_type": "longrope"}}, 1, "type longrope, .*of type default, linear, llama3, yarn"),
        ({}, 2, "other kinds .FullAttentionSpec, FullAttentionSpec."),
        ({}, 0, "other kinds .none."),
    ],
)
def test_what_the_connector_does_not_do_is_refused_at_the_start_in_words(
    other: dict[str, object], specs: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        only_spec(config(**other), caches(*[FullAttentionSpec(sliding_window=None)] * specs))


def test_a_window_of_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="sees a window only"):
        only_spec(config(), caches(FullAttentionSpec(sliding_window=128)))


def test_settings_that_change_the_kv_of_the_same_folder_are_named() -> None:
    plain = SimpleNamespace(quantization=None, hf_overrides={}, seed=0)
    assert changes_of(SimpleNamespace(model_config=plain, load_config=SimpleNamespace(load_format="auto"))) == ()
    other = SimpleNamespace(quantization="fp8", hf_overrides={"rope_theta": 1}, seed=3)
    named = changes_of(SimpleNamespace(model_config=other, load_config=SimpleNamespace(load_format="dummy")))
    assert named == ("quantization=fp8", "overrides={'rope_theta': 1}", "dummy seed=3")


# Look-ups ------------------------------------------------------------------------------------------------------------


async def test_look_ups_are_answered_by_a_worker_and_by_nobody_once_it_is_gone() -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        async with worker_with(Path(folder)) as worker:
            await worker.start_engine()
            ids = tuple(b"a prompt of some length, which makes a few whole blocks")
            await worker.ask(lambda client: client.generate(ids=ids, max_tokens=1))
            lookups = Lookups(worker.path)
            lookups.start()
            await until(lambda: lookups.is_near)
            assert lookups.put("one", ids, "")
            await until(lambda: lookups.take("one") is not None)
            assert lookups.take("one") == len(ids) // 8
            assert lookups.put("other", ids, "another salt")
            await until(lambda: lookups.take("other") == 0)
            lookups.drop("one")
            assert lookups.take("one") is None
        assert lookups.put("gone", ids, "")
        await until(lambda: lookups.take("gone") == 0)
        await until(lambda: not lookups.is_near)
        assert not lookups.put("away", ids, "")
        lookups.stop()


def test_where_nobody_listens_nobody_is_asked(tmp_path: Path) -> None:
    lookups = Lookups(tmp_path / "nobody.sock")
    lookups.start()
    assert not lookups.put("one", (1,), "")
    lookups.stop()


class Stuck(LocalClient):
    """A client whose worker takes its time to answer."""

    going = threading.Event()

    def connect(self) -> None:
        """Connect to nobody."""

    def held(self, ids: Sequence[int], salt: str = "") -> int:
        assert self.going.wait(60)
        return len(ids) + len(salt)


def test_a_worker_that_is_late_is_asked_nothing_more_until_it_has_spoken(tmp_path: Path) -> None:
    Stuck.going.clear()
    lookups = Lookups(tmp_path / "stuck.sock", Stuck)
    lookups.start()
    wait_until(lambda: lookups.put("late", (1, 2), ""))
    lookups.overdue("late")
    lookups.drop("late")
    assert not lookups.put("other", (1,), "")
    Stuck.going.set()
    wait_until(lambda: lookups.put("next", (1,), ""))
    wait_until(lambda: lookups.take("next") == 1)
    lookups.overdue("next")
    assert lookups.is_near, "what was answered is not late"
    lookups.stop()


# vLLM's own server ---------------------------------------------------------------------------------------------------


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[Server, list[dict[str, object]]]]:
    """A server of HTTP that says the same to every request, and notes them."""
    heard: list[dict[str, object]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            heard.append({"path": self.path} | json.loads(self.rfile.read(length)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", "tiny"), heard
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def test_a_prompt_is_computed_by_a_completion_of_one_token_under_a_mark() -> None:
    with answering(200, b"{}") as (server, heard):
        server.compute([1, 2, 3], salt="s", mark="m")
    (asked,) = heard
    assert (asked["path"], asked["prompt"], asked["max_tokens"]) == ("/v1/completions", [1, 2, 3], 1)
    assert asked["cache_salt"] == "s"
    assert asked["kv_transfer_params"] == {"kvbus": {"store": True, "mark": "m"}}


def test_an_answer_is_read_as_it_streams_without_the_token_that_ended_it() -> None:
    events = [
        {"choices": [{"token_ids": [5, 6], "text": "ab", "finish_reason": None}]},
        {"choices": [{"token_ids": [7, 2], "text": "c", "finish_reason": "stop", "stop_reason": None}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}},
    ]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [END]\n\n"
    with answering(200, body) as (server, _):
        steps = list(server.answer([1], salt="", max_tokens=9, ours={}))
    assert [(step.tokens, step.text, step.reason) for step in steps[:2]] == [((5, 6), "ab", ""), ((7,), "c", "stop")]
    assert steps[2].cached_tokens == 2


def refusal(kind: str) -> bytes:
    """What vLLM says of a request that it does not take, with the prompt in its message."""
    return json.dumps({"error": {"message": "too long: hello", "type": kind, "param": "prompt", "code": 400}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (
            400,
            refusal("BadRequestError"),
            PeerError,
            "refused the request.*status=400, type=.BadRequestError., param=.prompt.",
        ),
        (500, refusal("the user said: hello"), EngineError, "server failed .status=500, param=.prompt.[)]$"),
        (500, b"oh no: hello", EngineError, "server failed .status=500.$"),
        (400, b'["hello"]', PeerError, "refused the request .status=400.$"),
        (200, b"not json, but hello", EngineError, "something else than JSON"),
        (200, b'{"tokens": "none"}', EngineError, "no token ids"),
        (200, b'["hello"]', EngineError, "another document"),
    ],
)
def test_what_the_server_does_not_do_is_said_by_its_kind_and_without_a_word_of_the_prompt(
    status: int, body: bytes, error: type[Exception], text: str
) -> None:
    with answering(status, body) as (server, _), pytest.raises(error, match=text) as raised:
        server.tokenize("hello", None)
    assert "hello" not in str(raised.value)


def test_an_event_that_makes_no_sense_ends_the_answer_with_an_error() -> None:
    for body, text in [
        (b'{"choices": "hello"}', "makes no sense"),
        (b'{"error": "hello"}', "ended the answer"),
        (refusal("InternalServerError"), "ended the answer .type=.InternalServerError."),
    ]:
        with (
            answering(200, b"data: " + body + b"\n\n") as (server, _),
            pytest.raises(EngineError, match=text) as raised,
        ):
            list(server.answer([1], salt="", max_tokens=1, ours={}))
        assert "hello" not in str(raised.value)


def test_without_an_address_or_without_anybody_there_the_words_say_which() -> None:
    with pytest.raises(PeerError, match="set server in kv_connector_extra_config"):
        Server("", "tiny").tokenize("hello", None)
    with pytest.raises(EngineError, match="cannot be asked"):
        Server("http://127.0.0.1:9", "tiny").tokenize("hello", None)
