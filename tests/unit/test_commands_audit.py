"""An audit proves or refutes from recorded events alone, names what it refutes by; half a record proves nothing."""

import asyncio
import dataclasses
import io
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.commands.audit import audit_document, audit_log, lines
from kvbus.commands.auditing import Audit, Verdict, audit, displaced
from kvbus.commands.leases import LeaseKey
from kvbus.commands.recordings import LogTap, Record, RecordingWriter, Stored, read_record, write_record
from kvbus.commands.rules import Rule
from kvbus.errors import ConfigError
from kvbus.events import Event, FactsSeen, LeaseGranted, SettleDecided, column, from_column
from kvbus.ledger.facts import Evidence, Fact, FailureClass
from kvbus.ledger.types import Change, Direction, SubmitMode
from kvbus.parts import Body
from kvbus.testing.bus import MemoryBus
from kvbus.topics import Family, Topics
from kvbus.transport import Bus
from tests.tampering import Copy, evidence_of, frame_of, id_in, returns, stored, turned_on, with_frames
from tests.unit.story_parts import TRANSFER, Member, Pair, command, flushed

A1, B1, B2 = LeaseKey("a", "m0", 7, 1), LeaseKey("b", "m0", 7, 1), LeaseKey("b", "m0", 7, 2)


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    memory = MemoryBus()
    yield memory
    await memory.close()


@pytest.fixture
async def whole(bus: Bus) -> Record:
    """The logs after one transfer that settled, and then a write and a read of each engine's own."""
    pair = Pair(bus)
    pair.whole()
    for member in (pair.a, pair.b):
        member.engine_writes()
        member.engine_writes()
    return await recorded(bus, pair.a, pair.b)


async def recorded(bus: Bus, *members: Member) -> Record:
    record = Record()
    async with flushed(*members):
        await LogTap(bus, Topics()).record(record)
    record.end_ns = max(event.header.t for event in record.events()) + 2_000_000_000
    return record


def the_return(record: Record, instance: str, ticket: int) -> Event:
    return next(
        event for event in returns(record) if event.header.i == instance and turned_on(event, Fact.RETURNED, ticket)
    )


def refuted(record: Record, rule: Rule) -> Audit:
    result = audit(record)
    assert result.verdict is Verdict.REFUTED, result.reasons
    assert result.first is not None
    assert result.first.rule is rule, result.first.text
    return result


def incomplete(record: Record) -> str:
    result = audit(record)
    assert result.verdict is Verdict.INCOMPLETE
    return "\n".join(lines(result))


def bits_of(event: Event, change: Callable[[int], int], ticket: int = 1) -> Event:
    """An event with other bits in the line of a lease."""
    body = event.body
    assert isinstance(body, FactsSeen)
    tickets, bits = from_column(body.ticket, 8), from_column(body.bits, 4)
    changed = [change(old) if number == ticket else old for number, old in zip(tickets, bits, strict=True)]
    return dataclasses.replace(event, body=body.model_copy(update={"bits": column(changed, 4)}))


def granted_of(record: Record, instance: str, ticket: int) -> LeaseGranted:
    for event in record.events():
        body = event.body
        if isinstance(body, LeaseGranted) and (event.header.i, body.ticket) == (instance, ticket):
            return body
    raise AssertionError("no such grant")


def exchange(copy: Copy, old: Body, *, instance: str = "b", **fields: object) -> Record:
    """The record with the fields of one instance's body changed."""
    new = old.model_copy(update=fields)

    def change(event: Event) -> Event:
        ours = (event.body, event.header.i) == (old, instance)
        return dataclasses.replace(event, body=new) if ours else event  # type: ignore[arg-type] # of the same kind

    return copy.changed(change).record()


# --------------------------------------------------------------------------------------------------------- it holds


async def test_a_whole_record_is_clean(whole: Record) -> None:
    result = audit(whole)

    assert (result.verdict, result.reasons, result.offences, result.out) == (Verdict.CLEAN, (), (), ())
    assert (result.runs, result.leases, result.returned) == (2, 6, 6)


async def test_a_copy_with_all_numbers_new_is_clean_too(whole: Record) -> None:
    assert audit(Copy.of(whole).record()).verdict is Verdict.CLEAN


