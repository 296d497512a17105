"""`kvbus drain`: let an instance finish what it has, refuse what comes, and leave when nothing is held any more."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvbus.bus import NatsBus
from kvbus.commands.common import EXIT_FAILED, broker_options, connect, console, json_option, print_document
from kvbus.commands.completing import instance_names
from kvbus.commands.members import Members, members_of
from kvbus.commands.rendering import printable
from kvbus.commands.wording import counted
from kvbus.draining import DrainAnswered, DrainAsked, HoldingRow
from kvbus.errors import BusError, ConfigError, PeerError
from kvbus.roles.asking import NOBODY_MAX_S
from kvbus.roles.registry import Registered, lookup
from kvbus.topics import Command, Topics
from kvbus.transport import Bus, NoAnswer

PAUSE_S = 0.2
"""Between two looks; short against what a transfer takes."""
SHOWN_MAX = 10
LEFT = "left"


@click.command()
@click.argument("instance", shell_complete=instance_names)
@click.option("--restart", is_flag=True, help="Keep requests in its queue for its next run, rather than refuse them.")
@click.option("--stay", is_flag=True, help="Do not let its worker end: it stays, drained, until `--undo`.")
@click.option("--undo", is_flag=True, help="Take part again.")
@click.option("--budget", "budget_s", default=60.0, show_default=True, help="Seconds to wait; nothing is forced after.")
@broker_options
@json_option
def drain(
    instance: str,
    nats_url: str,
    token: str,
    prefix: str,
    budget_s: float,
    *,
    restart: bool,
    stay: bool,
    undo: bool,
    as_json: bool,
) -> int:
    """Drain INSTANCE: it takes and lends nothing new, finishes what runs, and leaves when nothing is held.

    New requests are refused with a reason that begins with `draining`, so that they go elsewhere. What is lent ends on
    evidence, never by force: where the budget ends first, what still holds it is named, and it goes on draining.

    \b
    Exit status:
      0  drained, and its worker has ended unless --stay; with --undo: it takes part again
      1  something still holds it
      2  it could not be asked: no worker is registered, the broker is away, or this user may not drain
    """  # noqa: D301 - click reads the sign itself
    if undo and (restart or stay):
        raise click.UsageError("--undo stands alone")
    asked = DrainAsked(
        action="undo" if undo else "drain", requests="keep" if restart else "refuse", leave=not (stay or undo)
    )

    async def go() -> int:
        bus = await connect(nats_url, token, prefix, name="kvbus-drain")
        try:
            return await _drain(bus, Topics(prefix), instance, asked, budget_s, as_json=as_json)
        finally:
            await bus.close()

    return asyncio.run(go())


async def _drain(
    bus: NatsBus, topics: Topics, instance: str, asked: DrainAsked, budget_s: float, *, as_json: bool
) -> int:
    screen, began = console(as_json=as_json), time.monotonic()
    draining = Draining(bus, topics, await members_of(bus, instance), leaves=asked.leave)
    await draining.begin(asked)
    if asked.action == "drain":
        with _shown(screen, instance) as show:
            await draining.wait(began + budget_s, show)
    well = draining.ended if asked.action == "drain" else not any(draining.states.values())
    if as_json:
        print_document(draining.document(instance, took_s=time.monotonic() - began))
    for line in draining.lines(instance):
        screen.print(line, soft_wrap=True, markup=False)
    return 0 if well else EXIT_FAILED


class Draining:
    """The members of one instance on their way out, as they say themselves.

    One that was to leave has left when nobody listens in its place for as long as a lost connection takes to come back.
    Where it held something when it last spoke, its record must be gone from the registry too.
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        registered: Sequence[Registered],
        *,
        leaves: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._members = Members(bus, topics, "operator")
        self._registered = registered
        self._leaves = leaves
        self._clock = clock
        self._silent_since: dict[str, float] = {}
        self.unheard = ""
        """Why the last look failed; empty where it did not."""
        self.states: dict[str, str] = {}
        self.answers: dict[str, DrainAnswered] = {}

    @property
    def ended(self) -> bool:
        """Whether every member is as it was asked to be: gone, or drained."""
        wanted = {LEFT} if self._leaves else {LEFT, "drained"}
        return set(self.states.values()) <= wanted

    @property
    def held(self) -> int:
        """What holds members, over all of them."""
        return sum(_held(one) for member, one in self.answers.items() if self.states[member] != LEFT)

    async def begin(self, asked: DrainAsked) -> None:
        """Ask every member; ConfigError where one does not answer, or refuses, and says who was asked before it."""
        for one in self._registered:
            answer = await self._members.ask(Command.DRAIN, one, asked, DrainAnswered)
            who = f"{one.instance}/{one.member}"
            if isinstance(answer, NoAnswer):
                why = "does not answer: is it away, or of a version that cannot be drained?"
                raise ConfigError(f"{who} {why}{self._begun(one.instance)}")
            if answer.refusal:
                raise ConfigError(f"{who} refuses: {printable(answer.refusal)}{self._begun(one.instance)}")
            await self._note(one, answer)

    def _begun(self, instance: str) -> str:
        """Return, for an error, which members do already what the others could not be asked for."""
        names = ", ".join(f"{instance}/{member} ({state or 'takes part'})" for member, state in self.states.items())
        return f"; asked before it, and not undone: {names}" if names else ""

    async def wait(self, ends_at: float, show: Callable[[int, str], None]) -> None:
        """Look again and again until all have ended, or the time is up; the drain goes on without our connection."""
        while not self.ended and time.monotonic() < ends_at:
            await self._look()
            show(self.held, ", ".join(f"{member} {state}" for member, state in self.states.items()))
            if not self.ended:
                await asyncio.sleep(PAUSE_S)

    async def _look(self) -> None:
        self.unheard = ""
        for one in self._registered:
            if self.states[one.member] == LEFT:
                continue
            try:
                await self._note(one, await self._members.ask(Command.DRAIN, one, DrainAsked(), DrainAnswered))
            except (BusError, PeerError) as error:
                self.unheard = str(error)
                self._silent_since.pop(one.member, None)  # it was not heard, and could not have been

    async def _note(self, one: Registered, answer: DrainAnswered | NoAnswer) -> None:
        member, now = one.member, self._clock()
        if isinstance(answer, DrainAnswered):
            self._silent_since.pop(member, None)
            self.states[member], self.answers[member] = answer.state, answer
        elif answer.reason != "nobody_listens":  # it is slow, or stands still: somebody has it open all the same
            self._silent_since.pop(member, None)
        elif (
            self._leaves
            and now - self._silent_since.setdefault(member, now) >= NOBODY_MAX_S
            and not (_held(self.answers[member]) and await self._is_registered(one))
        ):
            self.states[member] = LEFT

    async def _is_registered(self, one: Registered) -> bool:
        there = await lookup(self._bus, one.instance)
        return any((other.member, other.epoch) == (one.member, one.epoch) for other in there)

    def document(self, instance: str, *, took_s: float) -> dict[str, object]:
        """Return it for programs."""
        return {
            "instance": instance,
            "ended": self.ended,
            "took_s": round(took_s, 3),
            "unheard": self.unheard,
            "members": [
                {"member": member, **self.answers[member].model_dump(), "state": state}
                for member, state in self.states.items()
            ],
        }

    def lines(self, instance: str) -> Iterator[str]:
        """Yield it for people: each member, and what still holds it."""
        if self.unheard:
            yield f"the last look failed, so this is what was heard before: {printable(self.unheard)}"
        for member, state in self.states.items():
            yield f"{instance}/{member}: {state or 'takes part'}"
            if state not in {LEFT, "drained", ""}:
                yield from (f"  {line}" for line in held_by(self.answers[member]))


