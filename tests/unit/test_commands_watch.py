"""Watching: history first, then live; one readable line for each thing that happened, or one document."""

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.codec import pack
from kvbus.commands.leases import LeaseBook
from kvbus.commands.logs import LogReader
from kvbus.commands.rendering import LinePrinter, event_document
from kvbus.commands.watch import Screen, follow, recording, watch
from kvbus.commands.wording import lines_of, page_runs, size
from kvbus.errors import ConfigError, PeerError
from kvbus.events import FactsSeen, Header, LeaseGranted, SettleVoided, TransferStep, encode
from kvbus.ledger.agreement import Party
from kvbus.parts import FactDetailRow
from kvbus.subscriber import Lagged
from kvbus.testing.bus import MemoryBus
from kvbus.topics import Family, Topics
from kvbus.transport import Bus
from tests.unit.story_parts import BEGAN_NS, BLOCKS, HASH, TRANSFER, Pair, command, flushed
from tests.waiting import DEADLINE_S, until

HOUR_NS = 3_600 * 10**9


class Seen:
    """A screen of 100 columns, and what stands on it."""

    def __init__(self, *, width: int = 100, terminal: bool = True, show_all: bool = False) -> None:
        self._console = Console(width=width, force_terminal=terminal, record=True, file=io.StringIO())
        self.screen = Screen(LinePrinter(self._console), show_all=show_all)

    @property
    def text(self) -> str:
        return self._console.export_text(clear=False)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    memory = MemoryBus()
    yield memory
    await memory.close()


@pytest.fixture
async def nats(broker: EmbeddedBroker) -> AsyncIterator[Bus]:
    connected = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED)
    await connected.ensure_assets()
    yield connected
    await connected.close()


async def history(bus: Bus, seen: Seen, *, since_ns: int = BEGAN_NS) -> None:
    await follow(bus, Topics(), seen.screen, since_ns=since_ns, once=True)


@contextlib.asynccontextmanager
async def watching(bus: Bus, seen: Seen) -> AsyncIterator[None]:
    task = asyncio.create_task(
        follow(bus, Topics(), seen.screen, since_ns=time.time_ns() - HOUR_NS, once=False), name="watch"
    )
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# --------------------------------------------------------------------------------------------------------- history


async def test_history_shows_one_line_for_each_thing_that_happened(bus: Bus) -> None:
    pair, seen = Pair(bus), Seen()
    pair.whole()
    async with flushed(pair.a, pair.b):
        await history(bus, seen)

    for part in (
        f"b  transfer {TRANSFER}  accepted from a, on_miss prefill",
        f"b  T1 write 31 pages from a: 0–30, generation 1  ({TRANSFER})",
        f"b  settle #2 {TRANSFER}: blocks 0–31",
        "a  T1 returned, evidence peer_ack",
        f"b  transfer {TRANSFER}  settled: 31/31 blocks moved, 2.0 MB in 14.2 ms (queue 3.0 ms)",
    ):
        assert part in seen.text
    assert "T1 delivered · access_ended · completed · 31/31 blocks · bounds 0–31" in seen.text


async def test_times_only_grow_within_history_although_members_store_side_by_side(bus: Bus) -> None:
    pair, seen = Pair(bus), Seen(width=300)
    pair.whole()
    async with flushed(pair.b):
        pass  # all of b is stored before anything of a
    async with flushed(pair.a):
        await history(bus, seen)
    times = [line.split(" ", 1)[0] for line in seen.lines]

    assert times == sorted(times)
    assert len(times) > 20


async def test_no_line_is_wider_than_the_terminal_and_nothing_of_it_is_lost(bus: Bus) -> None:
    pair, seen = Pair(bus), Seen(width=100)
    pair.b.step("stopping", "word " * 60 + "x" * 150)
    async with flushed(pair.b):
        await history(bus, seen)

    assert max(len(line) for line in seen.lines) <= 100
    assert seen.text.count("word") == 60
    assert seen.text.count("x") == 150