async def test_what_is_out_and_explained_does_not_spoil_a_clean_verdict(bus: Bus) -> None:
    pair = Pair(bus)
    pair.begin()
    result = audit(await recorded(bus, pair.a, pair.b))

    assert result.verdict is Verdict.CLEAN
    assert [out.life.key for out in result.out] == [B1, A1]
    assert all(out.why == "no evidence that access has ended is recorded" for out in result.out)
    assert all(2 <= result.age_s(out) < 3 for out in result.out)


async def test_a_lease_whose_member_has_run_anew_is_gone_with_it(bus: Bus) -> None:
    pair = Pair(bus)
    pair.begin()
    again = Member(bus, "a", epoch=8, unix_ns=pair.unix_ns)
    again.engine_writes()
    result = audit(await recorded(bus, pair.a, pair.b, again))

    assert result.verdict is Verdict.CLEAN
    assert {out.life.key: out.why for out in result.out}[A1] == "a/m0 has run anew since, with an empty pool"


async def test_a_failed_return_is_out_and_explained(bus: Bus) -> None:
    member = Member(bus, "a", unix_ns=Pair(bus).unix_ns)
    lease = member.lender.lend(Direction.WRITE, 2)
    lease.faults.plant("release", OSError("gone"))
    ticket = member.holder.take(lease, SubmitMode("engine-write", Direction.WRITE), "engine", now=0.0)
    member.rounds.run()
    member.engine.deliver(ticket)
    member.rounds.run()
    member.rounds.run()
    result = audit(await recorded(bus, member))

    assert result.verdict is Verdict.CLEAN
    assert result.out[0].why == "its return failed, so its lender stopped and retains it"


async def test_what_a_shutdown_abandons_needs_no_decision(bus: Bus) -> None:
    pair = Pair(bus)
    pair.begin()
    for member in (pair.a, pair.b):
        member.ucx.stop(1, [False] * 31, evidence=Evidence.ENDPOINT_DESTROYED) if member is pair.b else None
        member.holder.shutdown(0.0)
        member.rounds.run()
    result = audit(await recorded(bus, pair.a, pair.b))

    assert result.verdict is Verdict.CLEAN
    assert [out.life.key for out in result.out] == [A1]


async def test_cancelled_failed_and_refused_leases_are_clean(bus: Bus) -> None:
    pair = Pair(bus)
    pair.begin()
    pair.b.ucx.stop(1, [True] * 5 + [False] * 26, evidence=Evidence.COMPLETED)
    pair.a.lending.fail(1, FailureClass.PEER_LOST, evidence=Evidence.PROCESS_DEAD)
    refused = pair.b.lender.lend(Direction.WRITE, 3, granted=False)
    pair.b.holder.take(refused, SubmitMode("ucx", Direction.WRITE), now=0.0, peer="a", transfer="b-00000007-2")
    refused.refuse()
    for member in (pair.a, pair.b, pair.a, pair.b):
        member.rounds.run()
    result = audit(await recorded(bus, pair.a, pair.b))

    assert (result.verdict, result.out, result.returned) == (Verdict.CLEAN, (), 3)


async def test_a_backend_that_answers_for_tickets_of_nobody_spoils_nothing(bus: Bus) -> None:
    pair = Pair(bus)
    pair.whole()
    for ticket in (1, 77):  # one that was returned, one that never was
        pair.b.ucx.tell(Change(ticket, 1, None, Evidence.COMPLETED))
        pair.b.rounds.run()
    pair.b.engine_writes()
    result = audit(await recorded(bus, pair.a, pair.b))

    assert (result.verdict, result.out, result.leases) == (Verdict.CLEAN, (), 3)


# ------------------------------------------------------------------------------------------------- returns tampered


RETURNS = [("b", 1), ("a", 1), ("b", 2), ("a", 2)]


@pytest.mark.parametrize(("instance", "ticket"), RETURNS)
async def test_a_duplicated_return_is_named(whole: Record, instance: str, ticket: int) -> None:
    event = the_return(whole, instance, ticket)
    twice = Copy.of(whole).with_second(event).record()
    result = refuted(twice, Rule.RETURNED_ONCE)

    assert result.first is not None
    assert result.first.event.header.event_id == id_in(twice, event)
    assert result.first.lease.ticket == ticket


