"""An audit of logs that begin late: what began behind their beginning is proved, what began before is only named."""

import asyncio
import dataclasses
import gzip
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.commands import recordings
from kvbus.commands.audit import audit_log, lines
from kvbus.commands.auditing import Audit, Verdict, audit
from kvbus.commands.dumping import logs
from kvbus.commands.lifelines import run_of_event
from kvbus.commands.recordings import LOGS, LogTap, Record, RecordingWriter, read_record, write_record
from kvbus.commands.rules import Rule
from kvbus.events import Event, LeaseGranted, SettleDecided, TransferOpened
from kvbus.ledger.facts import Evidence, Fact
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Family, Topics
from tests.tampering import Copy, beginning, evidence_of, returns, turned_on
from tests.unit.story_parts import Member, Pair, command, flushed

DEADLINE_S = 60.0
HALF_WAY = 4
"""Of eight transfers: what began before the fourth is dropped by the broker."""


def transfers(pair: Pair, numbers: range) -> None:
    """Run some transfers from request to return, two of them at a time, with leases of the engines' own between."""
    for first in numbers[::2]:
        begun = [
            pair.begin(transfer=f"b-00000007-{number}", request_hash=f"{number:032x}") for number in (first, first + 1)
        ]
        pair.a.engine_writes()
        for write, read in begun:
            pair.b.ucx.deliver(write)
            pair.b.rounds.run()
            pair.a.lending.deliver(read, evidence=Evidence.PEER_ACK)
            pair.a.rounds.run()
        pair.b.engine_writes()


async def stored_by(*members: Member, bus: MemoryBus) -> Record:
    record = Record()
    async with flushed(*members):
        await LogTap(bus, Topics()).record(record)
    return Copy.of(record).record()  # one event in a message, so that a log may begin with any of them


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    memory = MemoryBus()
    yield memory
    await memory.close()


@pytest.fixture
async def whole(bus: MemoryBus) -> Record:
    pair = Pair(bus)
    transfers(pair, range(8))
    record = await stored_by(pair.a, pair.b, bus=bus)
    assert audit(record).verdict is Verdict.CLEAN
    return record


@pytest.fixture
async def small(bus: MemoryBus) -> Record:
    """As `whole`, of four transfers: for going through all places where logs may begin."""
    pair = Pair(bus)
    transfers(pair, range(4))
    return await stored_by(pair.a, pair.b, bus=bus)


def at_half(record: Record) -> Record:
    """Both logs begin where the fourth transfer was accepted."""
    events = Copy.of(record).events
    place = next(place for place, one in enumerate(events) if getattr(one.body, "transfer", "")[-1:] == f"{HALF_WAY}")
    dropped = {one.header.event_id for one in events[:place]}
    gone = [one for one in record.stored if one.event().header.event_id in dropped]
    last = {log: max((one.sequence for one in gone if one.family is log), default=0) for log in LOGS}
    return beginning(record, facts=last[Family.FACTS], settle=last[Family.SETTLE])


def numbers_of(record: Record, log: Family) -> int:
    return sum(one.family is log for one in record.stored)


def told(result: Audit) -> str:
    return "\n".join(lines(result))


# ------------------------------------------------------------------------------------------------------ where it begins


async def test_wherever_the_facts_begin_what_is_there_is_clean_since_then_and_never_simply_clean(small: Record) -> None:
    leases = audit(small).leases
    for facts in range(1, numbers_of(small, Family.FACTS)):
        late = beginning(small, facts=facts)
        result = audit(late)
        assert result.verdict is Verdict.CLEAN_SINCE, (facts, told(result))
        assert result.since_ns == next(one for one in late.stored if one.family is Family.FACTS).event().header.t
        assert result.leases + len(result.before) <= leases
        assert result.returned == result.leases, "all that it counts came back"


async def test_wherever_the_two_logs_begin_nothing_is_refuted_for_what_is_not_there(small: Record) -> None:
    facts, settle = (numbers_of(small, log) for log in LOGS)
    for pair in itertools.product(range(0, facts, 7), range(settle + 1)):
        result = audit(beginning(small, facts=pair[0], settle=pair[1]))
        expected = Verdict.CLEAN_SINCE if any(pair) else Verdict.CLEAN
        assert result.verdict is expected, (pair, told(result))