async def test_into_a_pipe_each_event_stays_on_one_line(bus: Bus) -> None:
    pair, seen = Pair(bus), Seen(width=80, terminal=False)
    pair.b.step("stopping", "word " * 60 + "\n\x1b[2J")
    async with flushed(pair.b):
        await history(bus, seen)

    assert len(seen.lines) == 1
    assert "\x1b" not in seen.text


async def test_only_what_lies_within_the_time_asked_for_is_shown_but_leases_before_it_are_known(bus: Bus) -> None:
    pair, seen = Pair(bus), Seen()
    _, read = pair.begin()
    cutoff_ns = pair.unix_ns()
    pair.a.lending.deliver(read)
    pair.a.rounds.run()
    async with flushed(pair.a, pair.b):
        await history(bus, seen, since_ns=cutoff_ns)

    assert "accepted" not in seen.text
    assert "T1 delivered · access_ended · completed" in seen.text
    assert "taken" not in seen.text


@pytest.mark.parametrize("number", [1, 2, 999, 1_000, 1_001, 2_500])
async def test_the_log_is_read_from_the_time_asked_for_and_not_from_its_beginning(bus: Bus, number: int) -> None:
    topics = Topics()
    for s in range(1, 2_501):
        step = TransferStep(transfer=TRANSFER, request_hash=HASH, step="x", text=str(s))
        header = Header(k=step.KIND, i="b", m="m0", e=1, s=s, t=BEGAN_NS + s * 10**9)
        await bus.store(topics.facts("b"), encode(header, step), message_id=header.event_id)
    since = [seen.event.header.s async for seen in LogReader(bus, topics).since(BEGAN_NS + number * 10**9)]
    newest = [seen.event.header.s async for seen in LogReader(bus, topics).newest(number)]

    assert since == list(range(number, 2_501))
    assert newest == list(range(2_501 - number, 2_501))


async def test_an_empty_log_is_no_error(bus: Bus) -> None:
    seen = Seen()
    await history(bus, seen)

    assert seen.text == ""


# ---------------------------------------------------------------------------------------------- what is left out


async def test_the_engines_own_leases_are_shown_only_on_request(bus: Bus) -> None:
    pair, seen, all_seen = Pair(bus), Seen(), Seen(show_all=True)
    pair.a.engine_writes()
    async with flushed(pair.a):
        await history(bus, seen)
        await history(bus, all_seen)

    assert seen.text == ""
    assert "T1 write 4 pages from engine: 0–3" in all_seen.text
    assert "settled · consumed · returned, evidence completed" in all_seen.text


async def test_a_refused_lease_is_shown_although_it_was_never_granted(bus: Bus) -> None:
    detail = FactDetailRow(ticket=4, failure="lease_refused", text="the pool is full", peer="a")
    facts = FactsSeen(n=0, ticket=b"", rank=b"", bits=b"", lo=b"", hi=b"", details=(detail,))
    seen = Seen()
    await stored(bus, "b", 1, facts)
    await history(bus, seen)

    assert "T4 lease_refused: the pool is full" in seen.text


async def test_what_concerns_a_whole_member_names_no_lease(bus: Bus) -> None:
    detail = FactDetailRow(ticket=0, failure="peer_lost", text="ucx: silent", peer="a")
    facts = FactsSeen(n=0, ticket=b"", rank=b"", bits=b"", lo=b"", hi=b"", details=(detail,))
    seen = Seen()
    await stored(bus, "b", 1, facts)
    await history(bus, seen)

    assert "b  member: peer_lost: ucx: silent (peer a)" in seen.text
    assert "T0" not in seen.text


async def test_unknown_kinds_and_malformed_messages_are_counted_and_said(bus: Bus) -> None:
    topics, seen = Topics(), Seen()
    unknown = Header(k="from_the_future", i="b", m="m0", e=1, s=1, t=BEGAN_NS).model_dump() | {"b": {}}
    await bus.store(topics.facts("b"), pack(unknown), message_id="1")
    await bus.store(topics.facts("b"), b"\xc1", message_id="2")
    step = TransferStep(transfer=TRANSFER, request_hash=HASH, step="accepted")
    misplaced = encode(Header(k=step.KIND, i="a", m="m0", e=1, s=3, t=BEGAN_NS), step)
    await bus.store(topics.facts("b"), misplaced, message_id="3")
    await history(bus, seen)

    assert "3 events skipped" in seen.text