@pytest.mark.parametrize(("instance", "ticket"), RETURNS)
async def test_a_duplicated_frame_of_a_return_is_named(whole: Record, instance: str, ticket: int) -> None:
    event = the_return(whole, instance, ticket)
    frame = frame_of(whole, event)
    place = whole.stored.index(frame)
    result = refuted(with_frames(whole, [*whole.stored[:place], frame, *whole.stored[place:]]), Rule.RETURNED_ONCE)

    assert result.first is not None
    assert result.first.event == event


@pytest.mark.parametrize(("instance", "ticket"), [("b", 1), ("a", 1), ("b", 2)])
async def test_a_removed_return_is_named(whole: Record, instance: str, ticket: int) -> None:
    event = the_return(whole, instance, ticket)
    result = refuted(Copy.of(whole).without(event).record(), Rule.RETURNED)

    assert result.first is not None
    assert f"the return of T{ticket}@{instance} is missing" in result.first.text


async def test_a_removed_last_return_is_named_and_the_record_not_clean(whole: Record) -> None:
    event = the_return(whole, "b", 3)
    told = incomplete(Copy.of(whole).without(event).record())

    assert "the record ends before the return of T3@b" in told


def is_unmissed(record: Record, frame: Stored) -> bool:
    """Whether no number tells of a frame: it is a log's last message, and no part of one that tells of its others."""
    return frame.parts == 1 and frame.place == max(one.place for one in record.stored if one.family is frame.family)


@pytest.mark.parametrize(("instance", "ticket"), [*RETURNS, ("b", 3)])
async def test_a_removed_frame_of_a_return_is_named_by_its_place(whole: Record, instance: str, ticket: int) -> None:
    frame = frame_of(whole, the_return(whole, instance, ticket))
    told = incomplete(with_frames(whole, [one for one in whole.stored if one != frame]))

    gap = f"part {frame.part + 1} of facts {frame.sequence} missing" if frame.parts > 1 else f"{frame.where} is missing"
    assert gap in told or is_unmissed(whole, frame)
    assert f"T{ticket}@{instance}" in told


@pytest.mark.parametrize(("instance", "ticket"), RETURNS)
async def test_a_return_moved_before_its_evidence_is_named(whole: Record, instance: str, ticket: int) -> None:
    copy = Copy.of(whole)
    event = the_return(whole, instance, ticket)
    moved = copy.moved(event, evidence_of(copy.events, event)).record()
    result = refuted(moved, Rule.EVIDENCE)

    assert result.first is not None
    assert result.first.event.header.event_id == id_in(moved, event)


@pytest.mark.parametrize(("instance", "ticket"), RETURNS)
async def test_a_frame_that_stands_before_its_evidence_is_named(whole: Record, instance: str, ticket: int) -> None:
    event = the_return(whole, instance, ticket)
    frame = frame_of(whole, event)
    rest = [one for one in whole.stored if one != frame]
    events = [one.event() for one in rest]
    place = evidence_of(events, event)

    told = incomplete(with_frames(whole, [*rest[:place], frame, *rest[place:]]))

    assert f"event {event.header.event_id} ({frame.where}) is out of order" in told


# ------------------------------------------------------------------------------------------------------- other rules


async def test_pages_lent_for_writing_while_they_are_lent_are_refuted(bus: Bus) -> None:
    member = Member(bus, "b", unix_ns=Pair(bus).unix_ns)
    for _ in range(2):
        lease = member.lender.lend(Direction.WRITE, 4)
        member.holder.take(lease, SubmitMode("engine-write", Direction.WRITE), "engine", now=0.0, peer="engine")
        member.rounds.run()
    record = await recorded(bus, member)
    assert audit(record).verdict is Verdict.CLEAN

    second = granted_of(record, "b", 2)
    overlapping = exchange(Copy.of(record), second, pages=column([9, 3, 10, 11], 4), counters=column([1, 3, 1, 1], 8))
    result = refuted(overlapping, Rule.WRITE_ALONE)

    assert result.first is not None
    assert (result.first.lease, result.first.other) == (B2, B1)
    assert result.first.event.body.KIND == "lease_granted"  # type: ignore[union-attr]
    assert "T2@b gets page 3 for writing, which T1@b has for writing since event b.m0.7." in result.first.text
    document = audit_document(result)["offence"]
    assert isinstance(document, dict)
    assert document["event_subject"] == "kv.facts.b"
    assert document["lease"]["ticket"], document["other_lease"]["ticket"] == (2, 1)


