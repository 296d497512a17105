"""Moving prefixes between instances by name: which there are, a bounded number at a time, and what came of each.

Prompts do not travel: a prefix is asked for by the name of its last page, and its destination learns the other names
from its source. Nothing is dropped at the source unless that is asked for, and then only what has settled elsewhere.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvbus.commands.members import Members, members_of
from kvbus.commands.rendering import printable
from kvbus.commands.wording import counted, size
from kvbus.errors import BusError, ConfigError, PeerError
from kvbus.events import CacheAnswered, CacheAsked, CacheChangeAsked, CacheChanged
from kvbus.parts import Prompt
from kvbus.patience import Staged
from kvbus.prefixes import PREFIXES_MAX, PrefixRow
from kvbus.publisher import Publisher
from kvbus.roles.registry import Registered
from kvbus.topics import Command, Topics
from kvbus.transport import Bus

AT_ONCE_MAX = 3
"""Transfers from one source at a time: fewer than a destination takes on by default, so that others have a place."""
SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Move:
    """One prefix, and where it is to be."""

    row: PrefixRow
    destination: str


@dataclass(slots=True)
class Moved:
    """What came of one move; `failure` is empty where the destination has the prefix, or the part that is left."""

    move: Move
    blocks: int = 0
    length_bytes: int = 0
    failure: str = ""
    evicted: int = 0
    transfer: str = ""

    def document(self) -> dict[str, object]:
        """Return it for programs."""
        return {
            "prefix": self.move.row.name.hex(),
            "to": self.move.destination,
            "blocks": self.move.row.blocks,
            "blocks_moved": self.blocks,
            "length_bytes": self.length_bytes,
            "transfer": self.transfer,
            "failure": self.failure,
            "evicted": self.evicted,
        }


@dataclass(slots=True)
class Mover:
    """Asks for prefixes of one source; `patience_s` is for each of them."""

    bus: Bus
    topics: Topics
    publisher: Publisher
    source: str
    patience_s: float
    member: Registered | None = None
    moved: list[Moved] = field(default_factory=list)

    async def prefixes(self, most: int) -> Sequence[PrefixRow]:
        """Return the hottest prefixes that the source holds; ConfigError where it cannot name any."""
        found = await members_of(self.bus, self.source)
        if len(found) > 1 or found[0].record.ranks > 1:
            raise ConfigError(f"{self.source} has several members, each with names of its own: use `kvbus stage`")
        self.member = found[0]
        asked = CacheAsked(prefixes=min(most, PREFIXES_MAX))
        answer = await self._members.ask(Command.CACHE, self.member, asked, CacheAnswered)
        if not isinstance(answer, CacheAnswered) or answer.prefixes is None:
            raise ConfigError(f"{self.source} does not name its prefixes: is it away, or of an earlier version?")
        return answer.prefixes

    async def run(self, moves: Sequence[Move], show: Callable[[Moved], None]) -> None:
        """Bring every prefix to its destination, in their order, a few at a time."""
        places = asyncio.Semaphore(AT_ONCE_MAX)

        async def one(move: Move) -> None:
            async with places:
                moved = await self._one(move)
                self.moved.append(moved)
                show(moved)

        await asyncio.gather(*map(one, moves))

    async def evict(self) -> int:
        """Drop at the source what its destination holds, and return how many blocks that were; what is held stays.

        Prefixes share blocks, so where one was not moved, all stay: it would lose its beginning. What has settled may
        be gone there again, in a small pool or by an answer that an earlier transfer gave: so each is asked for first.
        What cannot be asked, or is not answered, is the failure of that prefix, and the others go on.
        """
        if any(one.failure for one in self.moved):
            return 0
        there: dict[str, Sequence[Registered]] = {}
        for one in self.moved:
            destination = one.move.destination
            try:
                if destination not in there:
                    there[destination] = await members_of(self.bus, destination)
                why = await self._why_kept(one.move, there[destination])
            except (BusError, ConfigError, PeerError) as error:
                why = str(error)
            if why:
                one.failure = f"kept at {self.source}: {why}"
            else:
                await self._drop(one)
        return sum(one.evicted for one in self.moved)

    async def _drop(self, one: Moved) -> None:
        """Ask the source to drop a prefix; where no answer comes, it may have dropped it.

        A refusal is no failure: what shares its blocks was dropped before.
        """
        asked = CacheChangeAsked(action="evict", prompt=Prompt(prefix=one.move.row.name))
        try:
            answer = await self._members.ask(Command.CACHE, self._source(), asked, CacheChanged)
        except (BusError, PeerError) as error:
            why = str(error)
        else:
            if isinstance(answer, CacheChanged):
                one.evicted = answer.blocks
                return
            why = "it does not answer"
        one.failure = f"{self.source} was asked to drop it, and may have: {why}"

    async def _why_kept(self, move: Move, members: Sequence[Registered]) -> str:
        """Return why a prefix may not be dropped at its source; empty where its destination holds all of it."""
        for one in members:
            asked = CacheAsked(prompt=Prompt(prefix=move.row.name))
            answer = await self._members.ask(Command.CACHE, one, asked, CacheAnswered)
            if not isinstance(answer, CacheAnswered):
                return f"{one.instance}/{one.member} does not say what it holds of it"
            if answer.refusal or not answer.blocks_wanted:
                return f"{one.instance}/{one.member} does not know it any more"
            if answer.blocks_held != answer.blocks_wanted:
                held = f"{answer.blocks_held} of {answer.blocks_wanted} blocks"
                return f"{one.instance}/{one.member} holds {held} of it by now"
        return ""

    async def _one(self, move: Move) -> Moved:
        try:
            staged = await self.publisher.stage(
                source=self.source,
                destination=move.destination,
                prompt=Prompt(prefix=move.row.name),
                on_miss="partial",
                patience_s=self.patience_s,
            )
        except (BusError, ValueError) as error:  # ValueError: a name that nobody can have
            return Moved(move, failure=str(error))
        outcome = staged.outcome
        if outcome is None or not staged.settled:
            return Moved(move, failure=_why(staged), transfer=outcome.transfer if outcome else "")
        return Moved(move, outcome.pages_moved, outcome.length_bytes, transfer=outcome.transfer)

    def _source(self) -> Registered:
        if self.member is None:
            raise ConfigError("ask for the prefixes first")
        return self.member

    @property
    def _members(self) -> Members:
        return Members(self.bus, self.topics, self.publisher.requester)


def _why(staged: Staged) -> str:
    if staged.outcome is not None:
        return f"{staged.outcome.failure or staged.outcome.outcome}: {staged.outcome.reason}"
    return f"{staged.verdict.verdict}: {staged.verdict.reason}"


def document(source: str, moved: Sequence[Moved], evicted: int) -> dict[str, object]:
    """Return what came of all moves, for programs."""
    return {
        "from": source,
        "moved": sum(not one.failure for one in moved),
        "failed": sum(bool(one.failure) for one in moved),
        "blocks_moved": sum(one.blocks for one in moved),
        "length_bytes": sum(one.length_bytes for one in moved),
        "evicted": evicted,
        "prefixes": [one.document() for one in moved],
    }


def lines(source: str, moved: Sequence[Moved], evicted: int) -> Iterator[str]:
    """Yield what came of all moves, for people: by destination, then why some failed."""
    for destination in dict.fromkeys(one.move.destination for one in moved):
        there = [one for one in moved if one.move.destination == destination and not one.failure]
        blocks, length_bytes = sum(one.blocks for one in there), sum(one.length_bytes for one in there)
        all_ = sum(one.move.destination == destination for one in moved)
        here = sum(not one.blocks for one in there)
        text = f"{source} → {destination}: {len(there)} of {all_} prefixes"
        yield f"{text}, {counted(blocks, 'block')}, {size(length_bytes)}" + (f"; {here} were there" if here else "")
    for reason, count in Counter(one.failure for one in moved if one.failure).most_common(SHOWN_MAX):
        yield f"  {count} failed: {printable(reason)}"
    if evicted:
        yield f"  {counted(evicted, 'block')} dropped at {source}"


@contextmanager
def progress(screen: Console, what: str, total: int) -> Iterator[Callable[[Moved], None]]:
    """Show how many moves have ended; on what is no terminal, show nothing."""
    if not screen.is_terminal:
        yield lambda _moved: None
        return
    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as shown:
        bar = shown.add_task(what, total=total)
        yield lambda _moved: shown.advance(bar)
