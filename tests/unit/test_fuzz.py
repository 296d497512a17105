"""Whatever the bytes, what reads them returns a value or raises the error that it documents."""

import logging
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.codec import pack, unpack
from kvbus.errors import ConfigError, PeerError
from kvbus.events import KINDS
from tests.fuzz import originals, running
from tests.fuzz.mutating import inputs, packed
from tests.fuzz.running import Count, feed, run
from tests.fuzz.targets import Target, targets

TARGETS = {target.name: target for target in targets()}
INPUTS = 250
"""For each reader: some seconds in all."""
FRESH_SEED = random.SystemRandom().randrange(1 << 32)

PLAIN = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=80)
    | st.binary(max_size=80)
)  # fmt: skip
DOCUMENTS = st.dictionaries(
    st.text(max_size=12) | st.sampled_from(sorted({"v", "k", "i", "m", "e", "s", "t", "c", "b", *KINDS})),
    st.recursive(
        PLAIN, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner), max_leaves=8
    ),
    max_size=10,
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each unreadable record is a warning, and there are thousands."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


def faults_of(target: Target, total: int = INPUTS, seed: int = 0) -> list[str]:
    return run([target], total, seed)[target.name].faults


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_changed_inputs_give_a_value_or_the_documented_error(name: str) -> None:
    print(f"seed {FRESH_SEED}")  # noqa: T201 - a failure shows it
    assert faults_of(TARGETS[name], seed=FRESH_SEED) == []


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TARGETS)), st.binary(max_size=600) | DOCUMENTS.map(lambda one: packed(one, b"")))
def test_any_bytes_and_any_document_give_a_value_or_the_documented_error(name: str, data: bytes) -> None:
    count = Count()
    feed(TARGETS[name], data, count)
    assert count.faults == []


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(originals.golden())), st.data())
def test_an_event_with_anything_in_any_field_gives_a_value_or_the_documented_error(
    kind: str, data: st.DataObject
) -> None:
    document = unpack(originals.golden()[kind][0])
    body = document["b"]
    assert isinstance(body, dict)
    whole = data.draw(st.booleans()) or not body
    fields = document if whole else body
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(PLAIN | st.lists(PLAIN, max_size=3) | DOCUMENTS)
    count = Count()
    feed(TARGETS[f"event {kind}"], packed(document, b""), count)
    assert count.faults == []


def test_every_kind_of_event_is_fed() -> None:
    assert {name for name in TARGETS if name.startswith("event ")} == {f"event {kind}" for kind in KINDS}


def test_real_inputs_are_read_so_that_their_changes_reach_far() -> None:
    for target in TARGETS.values():
        count = Count()
        for seed in target.seeds[:1]:
            feed(target, seed, count)
        assert (count.values, count.faults) == (len(target.seeds[:1]), []), target.name


def test_a_seed_feeds_the_same_inputs_again() -> None:
    seeds = originals.golden()["facts"]
    made = [[next(stream) for _ in range(200)] for stream in (inputs(seeds, random.Random(7)) for _ in range(2))]
    assert made[0] == made[1]
    assert len(set(made[0])) > 150


# ---------------------------------------------------------------------------------------------------- planted faults


def test_a_reader_that_lets_a_key_error_out_is_caught() -> None:
    planted = Target("planted", lambda data: unpack(data)["v"], (PeerError,), originals.golden()["facts"])
    (fault,) = faults_of(planted)
    assert fault.startswith("KeyError: 'v', from ")


def test_a_reader_that_does_not_look_at_a_length_is_caught() -> None:
    def read(data: bytes) -> object:
        rank = unpack(data)["b"]["rank"]  # type: ignore[index] # that is the fault
        return int.from_bytes(rank[:2], "little") if len(rank) % 2 == 0 else rank[len(rank)]

    assert faults_of(Target("planted", read, (PeerError, LookupError), originals.golden()["facts"]))


def test_a_reader_that_names_the_wrong_error_is_caught() -> None:
    layout = TARGETS["layout"]
    assert faults_of(Target("planted", layout.read, (PeerError,), layout.seeds))
    assert not faults_of(Target("planted", layout.read, (ConfigError,), layout.seeds))


def test_a_reader_that_takes_too_long_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "CPU_MAX_S", 0.01)
    planted = Target("planted", lambda data: sum(range(3_000_000)) if len(data) > 200 else 0, (), (bytes(150),))
    (fault,) = faults_of(planted)
    assert fault.startswith("took ")


def test_an_event_that_comes_back_as_another_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbus import events

    encode = events.encode
    monkeypatch.setattr(events, "encode", lambda header, body: encode(header.model_copy(update={"s": 0}), body))
    assert faults_of(TARGETS["event facts"], seed=FRESH_SEED)


def test_a_document_that_msgpack_cannot_say_is_left_as_it_was() -> None:
    assert packed({"a": 10**400}, b"before") == b"before"
    assert packed({"a": 1}, b"before") == pack({"a": 1})