@pytest.mark.parametrize(
    ("first", "second", "counter", "verdict"),
    [
        ("read", "read", 2, Verdict.CLEAN),
        ("read", "write", 3, Verdict.REFUTED),
        ("write", "read", 4, Verdict.REFUTED),
        ("write", "write", 5, Verdict.REFUTED),
    ],
)
async def test_only_readers_may_share_a_page(bus: Bus, first: str, second: str, counter: int, verdict: Verdict) -> None:
    member = Member(bus, "b", unix_ns=Pair(bus).unix_ns)
    for direction in (first, second):
        if direction == "read":
            member.lend()
        else:
            lease = member.lender.lend(Direction.WRITE, 31)
            member.holder.take(lease, SubmitMode("engine-write", Direction.WRITE), "engine", now=0.0)
            member.rounds.run()
    record = await recorded(bus, member)
    old = granted_of(record, "b", 2)
    pages = granted_of(record, "b", 1).pages
    result = audit(exchange(Copy.of(record), old, pages=pages, counters=column([counter] * 31, 8)))

    assert result.verdict is verdict
    assert verdict is Verdict.CLEAN or result.offences[0].rule is Rule.WRITE_ALONE


@pytest.mark.parametrize(
    ("counter", "words"),
    [
        (1, "in generation 1, after T2@b had it in generation 1"),
        (2, "gets page 31 for writing in generation 2"),
        (0, "gets page 31 for writing in generation 0"),
    ],
)
async def test_a_counter_that_goes_back_or_is_even_for_writing_is_refuted(
    whole: Record, counter: int, words: str
) -> None:
    last = granted_of(whole, "b", 3)
    pages = granted_of(whole, "b", 2).pages
    result = refuted(exchange(Copy.of(whole), last, pages=pages, counters=column([counter] * 4, 8)), Rule.COUNTER)

    assert result.first is not None
    assert words in result.first.text


async def test_an_odd_counter_for_reading_is_refuted(whole: Record) -> None:
    refuted(
        exchange(Copy.of(whole), granted_of(whole, "a", 1), instance="a", counters=column([3] * 31, 8)), Rule.COUNTER
    )


async def test_a_second_grant_is_refuted(whole: Record) -> None:
    copy = Copy.of(whole)
    event = next(one for one in copy.events if isinstance(one.body, LeaseGranted))

    refuted(copy.with_second(event).record(), Rule.GRANTED_ONCE)


async def test_a_write_returned_unsettled_is_refuted(whole: Record) -> None:
    event = the_return(whole, "b", 1)
    record = Copy.of(whole).changed(
        lambda one: bits_of(one, lambda bits: bits & ~Fact.SETTLED) if one == event else one
    )

    refuted(record.record(), Rule.SETTLED)


async def test_a_write_returned_without_its_decision_is_refuted(whole: Record) -> None:
    copy = Copy.of(whole)
    decision = next(one for one in copy.events if isinstance(one.body, SettleDecided))
    late = copy.moved(decision, len(copy.events) - 1).record()
    result = refuted(late, Rule.SETTLED)

    assert result.first is not None
    assert f"no decision about {TRANSFER} precedes it" in result.first.text
    refuted(copy.without(decision).record(), Rule.SETTLED)


@pytest.mark.parametrize("ticket", [2, 77])
async def test_a_decision_about_another_ticket_is_refuted(whole: Record, ticket: int) -> None:
    decision = next(event.body for event in whole.events() if isinstance(event.body, SettleDecided))
    result = refuted(exchange(Copy.of(whole), decision, members=(("m0", 7, 0, ticket),)), Rule.DECIDED)

    assert result.first is not None
    assert f"settles T{ticket}@b, which {TRANSFER} never opened" in result.first.text