async def test_what_began_before_is_named_and_not_in_the_counts(bus: MemoryBus) -> None:
    pair = Pair(bus)
    write, read = pair.begin(transfer="b-00000007-99", request_hash="f" * 32)
    transfers(pair, range(2))
    record = await stored_by(pair.a, pair.b, bus=bus)
    granted = [one for one in record.stored if isinstance(one.event().body, LeaseGranted)]
    result = audit(beginning(record, facts=granted[1].sequence, settle=2))

    assert result.verdict is Verdict.CLEAN_SINCE
    assert {(key.instance, key.ticket) for key in result.before} >= {("b", write)}
    assert read == 1
    assert all(out.life.key in result.before for out in result.out), "what began within it came back"
    assert result.leases == result.returned >= 4
    assert result.leases + len(result.before) == 8
    assert f"began before the logs, and is not proved: T{write}@b" in told(result)


async def test_a_log_that_holds_nothing_any_more_is_clean_since_its_end(whole: Record) -> None:
    facts, settle = (numbers_of(whole, log) for log in LOGS)
    result = audit(beginning(whole, facts=facts, settle=settle))

    assert (result.verdict, result.since_ns, result.leases) == (Verdict.CLEAN_SINCE, whole.end_ns, 0)


async def test_a_later_run_of_a_member_began_within_the_log_so_its_first_leases_must_be_there(bus: MemoryBus) -> None:
    pair = Pair(bus)
    pair.a.engine_writes()
    again = Member(bus, "a", epoch=8, unix_ns=pair.unix_ns)
    for _ in range(3):
        again.engine_writes()
    record = await stored_by(pair.a, again, bus=bus)
    assert audit(beginning(record, facts=2)).verdict is Verdict.CLEAN_SINCE

    copy = Copy.of(record)
    of_it = [one for one in copy.events if one.header.e == 8]
    end = next(place for place, one in enumerate(of_it) if turned_on(one, Fact.RETURNED, 1))
    gone = of_it[: end + 1]
    late = audit(beginning(Copy([one for one in copy.events if one not in gone]).record(), facts=2))
    assert late.verdict is Verdict.INCOMPLETE
    assert "nothing of T1 of a/m0 in epoch 8 is recorded" in told(late)


# ------------------------------------------------------------------------------------------- who says where it begins


async def test_a_record_whose_head_is_gone_and_that_does_not_say_why_stays_incomplete(whole: Record) -> None:
    late = at_half(whole)
    assert audit(late).verdict is Verdict.CLEAN_SINCE

    cut = audit(dataclasses.replace(late, begins=dict.fromkeys(LOGS, 0)))
    assert cut.verdict is Verdict.INCOMPLETE
    assert "facts 1 to" in told(cut)
    more = dataclasses.replace(late, stored=late.stored[5:])
    assert audit(more).verdict is Verdict.INCOMPLETE, "more is gone than the log's beginning says"


async def test_a_hole_in_the_middle_stays_a_hole(whole: Record) -> None:
    late = at_half(whole)
    of_facts = [one for one in late.stored if one.family is Family.FACTS]
    for gone in of_facts[1:-1:7]:
        result = audit(dataclasses.replace(late, stored=[one for one in late.stored if one != gone]))
        assert result.verdict is Verdict.INCOMPLETE
        assert f"facts {gone.sequence} is missing" in told(result)


