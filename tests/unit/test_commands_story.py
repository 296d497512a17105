"""A transfer's story is told from recorded events alone, and what was not recorded is named, never made up."""

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from rich.console import Console

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.commands.rendering import candidate_line, print_story
from kvbus.commands.stories import Lane, Story, tell
from kvbus.commands.story_documents import not_found_document, story_document
from kvbus.commands.trails import NotFound, in_order
from kvbus.events import (
    AttemptMade,
    Event,
    FactsSeen,
    Header,
    LeaseGranted,
    OutcomeFixed,
    SettleDecided,
    TransferOpened,
    TransferOutcome,
    TransferRequested,
    TransferStep,
    TransferVerdict,
    column,
    decode,
    encode,
    from_column,
)
from kvbus.ledger.facts import Fact
from kvbus.parts import Body, Prompt
from kvbus.testing.bus import MemoryBus
from kvbus.transport import Bus
from tests.unit.story_parts import BEGAN_NS, BLOCKS, HASH, REQUEST, TRANSFER, Member, Pair, command, flushed


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    memory = MemoryBus()
    yield memory
    await memory.close()


@pytest.fixture
async def whole(bus: Bus) -> list[Event]:
    """The trail of one transfer that settled."""
    pair = Pair(bus)
    pair.whole()
    return await pair.events()


def told(events: list[Event], wanted: str = TRANSFER) -> Story:
    story = tell(events, wanted)
    assert isinstance(story, Story), story
    return story


def not_told(events: list[Event], wanted: str) -> NotFound:
    answer = tell(events, wanted)
    assert isinstance(answer, NotFound), answer
    return answer


def turns_on(event: Event, fact: Fact, instance: str) -> bool:
    body = event.body
    ours = isinstance(body, FactsSeen) and event.header.i == instance
    return ours and isinstance(body, FactsSeen) and any(bits & fact for bits in from_column(body.bits, 4))


def made(body: Body, *, instance: str = "b", epoch: int = 7, s: int = 1_000, after_s: float = 60.0) -> Event:
    header = Header(k=body.KIND, i=instance, m="m0", e=epoch, s=s, t=BEGAN_NS + int(after_s * 1e9))
    return decode(encode(header, body))


def line(ticket: int, bits: int, **more: int) -> FactsSeen:
    return FactsSeen(
        n=1,
        ticket=column([ticket], 8),
        rank=column([0], 2),
        bits=column([int(bits)], 4),
        lo=column([more.get("lo", 0)], 4),
        hi=column([more.get("hi", 0)], 4),
    )


# ----------------------------------------------------------------------------------------------------- a whole life


async def test_a_whole_trail_gives_a_complete_story(whole: list[Event]) -> None:
    story = told(whole)

    assert story.complete
    assert not story.missing
    assert not story.contradictions
    assert (story.source, story.destination, story.request_hash, story.request_id) == ("a", "b", HASH, REQUEST)
    assert [(lease.life.key.instance, lease.life.direction, lease.returned) for lease in story.leases] == [
        ("b", "write", True),
        ("a", "read", True),
    ]
    assert story.leases[0].life.pages == tuple(range(BLOCKS))


async def test_the_summary_says_pages_evidence_and_return_for_each_side(whole: list[Event]) -> None:
    summary = told(whole).summary

    assert "settled: 31 of 31 blocks (2.0 MB) came from a to b in 14.2 ms." in summary
    assert "On b, 31 pages were lent for writing (T1): access ended by completed, returned exactly once" in summary
    assert "On a, 31 pages were lent for reading (T1): access ended by peer_ack, returned exactly once." in summary
    assert summary.endswith("Nothing is out.")


async def test_the_lines_name_request_leases_attempts_bytes_evidence_settle_and_return(whole: list[Event]) -> None:
    entries = told(whole).entries
    texts = [f"{entry.lane}|{entry.line.subject} {entry.line.text}" for entry in entries]

    for expected in (
        "requester|request waited 3.0 ms in the queue",
        "destination|transfer accepted from a, on_miss prefill",
        "destination|T1 write 31 pages from a: 0–30, generation 1",
        "source|T1 read 31 pages for b: 0–30, generation 2",
        "data plane|T1 attempt 1 by ucx with a",
        "data plane|T1 attempt 1 delivered: 31/31 blocks, 31.0 kB, access ended by completed",
        "source|T1 attempt 1 delivered, access ended by peer_ack",
        "destination|settle #2 blocks 0–31",
        "destination|T1 settled · consumed · returned, evidence completed",
        "source|T1 returned, evidence peer_ack",
    ):
        assert expected in texts
    assert texts[-1].startswith("source|T1 returned")
    assert entries[0].after_ns == 0
    assert [entry.after_ns for entry in entries] == sorted(entry.after_ns for entry in entries)