async def test_a_decision_of_another_member_counts_whatever_the_clocks_say(whole: Record) -> None:
    copy = Copy.of(whole).changed(of_coordinator)
    assert audit(copy.record()).verdict is Verdict.CLEAN

    decision = next(one for one in copy.events if isinstance(one.body, SettleDecided))
    late = copy.moved(decision, len(copy.events) - 1)
    assert audit(late.record()).verdict is Verdict.CLEAN
    refuted(copy.without(decision).record(), Rule.SETTLED)

    event = the_return(copy.record(), "b", 1)
    without = [one for one in copy.events if one.body != event.body or one.header.i != "b"]
    assert "before the return of T1@b" in incomplete(Copy(without).record())


def of_coordinator(event: Event) -> Event:
    """The same event, but decisions are another member's."""
    is_decision = event.header.k in {"open", "settle"}
    return dataclasses.replace(event, header=event.header.model_copy(update={"m": "m9"})) if is_decision else event


async def test_a_decision_before_access_has_ended_is_refuted(whole: Record) -> None:
    copy = Copy.of(whole)
    decision = next(one for one in copy.events if isinstance(one.body, SettleDecided))
    event = the_return(whole, "b", 1)

    refuted(copy.moved(decision, evidence_of(copy.events, event)).record(), Rule.DECIDED)


@pytest.mark.parametrize("more", [Fact.FAILED, Fact.ABANDONED])
async def test_what_failed_or_was_given_up_must_not_be_consumed(bus: Bus, more: Fact) -> None:
    pair = Pair(bus)
    pair.source_killed()
    pair.b.engine_writes()
    record = await recorded(bus, pair.a, pair.b)
    event = the_return(record, "b", 1)
    consumed = Copy.of(record).changed(
        lambda one: bits_of(one, lambda bits: bits | Fact.CONSUMED | more) if one == event else one
    )

    refuted(consumed.record(), Rule.CONSUMED)


async def test_a_fact_that_turns_off_is_refuted(whole: Record) -> None:
    event = the_return(whole, "b", 1)
    record = Copy.of(whole).changed(
        lambda one: bits_of(one, lambda bits: bits & ~Fact.SUBMITTED) if one == event else one
    )

    refuted(record.record(), Rule.FACTS_STAY)


async def test_news_of_a_lease_after_its_return_is_refuted_and_names_the_return(whole: Record) -> None:
    copy = Copy.of(whole)
    event = the_return(whole, "a", 1)
    attempt = next(one for one in copy.events if one.header.k == "attempt" and one.header.i == "a")
    moved = copy.moved(attempt, copy.events.index(event)).record()
    result = refuted(moved, Rule.RETURNED_LAST)

    assert result.first is not None
    assert result.first.event.header.event_id == id_in(moved, event)


async def test_only_what_happened_since_a_time_is_judged(whole: Record) -> None:
    twice = Copy.of(whole).with_second(the_return(whole, "b", 1)).record()
    first = audit(twice).first
    assert first is not None

    assert audit(twice, since_ns=first.event.header.t).verdict is Verdict.REFUTED
    assert audit(twice, since_ns=first.event.header.t + 1).verdict is Verdict.CLEAN


# -------------------------------------------------------------------------------------------------- half a record


async def test_a_log_whose_beginning_is_trimmed_proves_nothing(whole: Record) -> None:
    last = max(one.sequence for one in whole.stored if one.family is Family.FACTS)
    cut = [one for one in whole.stored if one.sequence == last or one.family is Family.SETTLE]
    missing = "facts 1 is" if last == 2 else f"facts 1 to {last - 1} is"
    assert f"{missing} missing" in incomplete(with_frames(whole, cut))

    known = dataclasses.replace(with_frames(whole, cut), after={Family.FACTS: 3, Family.SETTLE: 0})
    assert "nothing is known of what was before" in incomplete(known)


async def test_a_run_whose_first_leases_are_not_recorded_proves_nothing(whole: Record) -> None:
    copy = Copy.of(whole)
    first = next(one for one in copy.events if one.header.k == "facts" and one.header.i == "a")

    assert "the beginning of T1@a is not recorded" in incomplete(copy.without(first).record())


async def test_no_event_that_ownership_rests_on_may_be_missing(whole: Record) -> None:
    rows = {"lease_granted", "attempt", "outcome", "open", "settle"}
    for event in Copy.of(whole).events:
        begins = turned_on(event, Fact.TAKEN) and not turned_on(event, Fact.GRANTED)
        if event.header.k in rows or begins or turned_on(event, Fact.RETURNED):
            assert audit(Copy.of(whole).without(event).record()).verdict is not Verdict.CLEAN, event