def test_what_the_log_has_lost_is_said_and_not_passed_over() -> None:
    seen = Seen()
    seen.screen.lagged(Lagged(Family.FACTS, "the log no longer holds what followed 7", lost=True))

    assert "facts: the log no longer holds what followed 7; events are lost" in seen.text


async def stored(bus: Bus, instance: str, s: int, body: FactsSeen | LeaseGranted) -> None:
    header = Header(k=body.KIND, i=instance, m="m0", e=1, s=s, t=BEGAN_NS)
    await bus.store(Topics().facts(instance), encode(header, body), message_id=header.event_id)


# ------------------------------------------------------------------------------------------------------------ live


async def test_history_comes_first_then_live_and_nothing_twice(nats: Bus) -> None:
    pair, seen = Pair(nats, unix_ns=time.time_ns), Seen(width=200)
    write, read = pair.begin()
    async with flushed(pair.a, pair.b), watching(nats, seen):
        await until(lambda: "history ends here" in seen.text)
        past = seen.text
        pair.b.ucx.deliver(write)
        pair.b.rounds.run()
        pair.b.outcome(pages_moved=BLOCKS)
        pair.a.lending.deliver(read)
        pair.a.rounds.run()
        await until(lambda: "T1 returned, evidence completed" in seen.text and " settled: 31/31 blocks" in seen.text)
        await until(lambda: f"settle #2 {TRANSFER}: blocks 0–31" in seen.text)

    assert "moving by ucx" in past
    assert "settle #2" not in past
    assert len(seen.lines) == len(set(seen.lines))
    assert seen.text.count("accepted") == 1
    assert seen.text.count(f"open #1 {TRANSFER}") == 1


async def test_a_broker_that_comes_back_loses_nothing_for_who_watches(broker: EmbeddedBroker, nats: Bus) -> None:
    pair, seen = Pair(nats, unix_ns=time.time_ns), Seen(width=200)
    async with flushed(pair.a, pair.b), watching(nats, seen):
        await until(lambda: "history ends here" in seen.text)
        pair.b.step("resolved", "heard live")
        await until(lambda: "heard live" in seen.text)
        broker.kill()
        pair.b.step("accepted", "while the broker was away")
        await broker.start()
        await until(lambda: "while the broker was away" in seen.text)


async def test_a_recording_that_cannot_go_on_ends_the_watch_and_says_why(bus: Bus) -> None:
    async with asyncio.timeout(DEADLINE_S) as limit:
        with pytest.raises(ConfigError, match=r"the recording cannot be written: .*No space left"):
            async with recording(bus, Topics(), Path("/dev/full")):
                await asyncio.Event().wait()
        assert not limit.expired(), "it is not left for us to end"