async def test_each_fact_is_told_once(whole: list[Event]) -> None:
    words = [
        (entry.line.lease, word)
        for entry in told(whole).entries
        if isinstance(entry.event.body, FactsSeen)
        for word in entry.line.text.replace(", evidence", " ·").split(" · ")
        if word not in {"completed", "peer_ack"} and not word.startswith("returned")
    ]

    assert len(words) == len(set(words))
    assert {word for _, word in words} >= {"taken", "granted", "submitted", "delivered", "access_ended", "settled"}


async def test_order_and_repetition_of_the_events_do_not_matter(whole: list[Event]) -> None:
    shuffled = whole * 2
    random.Random(7).shuffle(shuffled)

    assert story_document(told(shuffled)) == story_document(told(whole))


async def test_a_clock_that_is_set_back_does_not_put_an_event_before_its_own_past() -> None:
    step = TransferStep(transfer=TRANSFER, request_hash=HASH, step="accepted")
    events = [made(step, s=s, after_s=after_s) for s, after_s in ((3, 1.0), (1, 5.0), (2, 0.0))]

    assert [event.header.s for event in in_order(events)] == [1, 2, 3]


async def test_other_transfers_and_the_engines_own_leases_stay_out(bus: Bus) -> None:
    pair = Pair(bus)
    pair.a.engine_writes()
    pair.begin(transfer="b-00000007-0", request_hash="1" * 32)
    pair.whole()
    story = told(await pair.events())

    assert story.complete
    assert {lease.life.key.ticket for lease in story.leases} == {2, 3}


async def test_a_request_and_its_verdict_stand_in_the_requesters_lane_where_they_are_recorded(
    whole: list[Event],
) -> None:
    request = TransferRequested(
        request_id=REQUEST, request_hash=HASH, requester="r", source="a", destination="b", prompt=Prompt(text="hello")
    )
    verdict = TransferVerdict(request_id=REQUEST, request_hash=HASH, verdict="accepted", transfer=TRANSFER)
    story = told([*whole, made(request, instance="r", s=1), made(verdict, s=2_000)])

    assert [entry.line.subject for entry in story.entries if entry.lane is Lane.REQUESTER] == ["request", "verdict"]
    assert story.complete


# ------------------------------------------------------------------------------------------------------ incomplete


async def test_without_the_return_event_the_story_says_which_return_is_missing(whole: list[Event]) -> None:
    story = told([event for event in whole if not turns_on(event, Fact.RETURNED, "b")])

    assert not story.complete
    assert story.missing == ("the return of T1@b: no return is recorded, although nothing stood in its way",)
    assert "still out" in story.summary
    assert "Nothing is out" not in story.summary


def of_kind(kind: type[Body], instance: str = "") -> Callable[[Event], bool]:
    return lambda event: isinstance(event.body, kind) and instance in {"", event.header.i}


def is_step(step: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event.body, TransferStep) and event.body.step == step


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (is_step("accepted"), "the beginning"),
        (of_kind(TransferOutcome), "the outcome"),
        (of_kind(TransferOpened), "the decision `open`"),
        (of_kind(SettleDecided), "the settle decision that names T1@b"),
        (of_kind(LeaseGranted, "b"), "the pages of T1@b"),
        (of_kind(AttemptMade, "b"), "the attempt of T1@b"),
        (of_kind(OutcomeFixed, "a"), "how the attempt of T1@a ended"),
        (lambda event: event.header.i == "a", "the read lease on a"),
    ],
)
async def test_each_lost_event_is_named(whole: list[Event], lost: Callable[[Event], bool], named: str) -> None:
    kept = [event for event in whole if not lost(event)]
    assert len(kept) < len(whole)
    story = told(kept)

    assert not story.complete
    assert any(named in text for text in story.missing), story.missing


async def test_of_a_transfer_of_which_only_the_settle_log_is_left_nothing_is_made_up(whole: list[Event]) -> None:
    story = told([event for event in whole if isinstance(event.body, SettleDecided)])

    assert story.outcome is None
    assert f"How transfer {TRANSFER} ended is not recorded." in story.summary
    assert "an unknown number of pages were lent for an unrecorded purpose (T1)" in story.summary
    assert "the pages of T1@b" in story.summary