async def test_no_frame_may_be_missing_but_the_last_of_a_log(whole: Record) -> None:
    for frame in whole.stored[:-1]:
        cut = with_frames(whole, [one for one in whole.stored if one != frame])
        assert is_unmissed(whole, frame) or audit(cut).verdict is not Verdict.CLEAN, frame


async def test_no_two_frames_may_change_places(whole: Record) -> None:
    for family in Family.FACTS, Family.SETTLE:
        places = [place for place, one in enumerate(whole.stored) if one.family is family]
        for left, right in itertools.pairwise(places):
            frames = list(whole.stored)
            frames[left], frames[right] = frames[right], frames[left]
            assert "is out of order" in incomplete(with_frames(whole, frames))


async def test_what_cannot_be_read_proves_nothing(whole: Record) -> None:
    frames = [*whole.stored, stored(Family.FACTS, 1 + max(one.sequence for one in whole.stored), "b", b"noise")]
    assert "cannot be read" in incomplete(with_frames(whole, frames))

    wrong = dataclasses.replace(whole.stored[0], subject="kv.facts.nobody")
    assert "one instance speaks on the subject of another" in incomplete(with_frames(whole, [wrong, *whole.stored[1:]]))


async def test_a_missing_event_explains_but_never_excuses(whole: Record) -> None:
    """What no missing event could explain still refutes, what one could is told as not proved."""
    event = the_return(whole, "b", 1)
    twice = Copy.of(whole).with_second(event).record()
    assert audit(with_frames(twice, twice.stored[1:])).verdict is Verdict.REFUTED

    without = Copy.of(whole).without(event).record()
    assert "not proved, as events are missing: the return of T1@b is missing" in incomplete(
        with_frames(without, without.stored[1:])
    )


async def test_a_repeat_that_the_broker_stored_is_no_second_return(bus: Bus) -> None:
    pair = Pair(bus)
    pair.whole()
    async with flushed(pair.a, pair.b):
        last = (await bus.history(Topics().facts("a")))[-1]
        await bus.store(last.subject, last.data, message_id="forgotten")
        _, result = await audit_log(bus, Topics())

    assert result.verdict is Verdict.CLEAN


async def test_logs_in_which_nothing_is_recorded_prove_nothing(bus: Bus) -> None:
    _, result = await audit_log(bus, Topics())
    assert result.verdict is Verdict.INCOMPLETE
    assert any("no event is recorded" in line and "--prefix" in line for line in lines(result))


def test_the_fewest_places_are_displaced() -> None:
    pick = random.Random(7)
    assert displaced([]) == []
    assert displaced([1, 2, 9, 3, 4]) == [2]
    assert displaced([1, 5, 2, 3, 4, 6]) == [1]
    for _ in range(200):
        numbers = pick.sample(range(100), 8)
        places = displaced(numbers)
        kept = [number for place, number in enumerate(numbers) if place not in places]
        longest = max(
            size
            for size in range(9)
            if any(list(some) == sorted(some) for some in itertools.combinations(numbers, size))
        )
        assert kept == sorted(kept)
        assert len(kept) == longest


# ------------------------------------------------------------------------------------------------------------ files


@pytest.fixture
async def file(whole: Record, tmp_path: Path) -> Path:
    path = tmp_path / "whole.kvbus"
    write_record(path, whole)
    return path


def test_a_recording_gives_back_what_was_written(whole: Record, file: Path) -> None:
    read = read_record(file)

    assert read == whole
    assert audit(read).verdict is Verdict.CLEAN


def test_a_file_that_was_cut_off_anywhere_is_never_clean(file: Path) -> None:
    data = file.read_bytes()
    pick = random.Random(11)
    for length in [16, len(data) - 1, len(data) - 8, *(pick.randrange(17, len(data)) for _ in range(60))]:
        file.write_bytes(data[:length])
        result = audit(read_record(file))
        assert result.verdict is Verdict.INCOMPLETE, length
        assert any("cut off" in reason or "no header" in reason for reason in result.reasons)


