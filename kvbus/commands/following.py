"""How far one transfer is, told from the facts of its destination; and a bar that shows it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvbus.bus_access import DeniedError
from kvbus.commands.rendering import printable
from kvbus.commands.wording import size
from kvbus.errors import BusError
from kvbus.events import Event, LeaseGranted, OutcomeFixed, TransferStep
from kvbus.subscriber import Seen, Subscriber
from kvbus.topics import Topics
from kvbus.transport import Bus

STAGES = ("accepted", "resolved", "leased", "asking", "granted", "moving", "access_ended")
"""The steps of a transfer that goes well, in order: what the progress bar counts."""
TEXT_LENGTH_MAX = 60
"""Signs of a step's own words beside the bar: what is left of 120 columns."""
PAUSE_S = 1.0
"""Between tries to listen; the bus reconnects within a second or two."""
PAGE_BYTES = 4
"""One page index in the column of a lease."""


@dataclass(slots=True)
class Followed:
    """One request's transfer as the facts tell it; what they do not say stays zero.

    Events from before `since_ns` are about an earlier transfer of the same prompt.
    """

    destination: str
    request_hash: str
    since_ns: int = 0
    after: int = 0
    """The last sequence of the facts log that was there before the request; what precedes it is not read."""
    transfer: str = ""
    step: str = "queued"
    text: str = ""
    _pages: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _ended: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)

    def hear(self, event: Event) -> bool:
        """Take one event; return whether it changed anything here. Leases are few: one for each member."""
        header, body = event.header, event.body
        if header.i != self.destination or header.t < self.since_ns:
            return False
        match body:
            case TransferStep(request_hash=self.request_hash):
                self.transfer, self.step, self.text = body.transfer, body.step, body.text
            case LeaseGranted(direction="write") if self.transfer and body.transfer == self.transfer:
                self._pages[header.m, header.e, body.ticket] = len(body.pages) // PAGE_BYTES
            case OutcomeFixed() if (key := (header.m, header.e, body.ticket)) in self._pages:
                self._ended[key] = (body.arrived, body.length_bytes)
            case _:
                return False
        return True

    @property
    def pages(self) -> int:
        """Pages that are to come, over all members."""
        return sum(self._pages.values())

    @property
    def pages_moved(self) -> int:
        """Pages that arrived."""
        return sum(arrived for arrived, _ in self._ended.values())

    @property
    def length_bytes(self) -> int:
        """Bytes that arrived."""
        return sum(length for _, length in self._ended.values())

    @property
    def reached(self) -> int | None:
        """How many steps of a good transfer lie behind; None for a step that is none of them."""
        return STAGES.index(self.step) + 1 if self.step in STAGES else None

    @property
    def amount(self) -> str:
        """Pages and bytes in words, empty while no lease is known."""
        if not self._pages:
            return ""
        moved = f"{self.pages_moved}/{self.pages} pages"
        return f"{moved}, {size(self.length_bytes)}" if self.length_bytes else moved


@contextlib.asynccontextmanager
async def progress_bar(bus: Bus, topics: Topics, followed: Followed, screen: Console) -> AsyncIterator[None]:
    """Show how far a transfer is for as long as the block runs; on what is no terminal, show nothing."""
    if not screen.is_terminal:
        yield
        return
    words, amount = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[amount]}")
    columns = (SpinnerColumn(), words, BarColumn(), amount, TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        bar = progress.add_task("queued", total=len(STAGES), amount="")

        def show() -> None:
            told = printable(f"{followed.step} {followed.text}")[:TEXT_LENGTH_MAX]
            progress.update(bar, completed=followed.reached, description=told, amount=followed.amount)

        following = asyncio.get_running_loop().create_task(_follow(bus, topics, followed, show))
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def newest(bus: Bus, topics: Topics) -> int:
    """Return where the log of facts ends; 0 where nobody can say now."""
    try:
        return await bus.log_end(topics.facts_filter())
    except BusError:
        return 0


async def _follow(bus: Bus, topics: Topics, followed: Followed, show: Callable[[], None]) -> None:
    """Hear facts until cancelled; while the broker is away, or for who may not hear them, the bar stands still."""
    while True:
        try:
            facts = Subscriber(bus, topics).facts(since=followed.after, settle=False)
            async with contextlib.aclosing(facts) as events:
                async for seen in events:
                    if isinstance(seen, Seen) and followed.hear(seen.event):
                        show()
        except DeniedError:
            return
        except BusError:
            await asyncio.sleep(PAUSE_S)
