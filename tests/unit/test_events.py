"""The wire: each event comes back as it went out, and nothing else than a PeerError comes of bad bytes."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbus import events
from kvbus.codec import pack, unpack
from kvbus.errors import PeerError
from kvbus.events import KINDS, Header, UnknownKind, column, decode, encode, from_column
from kvbus.parts import Body, Message, Prompt, ReaderKey

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
MAKE_GOLDEN = ROOT / "scripts" / "make_golden"
GOLDEN_FILES = sorted(GOLDEN.glob("*.bin"))


def header(kind: str, **fields: object) -> Header:
    return Header.model_validate({"k": kind, "i": "b", "m": "m0", "e": 7, "s": 1, "t": 2, **fields})


def document(kind: str = "stats_asked", body: object = None, **fields: object) -> dict[str, object]:
    return {"v": 1, "k": kind, "i": "b", "s": 1, "t": 2, "b": {} if body is None else body, **fields}


def golden_document(name: str) -> dict[str, object]:
    return unpack((GOLDEN / f"v1_{name}.bin").read_bytes())


def make_golden(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MAKE_GOLDEN), *arguments], check=False, capture_output=True, text=True, timeout=150
    )


# ------------------------------------------------------------------------------------------------------ golden bytes


def test_every_kind_has_golden_bytes() -> None:
    assert {decode(path.read_bytes()).header.k for path in GOLDEN_FILES} == set(KINDS)


def test_the_bytes_of_version_1_have_not_changed(tmp_path: Path) -> None:
    result = make_golden("--folder", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_bytes() for path in GOLDEN.iterdir()}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == []


def test_golden_files_are_not_written_anew_by_accident(tmp_path: Path) -> None:
    assert make_golden("--folder", str(tmp_path)).returncode == 0
    first = tmp_path / GOLDEN_FILES[0].name
    first.write_bytes(b"changed")
    refused = make_golden("--folder", str(tmp_path))
    assert refused.returncode == 1
    assert "--force" in refused.stdout
    assert first.read_bytes() == b"changed"
    assert make_golden("--folder", str(tmp_path), "--force").returncode == 0
    assert first.read_bytes() == GOLDEN_FILES[0].read_bytes()


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_an_event_comes_back_as_it_went_out(path: Path) -> None:
    data = path.read_bytes()
    event = decode(data)
    assert not isinstance(event.body, UnknownKind)
    assert encode(event.header, event.body) == data
    assert decode(encode(event.header, event.body)) == event
    text = json.loads(path.with_suffix(".json").read_text("utf-8"))
    assert text["header"] == event.header.model_dump()
    assert text["body"].keys() == event.body.model_dump(exclude_none=True).keys()


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_unknown_fields_are_ignored(path: Path) -> None:
    whole = unpack(path.read_bytes())
    body = whole["b"]
    assert isinstance(body, dict)
    later = pack({**whole, "zz": [1, {"x": b"y"}], "b": {**body, "later": {"deep": [None, 1.5]}}})
    assert decode(later) == decode(path.read_bytes())


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_cut_off_bytes_are_refused(path: Path) -> None:
    data = path.read_bytes()
    for length in range(len(data)):
        with pytest.raises(PeerError):
            decode(data[:length])
    with pytest.raises(PeerError):
        decode(data + b"\x00")


@pytest.mark.parametrize(("name", "field", "value"), [("heartbeat", "settle_term", 0), ("void", "members", ())])
def test_bytes_from_before_a_field_was_added_are_still_read(name: str, field: str, value: object) -> None:
    whole = golden_document(name)
    body = whole["b"]
    assert isinstance(body, dict)
    assert body.pop(field) != value
    assert getattr(decode(pack(whole)).body, field) == value


# ------------------------------------------------------------------------------------------------------ the envelope


def test_an_unknown_kind_is_told_apart_and_not_an_error() -> None:
    event = decode(pack(document("from_the_future", {"anything": [1, 2]})))
    assert event.body == UnknownKind(kind="from_the_future")
    assert event.header.i == "b"


@pytest.mark.parametrize("version", [0, 2, -1, 2**63, "1", None, True, 1.0, [1], {"v": 1}])
def test_an_unknown_major_version_is_refused(version: object) -> None:
    with pytest.raises(PeerError, match="major version"):
        decode(pack(document(v=version)))


def test_a_version_that_is_nested_too_deep_to_be_shown_is_refused() -> None:
    # found by trying: a thousand nested lists have no repr
    for depth in (10, 400, 1_000, 1_020):
        with pytest.raises(PeerError):
            decode(b"\x82\xa1v" + b"\x91" * depth + b"\xc0" + b"\xa1k\xa1a")


def test_a_missing_version_is_refused() -> None:
    with pytest.raises(PeerError, match="major version"):
        decode(pack({"k": "stats_asked"}))


@pytest.mark.parametrize(
    "change",
    [
        {"k": ""}, {"k": 7}, {"k": "x" * 33}, {"i": ""}, {"i": "x" * 65}, {"i": "é" * 30}, {"s": -1}, {"s": 2**63},
        {"s": "1"}, {"s": 1.0}, {"s": True}, {"t": None}, {"e": -1}, {"m": "x" * 65}, {"m": b"m0"}, {"c": "x" * 201},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_field_out_of_its_bounds_is_refused_and_named(change: dict[str, object]) -> None:
    with pytest.raises(PeerError, match="does not fit its kind") as caught:
        decode(pack({**document(), **change}))
    assert str(caught.value.details["problem"]).startswith(next(iter(change)))


@pytest.mark.parametrize("missing", ["k", "i", "s", "t", "b"])
def test_a_missing_part_of_the_envelope_is_refused(missing: str) -> None:
    whole = document()
    del whole[missing]
    with pytest.raises(PeerError):
        decode(pack(whole))


@pytest.mark.parametrize("body", [None, [], "x", b"x", 1])
def test_a_body_that_is_no_map_is_refused(body: object) -> None:
    with pytest.raises(PeerError, match="body must be a map"):
        decode(pack({**document(), "b": body}))


def test_an_event_that_is_too_long_is_refused_before_it_is_read() -> None:
    data = encode(header("stats"), events.StatsAnswered(counters={"x": "y" * 1_000}))
    assert decode(data, length_max_bytes=len(data)).header.s == 1
    with pytest.raises(PeerError, match="too long"):
        decode(data, length_max_bytes=len(data) - 1)
    with pytest.raises(PeerError, match="too long"):
        decode(b"\x80" * (events.REQUEST_LENGTH_MAX_BYTES + 1))


def test_a_header_that_names_another_kind_cannot_be_encoded() -> None:
    with pytest.raises(ValueError, match="header says kind"):
        encode(header("facts"), events.StatsAsked())


def test_the_event_id_has_all_that_makes_it_unique() -> None:
    assert header("facts").event_id == "b.m0.7.1"
    requester = Header(k="stats_asked", i="r", s=3, t=1)
    assert requester.event_id == "r..0.3"


def test_events_are_frozen() -> None:
    with pytest.raises(ValidationError):
        header("facts").s = 9  # type: ignore[misc]


# -------------------------------------------------------------------------------------------------------- the bodies


def changed(name: str, **fields: object) -> bytes:
    whole = golden_document(name)
    body = whole["b"]
    assert isinstance(body, dict)
    return pack({**whole, "b": {**body, **fields}})


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("transfer_requested", "request_hash", "A" * 32),
        ("transfer_requested", "request_hash", "0" * 32 + "\n"),
        ("transfer_requested", "budget_s", 0.0),
        ("transfer_requested", "budget_s", float("nan")),
        ("transfer_requested", "budget_s", float("inf")),
        ("transfer_requested", "on_miss", "maybe"),
        ("transfer_requested", "requester", "é" * 30),
        ("transfer_requested", "prompt", {}),
        ("transfer_requested", "prompt", {"tokens": b"abc"}),
        ("transfer_requested", "prompt", {"tokens": b""}),
        ("transfer_requested", "prompt", {"text": ""}),
        ("transfer_requested", "prompt", {"messages": []}),
        ("transfer_requested", "prompt", {"messages": [{"role": "user"}]}),
        ("transfer_requested", "prompt", {"tokens": b"abcd", "text": "x"}),
        ("transfer_verdict", "verdict", "perhaps"),
        ("transfer_outcome", "total_s", -1.0),
        ("facts", "n", 3),
        ("facts", "ticket", b"\x00" * 15),
        ("facts", "lo", "text"),
        ("facts", "details", [{"ticket": 1}]),
        ("open", "members", [["m0", 7, 0]]),
        ("open", "members", [["m0", "7", 0, 1]]),
        ("settle", "members", [["m0", 0, 0, 1]]),
        ("settle", "members", [["m0", 7, 65_536, 1]]),
        ("void", "members", [["m0", 7, 0]]),
        ("visible", "members", [["m0", 7, 0, -1]]),
        ("term", "member", "é" * 30),
        ("term", "epoch", 0),
        ("shares", "shares", [["t", 0, 1, 0, 0, 0]]),
        ("shares", "shares", [["", 0, 1, 0, 0, 0, "open"]]),
        ("shares", "shares", [["t", 65_536, 1, 0, 0, 0, "open"]]),
        ("shares", "shares", [["t", 0, 1, 2**32, 0, 0, "open"]]),
        ("shares", "shares", [["t", 0, 1, 0, 0, 0, "closed"]]),
        ("shares", "shares", [["t", "0", 1, 0, 0, 0, "open"]]),
        ("shares", "head", -1),
        ("plan_asked", "transfer", ""),
        ("plan", "request_hash", "0" * 31),
        ("plan", "request_hash", ""),
        ("plan", "source", "é" * 30),
        ("plan", "source", ""),
        ("plan", "tokens", b"abc"),
        ("plan", "tokens", b""),
        ("plan", "request_id", ""),
        ("plan", "on_miss", "maybe"),
        ("plan", "remaining_s", -1.0),
        ("lend_requested", "wait_s", 2.5),
        ("lend_requested", "process", {"pid": 0, "start_ticks": 1, "boot_id": "", "pid_namespace": 1}),
        ("lease_released", "nonce", b"x" * 17),
        ("instance", "ranks", 0),
        ("stats", "counters", {"x": [1]}),
    ],
)
def test_a_field_that_does_not_fit_is_refused_and_named(name: str, field: str, value: object) -> None:
    with pytest.raises(PeerError, match="does not fit its kind") as caught:
        decode(changed(name, **{field: value}))
    assert str(caught.value.details["problem"]).split(".")[0].split(":")[0] in {field, "event"}


share_rows = st.tuples(
    st.text(min_size=1, max_size=200).filter(lambda text: text.isprintable()),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["open", "settled", "visible", "void"]),
    st.text(max_size=200).filter(lambda text: text.isprintable()),
)


@settings(deadline=None)
@given(st.lists(share_rows, max_size=20), st.integers(0, 2**63 - 1))
def test_what_a_member_holds_comes_back_row_by_row(
    rows: list[tuple[str, int, int, int, int, int, Literal["open", "settled", "visible", "void"], str]], head: int
) -> None:
    body = events.SharesReported(term=1, head=head, shares=tuple(rows))
    assert decode(encode(header("shares"), body)).body == body


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1), st.floats(0, 86_400))
def test_a_plan_comes_back_as_it_went(tokens: list[int], remaining_s: float) -> None:
    body = events.PlanAnswered(
        transfer="t",
        known=True,
        request_id="r",
        request_hash="0" * 32,
        source="a",
        tokens=column(tokens, 4),
        remaining_s=remaining_s,
    )
    assert decode(encode(header("plan"), body)).body == body


def test_the_ways_to_give_a_prompt_never_collide() -> None:
    texts = {
        Prompt(text='[["user","x"]]').canonical(),
        Prompt(messages=(Message(role="user", content="x"),)).canonical(),
        Prompt(tokens=b"user").canonical(),
        Prompt(text="user").canonical(),
        Prompt(messages=(Message(role="userx", content=""),)).canonical(),
    }
    assert len(texts) == 5


def test_a_prompt_is_given_in_exactly_one_way() -> None:
    with pytest.raises(ValidationError, match="exactly one"):
        Prompt(text="x", tokens=b"abcd")
    with pytest.raises(ValidationError, match="exactly one"):
        Prompt()


def test_reader_keys_that_differ_in_one_field_are_different() -> None:
    # P4, contract 48
    key = ReaderKey(instance="b", member="m0", epoch=7, transfer="t", attempt=1, rank=0)
    others = [key.model_copy(update={name: value}) for name, value in (("epoch", 8), ("attempt", 2), ("rank", 1))]
    assert key not in others
    assert len({key, *others}) == 4


# ---------------------------------------------------------------------------------------------------------- columns


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1)), st.sampled_from([2, 4, 8]))
def test_a_column_comes_back_as_it_went(values: list[int], width: int) -> None:
    assert width in {2, 4, 8}
    data = column(values, width)  # type: ignore[arg-type]
    assert len(data) == width * len(values)
    assert from_column(data, width) == tuple(values)  # type: ignore[arg-type]


def test_columns_are_little_endian() -> None:
    assert column([1, 0x0203], 2) == b"\x01\x00\x03\x02"
    assert column([2**64 - 1], 8) == b"\xff" * 8


@pytest.mark.parametrize(("value", "width"), [(-1, 4), (2**16, 2), (2**32, 4), (2**64, 8)])
def test_a_number_that_does_not_fit_its_column_overflows(value: int, width: int) -> None:
    with pytest.raises(OverflowError):
        column([value], width)  # type: ignore[arg-type]


def test_a_column_of_a_broken_length_is_refused() -> None:
    with pytest.raises(PeerError, match="multiple of its width"):
        from_column(b"abc", 2)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**63), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)
        ),
        max_size=50,
    )
)
def test_a_batch_of_facts_comes_back_line_by_line(lines: list[tuple[int, int, int, int]]) -> None:
    body = events.FactsSeen(
        n=len(lines),
        ticket=column((line[0] for line in lines), 8),
        rank=column((line[1] for line in lines), 2),
        bits=column((line[2] for line in lines), 4),
        lo=column((line[3] for line in lines), 4),
        hi=column((line[3] for line in lines), 4),
    )
    back = decode(encode(header("facts"), body)).body
    assert isinstance(back, events.FactsSeen)
    columns = (from_column(back.ticket, 8), from_column(back.rank, 2), from_column(back.bits, 4))
    assert list(zip(*columns, strict=True)) == [line[:3] for line in lines]


# -------------------------------------------------------------------------------------------------------------- fuzz


def decodes_or_is_refused(data: bytes) -> None:
    """Raise whatever comes that is no PeerError."""
    with contextlib.suppress(PeerError):
        assert decode(data).header.v == 1


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\x81\xa1v\xd6\xff\x00\x00\x00\x00")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x91" * 300)
def test_arbitrary_bytes_are_only_ever_refused(data: bytes) -> None:
    decodes_or_is_refused(data)


leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
values = st.recursive(
    leaves | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_in_any_field_is_only_ever_refused(data: st.DataObject) -> None:
    whole = unpack(data.draw(st.sampled_from(GOLDEN_FILES)).read_bytes())
    body = whole["b"]
    assert isinstance(body, dict)
    for _ in range(data.draw(st.integers(1, 3))):
        target = data.draw(st.sampled_from([whole, body]))
        if target:
            target[data.draw(st.sampled_from(sorted(target)))] = data.draw(values)
    decodes_or_is_refused(pack(whole))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flipped_bytes_are_only_ever_refused_or_another_event(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(GOLDEN_FILES)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_is_refused(bytes(raw))


def test_kinds_are_named_once() -> None:
    assert len(KINDS) == len({body.__name__ for body in KINDS.values()})
    assert all(issubclass(body, Body) for body in KINDS.values())