def test_a_bit_that_flipped_anywhere_is_never_clean(file: Path) -> None:
    data = file.read_bytes()
    pick = random.Random(13)
    for place in [*range(24), *(pick.randrange(len(data)) for _ in range(120))]:
        flipped = bytearray(data)
        flipped[place] ^= 1 << pick.randrange(8)
        file.write_bytes(flipped)
        if not flipped.startswith(b"kvbus recording\n"):
            with pytest.raises(ConfigError, match="is no recording"):
                read_record(file)
            continue
        result = audit(read_record(file))
        assert result.verdict is Verdict.INCOMPLETE, place
        assert result.reasons


def test_a_frame_that_was_cut_out_or_put_behind_the_end_is_noticed(whole: Record, file: Path) -> None:
    data = file.read_bytes()
    frame = frame_bytes(whole.stored[-1])
    assert frame in data

    file.write_bytes(data.replace(frame, b""))
    assert "the end mark counts" in incomplete(read_record(file))
    file.write_bytes(data + frame)
    assert "something follows the end mark" in incomplete(read_record(file))


def frame_bytes(stored: Stored) -> bytes:
    """What a file holds of one message."""
    file = io.BytesIO()
    writer = RecordingWriter(file)
    writer.begin()
    start = file.tell()
    writer.add(stored)
    return file.getvalue()[start:]


def test_a_file_that_cannot_take_a_recording_is_an_error_of_settings(tmp_path: Path) -> None:
    record = Record(stored=[stored(Family.FACTS, 1, "b", b"x" * 20_000)])
    for path in (Path("/dev/full"), tmp_path / "none" / "x"):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_record(path, record)


@pytest.mark.parametrize("content", [b"", b"{}", b"kvbus recording"])
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ConfigError, match="is no recording"):
        read_record(tmp_path / "x")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path / "none")


# ---------------------------------------------------------------------------------------------------- as a command


def run(name: str, *arguments: str) -> tuple[int, str, str]:
    with command(name, *arguments) as process:
        out, err = process.communicate(timeout=150)
        return process.returncode, out, err


def test_the_command_ends_with_0_1_or_3(whole: Record, file: Path, tmp_path: Path) -> None:
    event = the_return(whole, "b", 1)
    twice, cut = tmp_path / "twice", tmp_path / "cut"
    write_record(twice, Copy.of(whole).with_second(event).record())
    cut.write_bytes(file.read_bytes()[:-20])

    status, out, err = run("audit", str(file))
    assert (status, err) == (0, "")
    assert out.splitlines()[1] == "clean"

    status, out, _ = run("audit", str(twice), "--json")
    document = json.loads(out)
    assert (status, document["verdict"], document["offence"]["rule"]) == (1, "refuted", "returned_once")
    assert document["offence"]["event"].startswith("b.m0.7.")
    assert document["offence"]["event_log"] == "facts"

    status, out, _ = run("audit", str(cut))
    assert status == 3
    assert "incomplete: the recording was cut off" in out

    status, out, err = run("audit", str(tmp_path / "none"))
    assert (status, out) == (2, "")
    assert "cannot be read" in err


def test_a_story_is_told_from_a_recording(file: Path) -> None:
    status, out, err = run("story", TRANSFER, "--file", str(file))

    assert (status, err) == (0, "")
    assert "Nothing is out." in out


async def test_logs_of_a_real_broker_are_audited_and_recorded(broker: EmbeddedBroker, tmp_path: Path) -> None:
    nats = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED)
    await nats.ensure_assets()
    pair = Pair(nats)
    pair.whole()
    async with flushed(pair.a, pair.b):
        pass
    await nats.close()
    door = ("--nats", broker.url, "--token", broker.token)
    path = str(tmp_path / "recording")

    assert (await asyncio.to_thread(run, "audit", *door))[0] == 0
    assert (await asyncio.to_thread(run, "watch", "--once", "--since", "0", "--record", path, *door))[0] == 0
    status, out, _ = await asyncio.to_thread(run, "audit", path, "--json")
    assert (status, json.loads(out)["leases"]) == (0, 2)
    status, _, err = await asyncio.to_thread(run, "audit", path, "--since", "5", *door)
    assert status == 2
    assert "no FILE" in err