async def test_a_killed_source_leaves_its_own_lease_out_and_says_why(bus: Bus) -> None:
    pair = Pair(bus)
    pair.source_killed()
    story = told(await pair.events())

    assert story.missing == ("the return of T1@a: no evidence that access has ended is recorded",)
    assert story.leases[0].life.evidence == ("endpoint_destroyed",)
    assert "access ended by endpoint_destroyed, returned exactly once as free pages." in story.summary
    assert "peer_lost" in story.summary


async def test_a_source_that_has_run_anew_explains_why_its_lease_never_came_back(bus: Bus) -> None:
    pair = Pair(bus)
    pair.source_killed()
    again = Member(bus, "a", epoch=8, unix_ns=pair.unix_ns)
    again.engine_writes()
    async with flushed(again):
        story = told(await pair.events())

    assert story.complete
    assert not story.leases[1].returned
    assert "ended with its process and never returned, since a/m0 has run anew" in story.summary


async def test_a_transfer_that_still_runs_is_not_complete(bus: Bus) -> None:
    pair = Pair(bus)
    pair.begin()
    story = told(await pair.events())

    assert "the outcome" in story.missing
    assert sum("no evidence that access has ended" in text for text in story.missing) == 2


async def test_a_second_return_is_a_contradiction(whole: list[Event]) -> None:
    returned = next(event for event in whole if turns_on(event, Fact.RETURNED, "b"))
    twice = replace(returned, header=returned.header.model_copy(update={"s": 5_000}))
    story = told([*whole, twice])

    assert story.contradictions == ("T1@b is returned a second time by event b.m0.7.5000",)
    assert "returned 2 times" in story.summary


async def test_a_return_without_evidence_is_a_contradiction() -> None:
    granted = LeaseGranted(
        ticket=1, transfer="", rank=0, direction="write", lender="pool", peer="engine", pages=b"\0" * 4, counters=b""
    )
    events = [made(granted, s=1), made(line(1, Fact.TAKEN | Fact.GRANTED | Fact.RETURNED), s=2)]

    assert "not known to have ended" in told(events, "T1@b").summary


async def test_columns_that_cannot_be_read_do_not_stop_the_story(whole: list[Event]) -> None:
    bad = LeaseGranted(
        ticket=9, transfer=TRANSFER, rank=0, direction="read", lender="x", peer="b", pages=b"123", counters=b"1"
    )

    assert told([*whole, made(bad, instance="a")]).leases[-1].life.pages == ()


async def test_a_request_that_was_refused_as_unreadable_is_a_whole_story() -> None:
    step = TransferStep(transfer=f"refused-{HASH}", request_hash=HASH, step="refused", text="malformed")

    assert told([made(step)], HASH).complete


# --------------------------------------------------------------------------------------------------------- finding


@pytest.mark.parametrize("wanted", [TRANSFER, "b-000", HASH, HASH[:4], "T1@b", "T1@a", "T1"])
async def test_a_story_is_found_by_id_hash_beginning_or_ticket(whole: list[Event], wanted: str) -> None:
    assert told(whole, wanted).transfer == TRANSFER


async def test_the_last_transfer_of_a_repeated_request_is_told_and_the_others_named(whole: list[Event]) -> None:
    earlier = TransferStep(transfer="b-00000006-9", request_hash=HASH, step="accepted")
    story = told([made(earlier, epoch=6, after_s=-60), *whole], HASH)

    assert story.transfer == TRANSFER
    assert "before it: b-00000006-9" in story.note


async def test_a_beginning_that_fits_two_transfers_names_both(whole: list[Event]) -> None:
    other = TransferStep(transfer="b-00000007-2", request_hash="a" * 32, step="accepted")
    answer = not_told([*whole, made(other)], "b-00000007")

    assert "2 transfers begin so" in answer.reason
    assert [known.transfer for known in answer.candidates] == ["b-00000007-2", TRANSFER]


async def test_an_unknown_id_names_the_closest(whole: list[Event]) -> None:
    answer = not_told(whole, "b-00000008-1")

    assert [known.transfer for known in answer.candidates] == [TRANSFER]
    assert HASH in candidate_line(answer.candidates[0])
    assert not_found_document(answer)["wanted"] == "b-00000008-1"


@pytest.mark.parametrize("wanted", ["b-0", "", "T99@b", "T1@nobody"])
async def test_too_short_and_unknown_tickets_are_not_found(whole: list[Event], wanted: str) -> None:
    assert not_told(whole, wanted).reason


async def test_nothing_is_found_in_nothing() -> None:
    assert not_told([], "b-00000007-1").candidates == ()


