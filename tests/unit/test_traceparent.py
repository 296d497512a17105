"""W3C trace context: what is taken in, and that anything else is dropped and fails nothing."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.codec import pack, unpack
from kvbus.events import Header, LendRequested, PlanAnswered, TransferRequested, decode, encode
from kvbus.parts import Prompt
from kvbus.traceparent import checked_traceparent

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HASH = "0" * 32

MALFORMED = [
    "",
    "garbage",
    GOOD.upper(),
    GOOD[:-1],
    GOOD + "-more",
    GOOD.replace("00-", "ff-", 1),
    GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
    GOOD.replace("b7ad6b7169203331", "0" * 16),
    GOOD.replace("-", "_"),
    "00-" + "a" * 10_000,
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0\u0661",
    17,
    None,
    b"00",
    [GOOD],
    {"traceparent": GOOD},
]


def request(traceparent: object) -> bytes:
    """A request as it travels, with whatever is given in the place of the traceparent."""
    body = TransferRequested(
        request_id="r.1", request_hash=HASH, requester="r", source="a", destination="b", prompt=Prompt(text="x")
    )
    document = dict(unpack(encode(Header(k=body.KIND, i="r", s=1, t=1), body), length_max_bytes=1 << 20))
    document["b"] = {**document["b"], "traceparent": traceparent}  # type: ignore[dict-item] # a map, as it was packed
    return pack(document)


def test_a_good_traceparent_is_taken_as_it_is() -> None:
    assert checked_traceparent(GOOD) == GOOD
    assert checked_traceparent(f" {GOOD} ") == GOOD


def test_a_later_version_is_taken_in_the_words_of_this_one() -> None:
    assert checked_traceparent(GOOD.replace("00-", "01-", 1) + "-what-comes-later") == GOOD


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: repr(value)[:30])
def test_what_is_no_traceparent_is_dropped_and_the_request_taken_all_the_same(value: object) -> None:
    assert checked_traceparent(value) is None
    body = decode(request(value)).body
    assert isinstance(body, TransferRequested)
    assert body.traceparent is None


@given(st.one_of(st.text(), st.binary(), st.integers(-(2**63), 2**63 - 1), st.none(), st.lists(st.text())))
def test_nothing_in_its_place_fails_a_request(value: object) -> None:
    body = decode(request(value)).body
    assert isinstance(body, TransferRequested)


def test_a_traceparent_travels_with_a_request_and_leaves_its_bytes_alone_where_there_is_none() -> None:
    body = decode(request(GOOD)).body
    assert isinstance(body, TransferRequested)
    assert body.traceparent == GOOD
    header = Header(k=body.KIND, i="r", s=1, t=1)
    assert decode(encode(header, body)).body == body
    assert b"traceparent" not in encode(header, body.model_copy(update={"traceparent": None}))


def test_all_who_act_for_a_transfer_are_told_of_it() -> None:
    assert all("traceparent" in kind.model_fields for kind in (TransferRequested, LendRequested, PlanAnswered))


# ------------------------------------------------------------------------------------------------- without anything


QUIET = """
import sys
from kvbus import tracing
import kvbus.worker, kvbus.publisher, kvbus.gateway.app
assert tracing.set_up({}) is False
assert tracing.set_up({"OTEL_TRACES_EXPORTER": "none"}) is False
span = tracing.begin("x")
assert span is tracing.begin("y"), "one object stands for all"
assert not span.is_recorded and span.traceparent is None
span.note(a=1); span.event("e"); span.end("f")
assert tracing.begin("x", "GOOD").traceparent == "GOOD", "carried on"
with tracing.within("GOOD"):
    assert tracing.current() == "GOOD"
assert tracing.current() is None

from kvbus.events import TransferOutcome, TransferRequested
from kvbus.parts import Prompt
from kvbus.roles.spans import OPEN_MAX, Spans
about = {"request_hash": "0" * 32, "source": "a", "destination": "b"}
bare = TransferRequested(request_id="r.1", requester="r", prompt=Prompt(text="x"), **about)
spans = Spans("b", "m0")
spans.began("t1", bare)
assert not spans._transfers, "nothing is kept of who does not trace"
spans.began("t2", bare.model_copy(update={"traceparent": "GOOD"}))
assert spans.traceparent("t2") == "GOOD"
spans.hear(TransferOutcome(transfer="t2", outcome="settled", **about))
assert not spans._transfers and spans.traceparent("t2") is None
for number in range(OPEN_MAX + 10):
    spans.began(str(number), bare.model_copy(update={"traceparent": "GOOD"}))
assert len(spans._transfers) == OPEN_MAX, "bounded, whatever is not heard of again"
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""


@pytest.mark.contract("R23")
def test_a_process_that_traces_nothing_imports_nothing_and_carries_on_what_it_was_given() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", QUIET.replace("GOOD", GOOD)], capture_output=True, text=True, timeout=150, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"


def test_an_exporter_that_is_not_installed_is_said() -> None:
    # A process of its own: in this one another test may have set a provider, and then nobody asks for an exporter.
    ran = subprocess.run(
        [sys.executable, "-c", "from kvbus import tracing; tracing.set_up({'OTEL_TRACES_EXPORTER': 'of-nobody'})"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 1
    assert re.search(r"kvbus\.errors\.ConfigError: .*kvbus\[traces\]", ran.stderr), ran.stderr
