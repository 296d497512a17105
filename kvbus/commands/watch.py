"""`kvbus watch`: what all instances report, history first, then live, until Ctrl-C."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import click

from kvbus.commands.common import broker_options, connect, console, print_document
from kvbus.commands.leases import LeaseBook
from kvbus.commands.logs import LogReader
from kvbus.commands.recordings import LogTap, RecordingWriter
from kvbus.commands.rendering import LinePrinter, event_document
from kvbus.commands.wording import lines_of
from kvbus.errors import BusError
from kvbus.subscriber import Lagged, Seen, Subscriber
from kvbus.topics import Family, Topics
from kvbus.transport import Bus

SINCE_S = 300.0
"""Enough to see what just happened; `--since` reaches as far back as the broker keeps the log, an hour or more."""
LEAD_IN_S = 60.0
"""Read before that, without being shown: a transfer lasts 30 s unless told otherwise, so its leases are known then."""
RETRY_S = 1.0
"""Between tries to subscribe: the bus itself reconnects within a second or two."""
RECORD_S = 1.0
"""Between two looks at the logs for the recording; they hold an hour at least."""
RECORD_END_S = 5.0
"""For the last look; a broker that is away then costs only what came since the look before."""


@click.command()
@click.option(
    "--since", "since_s", default=SINCE_S, show_default=True, metavar="SECONDS", help="How far back to start."
)
@click.option("--once", is_flag=True, help="Print the history and exit.")
@click.option("--all", "show_all", is_flag=True, help="Show the engines' own leases too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per line, one for each event.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write all that the logs hold, and what comes, to FILE.",
)
@broker_options
def watch(
    nats_url: str,
    token: str,
    prefix: str,
    since_s: float,
    record: Path | None,
    *,
    once: bool,
    show_all: bool,
    as_json: bool,
) -> int:
    """Show what the instances report: transfers, leases, facts and settle decisions, as they happen.

    History comes first. Leases of the engines' own, which belong to no transfer, are left out unless --all is given.
    A recording, for `kvbus audit` and `kvbus story`, holds everything from the logs' beginning on, whatever is shown.
    """
    if since_s < 0:
        raise click.BadParameter(f"expected a number of seconds from 0 on, got {since_s:g}", param_hint="--since")
    since_ns = time.time_ns() - int(since_s * 1e9)
    screen = Screen(LinePrinter(console(as_json=as_json)), as_json=as_json, show_all=show_all)
    return asyncio.run(_until_interrupted(nats_url, token, prefix, screen, since_ns=since_ns, once=once, file=record))


async def _until_interrupted(
    nats_url: str, token: str, prefix: str, screen: "Screen", *, since_ns: int, once: bool, file: Path | None
) -> int:
    loop, ours = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: ours.cancel() if ours else None)
    with suppress(asyncio.CancelledError):
        bus = await connect(nats_url, token, prefix, name="kvbus-watch")
        try:
            async with recording(bus, Topics(prefix), file):
                await follow(bus, Topics(prefix), screen, since_ns=since_ns, once=once)
        finally:
            screen.say_skipped()
            with suppress(asyncio.CancelledError):  # a second Ctrl-C ends the farewell, too
                await bus.close()
    return 0


@asynccontextmanager
async def recording(bus: Bus, topics: Topics, file: Path | None) -> AsyncIterator[None]:
    """Record both logs to a file for as long as the block runs, and once more at its end.

    Where the recording ends by itself, as on a full disk, so does the block, at once, with what ended it.
    """
    if file is None:
        yield
        return
    with closing(RecordingWriter.create(file)) as writer:
        writer.begin()
        tap = LogTap(bus, topics)
        block, over = asyncio.current_task(), asyncio.Event()
        task = asyncio.get_running_loop().create_task(_record(tap, writer))
        task.add_done_callback(lambda _: block.cancel() if block and not over.is_set() else None)
        try:
            yield
        finally:
            over.set()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled() and (error := task.exception()):
                raise error
            with suppress(BusError, TimeoutError):
                async with asyncio.timeout(RECORD_END_S):
                    await _look(tap, writer)
            writer.end(time.time_ns())


async def _record(tap: LogTap, writer: RecordingWriter) -> None:
    while True:
        with suppress(BusError):  # the logs still hold it when the broker is back
            await _look(tap, writer)
        await asyncio.sleep(RECORD_S)


async def _look(tap: LogTap, writer: RecordingWriter) -> None:
    async for stored in tap.more():
        writer.log_begins(tap.begins)
        writer.add(stored)
    writer.flush()


@dataclass(slots=True)
class Screen:
    """Where events go: lines for people, or documents. Only `skipped` and what a lease's facts said last is kept."""

    printer: LinePrinter
    as_json: bool = False
    show_all: bool = False
    book: LeaseBook = field(default_factory=lambda: LeaseBook(keep_returned=False))
    skipped: int = 0
    _skipped_told: int = 0

    def show(self, seen: Seen, *, quiet: bool = False) -> None:
        """Show one event; `quiet`: only take note of it."""
        if self.as_json:
            if not quiet:
                print_document(event_document(seen.event, seen.family, seen.sequence))
            return
        for line in lines_of(seen.event, self.book):
            if not quiet and (self.show_all or not line.is_local):
                self.printer.show(seen.event, line)

    def lagged(self, lagged: Lagged) -> None:
        """Say that something is missing, or was read late."""
        if self.as_json:
            print_document({"kind": "lagged", "log": lagged.family.value, "reason": lagged.reason, "lost": lagged.lost})
            return
        what = "events are lost" if lagged.lost else "read again from the log"
        self.notice(f"{lagged.family.value}: {lagged.reason}; {what}", "bold yellow" if lagged.lost else "dim")

    def notice(self, text: str, style: str = "dim") -> None:
        """Print a line of the command's own; among documents on stderr."""
        self.printer.notice(text, style)

    def say_skipped(self) -> None:
        """Say how many events could not be shown, where that has grown."""
        new, self._skipped_told = self.skipped - self._skipped_told, self.skipped
        if new and self.as_json:
            print_document({"kind": "skipped", "events": new})
        elif new:
            self.notice(f"{new} events skipped: of kinds that this version does not know, or malformed")