def _held(answer: DrainAnswered) -> int:
    return answer.leases_held + answer.transfers_running + answer.requests_in_hand + answer.releases_unconfirmed


def held_by(answer: DrainAnswered) -> Iterator[str]:
    """Yield what holds a member, in words."""
    for count, noun in (
        (answer.transfers_running, "transfer runs"),
        (answer.requests_in_hand, "request in hand"),
        (answer.releases_unconfirmed, "release that its source has not confirmed"),
    ):
        if count:
            yield f"{count} × {noun}"
    yield from map(_holding, answer.holding[:SHOWN_MAX])
    if answer.leases_held > SHOWN_MAX:
        yield f"and {counted(answer.leases_held - SHOWN_MAX, 'more lease')}"


def _holding(row: HoldingRow) -> str:
    what = f"{printable(row.peer)} reads" if row.direction == "read" else f"{printable(row.peer)} fills"
    what += f" {counted(row.pages, 'page')} under T{row.ticket}"
    what += f" for {printable(row.transfer)}" if row.transfer else ""
    return what + (", and has let go: not returned yet" if row.quiet else "")


@contextmanager
def _shown(screen: Console, instance: str) -> Iterator[Callable[[int, str], None]]:
    """Show how much of what was held at first is gone; on what is no terminal, show nothing."""
    if not screen.is_terminal:
        yield lambda _held, _text: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        bar = progress.add_task(f"{instance}: draining", total=1)
        most = 1

        def show(held: int, text: str) -> None:
            nonlocal most
            most = max(most, held)
            progress.update(bar, total=most, completed=most - held, description=f"{instance}: {text}, {held} held")

        yield show