async def test_a_recording_says_where_the_logs_began_and_nothing_else_makes_it_so(
    whole: Record, tmp_path: Path
) -> None:
    late, path = at_half(whole), tmp_path / "late"
    write_record(path, late)
    assert read_record(path) == late
    assert audit(read_record(path)).verdict is Verdict.CLEAN_SINCE
    frames = list(frames_of(path.read_bytes()))
    assert [b"begins" in frame for frame in frames[:5]] == [False, False, True, True, False]

    def with_frames(some: list[bytes]) -> Audit:
        path.write_bytes(b"".join(some))
        return audit(read_record(path))

    assert with_frames(frames).verdict is Verdict.CLEAN_SINCE
    for place in (2, 3):
        assert with_frames([one for one in frames if one != frames[place]]).verdict is Verdict.INCOMPLETE
    for cut in range(3, len(frames), 9):  # a file that lost its head, but for what every recording begins with
        result = with_frames([*frames[:2], *frames[cut:]])
        assert result.verdict is Verdict.INCOMPLETE, cut
    moved = with_frames([*frames[:2], frames[3], *frames[4:30], frames[2], *frames[30:]])
    assert moved.verdict is Verdict.INCOMPLETE
    assert "in the middle of a log" in told(moved)


def frames_of(data: bytes) -> Iterator[bytes]:
    """The magic word of a recording, and then its frames."""
    place = len(b"kvbus recording\n")
    yield data[:place]
    while place < len(data):
        length = 8 + int.from_bytes(data[place : place + 4], "little")
        yield data[place : place + length]
        place += length


def test_a_beginning_is_written_once_and_before_the_first_message(tmp_path: Path) -> None:
    path = tmp_path / "x"
    writer = RecordingWriter.create(path)
    writer.begin()
    for begins in (0, 7, 7, 9):
        writer.log_begins({Family.FACTS: begins})
    writer.end(1)

    assert read_record(path).begins == {Family.FACTS: 7, Family.SETTLE: 0}
    assert read_record(path).faults == []


# ---------------------------------------------------------------------------------------------- what is there, refutes


def fresh(record: Record) -> list[Event]:
    """The returns in the second half of a record, of leases that began there."""
    before = {(key.instance, key.ticket) for key in audit(at_half(record)).before}
    found = [
        event
        for event in returns(at_half(record))
        for ticket in range(1, 20)
        if turned_on(event, Fact.RETURNED, ticket) and (event.header.i, ticket) not in before
    ]
    assert len(found) >= 10
    return found


async def test_what_breaks_a_rule_behind_the_beginning_is_refuted_as_ever(whole: Record) -> None:
    copy = Copy.of(whole)
    for event in fresh(whole):
        same = next(one for one in copy.events if (one.body, run_of_event(one)) == (event.body, run_of_event(event)))
        twice = audit(at_half(copy.with_second(same).record()))
        assert (twice.verdict, twice.offences[0].rule) == (Verdict.REFUTED, Rule.RETURNED_ONCE)

        without = audit(at_half(copy.without(same).record()))
        assert without.verdict in {Verdict.REFUTED, Verdict.INCOMPLETE}
        assert "return of T" in told(without)

        hasty = audit(at_half(copy.moved(same, evidence_of(copy.events, same)).record()))
        assert (hasty.verdict, hasty.offences[0].rule) == (Verdict.REFUTED, Rule.EVIDENCE), told(hasty)


async def test_a_decision_that_is_missing_behind_the_beginning_is_noticed(whole: Record) -> None:
    copy = Copy.of(whole)
    decided = [one for one in copy.events if isinstance(one.body, TransferOpened | SettleDecided)]
    missed = [one for one in decided if getattr(one.body, "transfer", "")[-1:] in {"6", "7"}]
    assert len(missed) == 4
    for event in missed:
        result = audit(at_half(copy.without(event).record()))
        assert result.verdict is not Verdict.CLEAN_SINCE, event
        number = getattr(event.body, "n", 0)
        assert number == 16 or f"decision {number} of b, term 7, is not recorded" in told(result), "16 is the last one"