async def test_a_ticket_means_the_last_run_of_its_member(whole: list[Event]) -> None:
    old = LeaseGranted(
        ticket=1, transfer="b-00000006-1", rank=0, direction="write", lender="pool", peer="a", pages=b"", counters=b""
    )
    story = told([made(old, epoch=6, after_s=-60), *whole], "T1@b")

    assert story.transfer == TRANSFER
    assert "earlier" in story.note


async def test_a_ticket_that_two_instances_have_for_different_transfers_is_ambiguous(whole: list[Event]) -> None:
    other = LeaseGranted(
        ticket=1, transfer="c-1", rank=0, direction="write", lender="pool", peer="a", pages=b"", counters=b""
    )
    answer = not_told([*whole, made(other, instance="c")], "T1")

    assert "T1@a, T1@b, T1@c" in answer.reason


async def test_a_lease_of_the_engine_has_a_story_of_its_own(bus: Bus) -> None:
    pair = Pair(bus)
    pair.a.engine_writes()
    story = told(await pair.events(), "T1@a")

    assert story.transfer == ""
    assert story.complete
    assert "belongs to no transfer" in story.summary


# ------------------------------------------------------------------------------------------------------- rendering


@pytest.mark.parametrize("width", [60, 100])
async def test_no_line_is_wider_than_the_terminal(bus: Bus, width: int) -> None:
    pair = Pair(bus)
    pair.source_killed()
    pair.b.step("stopping", "a long reason of many words, " * 20)
    pair.b.step("stopping", "x" * 500)
    for story in (told(await pair.events()), told(await pair.events(), "T1@a")):
        screen = Console(width=width, force_terminal=True, record=True, file=io.StringIO())
        print_story(screen, story)

        lines = screen.export_text(clear=False).splitlines()
        assert max(len(one) for one in lines) <= width
        assert any("●" in one for one in lines)
        assert any("incomplete" in one for one in lines)


async def test_what_others_sent_cannot_steer_the_terminal(bus: Bus) -> None:
    pair = Pair(bus)
    pair.b.step("accepted", "\x1b[2Jboo\r\n\x07[bold]plain[/] \u202egnp")
    screen = Console(width=100, file=io.StringIO(), record=True)
    print_story(screen, told(await pair.events()))
    shown = screen.export_text()

    assert not {"\x1b", "\r", "\x07", "\u202e"} & set(shown)
    assert "[bold]plain[/]" in shown


async def test_the_document_has_all_that_the_story_says(whole: list[Event]) -> None:
    document = story_document(told(whole))

    assert document["complete"] is True
    assert document["transfer"] == TRANSFER
    leases = document["leases"]
    assert isinstance(leases, list)
    assert leases[0]["pages"] == list(range(BLOCKS))
    assert leases[1]["evidence"] == ["peer_ack"]
    assert [lease["returned"] for lease in leases] == [True, True]
    outcome = document["outcome"]
    assert isinstance(outcome, dict)
    assert outcome["pages_moved"] == BLOCKS


# ---------------------------------------------------------------------------------------------------- as a command


async def story_of(broker: EmbeddedBroker, *arguments: str) -> tuple[int, str, str]:
    with command("story", *arguments, "--nats", broker.url, "--token", broker.token) as process:
        out, err = await asyncio.to_thread(process.communicate, timeout=150)
        return process.returncode, out, err


async def test_the_command_tells_from_a_real_broker_what_was_recorded_there(broker: EmbeddedBroker) -> None:
    nats = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED)
    await nats.ensure_assets()
    pair = Pair(nats)
    pair.whole()
    await pair.events()
    await nats.close()

    status, out, err = await story_of(broker, "T1@b")
    assert (status, err) == (0, "")
    assert "Nothing is out." in out
    assert max(len(one) for one in out.splitlines()) <= 100

    status, out, _ = await story_of(broker, HASH[:8], "--json")
    assert status == 0
    assert json.loads(out)["complete"] is True

    status, out, err = await story_of(broker, "b-00000007-9")
    assert (status, out) == (1, "")
    assert TRANSFER in err

    status, out, _ = await story_of(broker, "nobody", "--json")
    assert status == 1
    assert json.loads(out)["candidates"][0]["transfer"] == TRANSFER


def test_without_a_broker_the_command_says_so_and_exits_with_2() -> None:
    with command("story", "b-00000007-1", "--nats", "nats://127.0.0.1:9") as process:
        out, err = process.communicate(timeout=150)

    assert (process.returncode, out) == (2, "")
    assert "no broker answers" in err