async def test_whatever_ends_a_recording_is_said(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    async def history(*subjects: object, **_: object) -> list[object]:
        asked.append(subjects)
        if len(asked) == 1:
            raise PeerError("a fault that nobody foresaw")
        return []

    monkeypatch.setattr(bus, "history", history)
    async with asyncio.timeout(DEADLINE_S) as limit:
        with pytest.raises(PeerError, match="nobody foresaw"):
            async with recording(bus, Topics(), tmp_path / "recording"):
                await asyncio.Event().wait()
        assert not limit.expired()


# ------------------------------------------------------------------------------------------------ as a command


async def printed(process: "subprocess.Popen[str]", said: Callable[[str], bool]) -> str:
    """Read a process's lines until one is what is awaited."""

    def read() -> str:
        assert process.stdout is not None
        return next(line for line in process.stdout if said(line))

    return await asyncio.wait_for(asyncio.to_thread(read), 60.0)


async def test_once_prints_documents_and_exits(nats: Bus, broker: EmbeddedBroker) -> None:
    pair = Pair(nats, unix_ns=time.time_ns)
    pair.whole()
    async with flushed(pair.a, pair.b):
        arguments = ("--once", "--json", "--nats", broker.url, "--token", broker.token)
        with command("watch", *arguments) as process:
            out, err = await asyncio.to_thread(process.communicate, timeout=150)

    assert (process.returncode, err) == (0, "")
    documents = [json.loads(line) for line in out.splitlines()]
    granted = next(one for one in documents if one["kind"] == "lease_granted")
    assert granted["body"]["pages"] == list(range(BLOCKS))
    facts = next(one for one in documents if one["kind"] == "facts")
    assert facts["body"]["facts"][0][:1] == ["taken"]
    assert {one["log"] for one in documents} == {"facts", "settle"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_ends_it_with_status_0_and_no_trace(nats: Bus, broker: EmbeddedBroker, number: int) -> None:
    with command("watch", "--nats", broker.url, "--token", broker.token) as process:
        await printed(process, lambda line: "history ends here" in line)
        pair = Pair(nats, unix_ns=time.time_ns)
        pair.b.step("accepted", "heard live")
        async with flushed(pair.b):
            await printed(process, lambda line: "heard live" in line)
        process.send_signal(number)
        _, err = await asyncio.to_thread(process.communicate, timeout=150)

    assert (process.returncode, err) == (0, "")


def test_without_a_broker_it_says_so_and_exits_with_2() -> None:
    with command("watch", "--nats", "nats://127.0.0.1:9") as process:
        out, err = process.communicate(timeout=150)

    assert process.returncode == 2
    assert out == ""
    assert "no broker answers: start one with `kvbus up`" in err
    assert "Traceback" not in err


async def test_a_broker_without_streams_is_an_error_that_says_so(broker: EmbeddedBroker) -> None:
    with command("watch", "--nats", broker.url, "--token", broker.token) as process:
        _, err = await asyncio.to_thread(process.communicate, timeout=150)

    assert process.returncode == 2
    assert "stream" in err
    assert "Traceback" not in err


def test_a_negative_time_is_refused() -> None:
    result = CliRunner().invoke(watch, ["--since", "-1"])

    assert result.exit_code == 2
    assert "--since" in result.output


# ----------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        ((), ""),
        ((3,), "3"),
        (range(12, 43), "12–42"),
        ((5, 4, 7, 8), "5, 4, 7–8"),
        (range(0, 20, 2), "0, 2, 4, 6, 8, 10, and 4 more runs"),
    ],
)
def test_pages_are_named_as_runs_in_their_order(pages: range | tuple[int, ...], text: str) -> None:
    assert page_runs(tuple(pages)) == text


@pytest.mark.parametrize(
    ("length_bytes", "text"), [(0, "0 B"), (999, "999 B"), (65_536, "65.5 kB"), (2_031_616, "2.0 MB")]
)
def test_bytes_have_decimal_units(length_bytes: int, text: str) -> None:
    assert size(length_bytes) == text


async def test_a_book_that_forgets_what_was_returned_stays_small(bus: Bus) -> None:
    pair, book = Pair(bus), LeaseBook(keep_returned=False)
    pair.whole()
    for event in await pair.events():
        lines_of(event, book)

    assert book.lives() == ()


async def test_a_book_is_bounded(bus: Bus) -> None:
    pair, book = Pair(bus), LeaseBook(keep_returned=True, leases_max=1)
    pair.whole()
    for event in await pair.events():
        lines_of(event, book)

    assert len(book.lives()) == 1


async def test_every_event_has_a_document_that_is_json(bus: Bus) -> None:
    pair = Pair(bus)
    pair.source_killed()
    pair.b.rounds.decide(lambda agreement: agreement.open("x", (Party("m0", 7, 0, 99),)))
    pair.b.rounds.decide(lambda agreement: agreement.void("x", "why"))
    events = await pair.events()

    assert any(isinstance(event.body, SettleVoided) for event in events)
    assert json.loads(json.dumps([event_document(event) for event in events]))