async def test_a_transfer_that_was_never_opened_is_not_taken_for_one_that_was_opened_before(whole: Record) -> None:
    """Its decisions count up without a hole, so that only what came before them tells the two apart."""
    copy = Copy.of(whole)
    opening = next(one for one in copy.events if isinstance(one.body, TransferOpened) and one.body.transfer[-1] == "7")

    def closed_up(event: Event) -> Event:
        body = event.body
        if isinstance(body, TransferOpened | SettleDecided) and body.n > getattr(opening.body, "n", 0):
            return dataclasses.replace(event, body=body.model_copy(update={"n": body.n - 1}))
        return event

    unopened = copy.without(opening).changed(closed_up).record()
    assert audit(unopened).verdict is Verdict.REFUTED
    late = audit(at_half(unopened))
    assert (late.verdict, late.offences[0].rule) == (Verdict.REFUTED, Rule.DECIDED), told(late)
    settle = numbers_of(unopened, Family.SETTLE)
    unknown = audit(beginning(unopened, facts=0, settle=settle - 1))
    assert unknown.verdict is Verdict.CLEAN_SINCE, "it may have been opened before the only decision that is left"
    assert {key.instance for key in unknown.before} == {"b"}


# -------------------------------------------------------------------------------------------------- the logs themselves


async def test_logs_that_have_aged_at_the_broker_are_audited_from_where_they_begin() -> None:
    now = 0.0
    broker = MemoryBroker(clock=lambda: now)
    broker.log_age_max_s = 3600.0
    bus = broker.connect()
    pair = Pair(bus)
    transfers(pair, range(4))
    async with flushed(pair.a, pair.b):
        _, first = await audit_log(bus, Topics())
        assert first.verdict is Verdict.CLEAN
        now = 3000.0
        transfers(pair, range(4, 8))
        for member in (pair.a, pair.b):
            assert await member.recorder.flush(DEADLINE_S)
        now = 4000.0
        record, late = await audit_log(bus, Topics())

    assert all(record.begins.values())
    assert (late.verdict, late.before) == (Verdict.CLEAN_SINCE, ())
    assert (late.leases, first.leases) == (12, 12)
    await bus.close()


async def test_of_more_events_than_are_read_at_once_the_newest_are_audited(
    bus: MemoryBus, whole: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = numbers_of(whole, Family.FACTS) - 1
    monkeypatch.setattr(recordings, "EVENTS_MAX", most)
    record = Record()
    await LogTap(bus, Topics()).record(record)

    assert 0 < numbers_of(record, Family.FACTS) <= most
    assert record.begins[Family.FACTS] == min(one.sequence for one in record.stored if one.family is Family.FACTS) - 1
    assert audit(record).verdict is Verdict.CLEAN_SINCE


def run(name: str, *arguments: str) -> tuple[int, str, str]:
    with command(name, *arguments) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err


@pytest.mark.slow
async def test_a_real_brokers_log_that_begins_late_is_told_so_live_recorded_and_dumped(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    nats = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED)
    await nats.ensure_assets()
    pair = Pair(nats)
    transfers(pair, range(2))
    async with flushed(pair.a, pair.b):
        for stream in ("KVB_FACTS", "KVB_SETTLE"):  # as its age would have it
            answer = json.loads(await nats.ask(f"$JS.API.STREAM.PURGE.{stream}", b"{}", wait_s=DEADLINE_S))
            assert answer["success"] is True
        transfers(pair, range(2, 4))
        for member in (pair.a, pair.b):
            assert await member.recorder.flush(DEADLINE_S)
    dumped = tmp_path / "dumped"
    dumped.write_bytes(gzip.decompress(await logs(nats, Topics(), 0)))
    await nats.close()
    door = ("--nats", broker.url, "--token", broker.token)
    path = str(tmp_path / "recording")

    status, out, _ = await asyncio.to_thread(run, "audit", *door)
    assert status == 0
    assert out.splitlines()[1].startswith("clean since 20")
    assert out.splitlines()[1].endswith(" UTC, where the logs begin")
    assert (await asyncio.to_thread(run, "watch", "--once", "--since", "0", "--record", path, *door))[0] == 0
    status, out, _ = await asyncio.to_thread(run, "audit", path, "--json")
    document = json.loads(out)
    assert (status, document["verdict"], document["leases"], document["before_count"]) == (0, "clean since", 6, 0)
    assert document["since_unix_s"] > 0
    assert audit(read_record(dumped)).verdict is Verdict.CLEAN_SINCE