async def follow(bus: Bus, topics: Topics, screen: Screen, *, since_ns: int, once: bool) -> None:
    """Show the logs from a time on, then what comes, until cancelled; with `once`, what is there now."""
    reader = LogReader(bus, topics)
    async for seen in reader.since(since_ns - int(LEAD_IN_S * 1e9)):
        screen.show(seen, quiet=seen.event.header.t < since_ns)
    past = screen.skipped = reader.skipped.total()
    screen.say_skipped()
    if once:
        return
    screen.notice("history ends here; live from now on, Ctrl-C ends it")
    subscriber = Subscriber(bus, topics)
    while True:
        try:
            await _live(subscriber, screen, reader.last, past)
        except BusError as error:  # the broker went away before it knew of the subscription
            screen.notice(f"{error}; trying again")
            await asyncio.sleep(RETRY_S)


async def _live(subscriber: Subscriber, screen: Screen, last: dict[Family, int], past: int) -> None:
    """Show what follows on what was seen last; the settle log comes from its beginning, so its past is passed over."""
    async with aclosing(subscriber.facts(since=last[Family.FACTS])) as items:
        async for item in items:
            if isinstance(item, Lagged):
                screen.lagged(item)
                if item.lost:  # its sequences may have started anew
                    last[item.family] = 0
            elif item.family is Family.FACTS or item.sequence > last[Family.SETTLE]:
                screen.show(item)
                last[item.family] = item.sequence
            counters = subscriber.counters()
            unread = sum(counters.get(name, 0) for name in ("malformed", "unknown_kind", "wrong_subject"))
            screen.skipped = past + unread
            screen.say_skipped()
