"""The words of a script: ask for transfers, hold what is under way, stop and kill members, and say what must hold."""

from collections.abc import Callable, Sequence

from kvbus.events import Event, TransferOutcome, TransferRequested, decode
from kvbus.names import request_hash
from kvbus.parts import OnMiss
from kvbus.testing.sim.assembly import Parts
from kvbus.testing.sim.councils import member_name
from kvbus.testing.sim.holes.gates import Gate, Mode, PlaneGate
from kvbus.testing.sim.holes.hole import NotStagedError
from kvbus.testing.sim.holes.requester import REQUESTER, Requester
from kvbus.testing.sim.holes.stage import BrokenError, Stage, Wait
from kvbus.testing.sim.loop import Actor
from kvbus.testing.sim.member import Member
from kvbus.testing.sim.prompts import prompt_of, text_of, tokens_of
from kvbus.testing.sim.rest import left_over
from kvbus.transport import BUCKET_INSTANCES

WITHIN_S = 60.0
"""Virtual seconds in which a script's step happens or never does: several times the longest budget in a script."""
REST_S = 60.0
"""Virtual seconds to come to rest: a release is repeated every ten at the most."""
TOKENS = 32
"""Eight blocks: the longest prompt that an engine here takes."""


class Script:
    """What a hole's script may do. Documents are numbers; A, B, C… of the texts are 1, 2, 3…"""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.loop, self.truth, self.trail = stage.loop, stage.truth, stage.trail
        self.town, self.broker = stage.town, stage.broker
        self._requester = Requester(stage)
        self.outcomes, self.verdicts = self._requester.outcomes, self._requester.verdicts
        self._numbers = iter(range(1, 1_000))

    # ----------------------------------------------------------------------------------------------- what is waited for

    def until(self, what: str, true: Callable[[], bool], within_s: float = WITHIN_S) -> Wait:
        """Wait until something is so; nothing moves between that and the next words of the script."""
        return Wait(what, true, self.loop.time() + within_s)

    async def pause(self, pause_s: float) -> None:
        """Let time pass."""
        until_s = self.loop.time() + pause_s
        self.stage.at(until_s)
        await Wait(f"{pause_s:g} s have passed", lambda: self.loop.time() >= until_s, until_s + 1)

    async def up(self) -> None:
        """Wait until every instance has a member that can be found."""
        self._requester.start()
        await self.until("all members are up", self._all_registered)

    async def cached(self, instance: str, document: int, tokens: int = TOKENS) -> None:
        """Have an instance's engine compute a document and store it."""
        self.compute(instance, document, tokens)
        blocks = tokens // self.stage.settings.block_tokens
        await self.until(f"{instance} holds {blocks} blocks", lambda: self.held(instance, document, tokens) == blocks)
        await self.idle(instance)

    async def idle(self, instance: str) -> None:
        """Wait until an instance's engine holds nothing any more."""
        parts = self.parts(instance)
        await self.until(f"the engine of {instance} is idle", lambda: not parts.engine._desk._handles)  # noqa: SLF001

    async def outcome(self, request: TransferRequested) -> TransferOutcome:
        """Wait for the next outcome of a request."""
        own = request.request_hash

        def mine() -> list[TransferOutcome]:
            return [one for one in self.outcomes if one.request_hash == own]

        await self.until(f"the outcome of {request.request_id} is told", lambda: bool(mine()))
        outcome = mine()[0]
        self.outcomes.remove(outcome)
        return outcome

    async def rest(self) -> None:
        """Wait until nothing is left over, and hold every book against every other; what stays is a violation."""
        until_s = self.loop.time() + REST_S
        self.stage.at(until_s)
        await Wait("rest", lambda: not left_over(self.town) or self.loop.time() >= until_s, until_s + 1)
        self.check()
        if left := left_over(self.town):
            self.trail.violate("world", f"left over after {REST_S:g} s of rest: {'; '.join(left)}")

    # ----------------------------------------------------------------------------------------------------- what is so

    def member(self, instance: str) -> Member:
        """Return the member that runs for an instance now."""
        return self.town.members[instance]

    def parts(self, instance: str) -> Parts:
        """Return its parts."""
        parts = self.member(instance).parts
        if parts is None:
            raise NotStagedError(f"{instance} has no parts yet")
        return parts

    def names(self, instance: str, document: int, tokens: int = TOKENS) -> tuple[bytes, ...]:
        """Return the page names of a document."""
        return self.parts(instance).pool.names(tokens_of(text_of(document, tokens)), "")

    def held(self, instance: str, document: int, tokens: int = TOKENS) -> int:
        """Return how many leading blocks of a document are at an instance."""
        return len(self.parts(instance).pool.lender.pages_held(self.names(instance, document, tokens)))

    def lent(self, instance: str) -> int:
        """Return to how many readers an instance lends."""
        return self.parts(instance).lending.statistics().lent

    def decided(self, instance: str) -> list[Event]:
        """Return the decisions of an instance that the broker has stored, in order."""
        return [event for event in self.broker.decisions if event.header.i == instance]

    def check(self) -> None:
        """Hold the books of every member against each other and against the truth."""
        for member in self.town.up():
            if member.parts is not None:
                member.parts.model.check_all()

    def say(self, text: str) -> None:
        """Tell whoever reads the trail what happens now."""
        self.trail.note("script", text)

    def require(self, holds: bool, text: str) -> None:  # noqa: FBT001 - the statement itself
        """End the script with this violation unless the statement holds."""
        if not holds:
            self.trail.violate(self.stage.hole.rule, text)
            raise BrokenError(text)

    def staged(self, is_so: bool, text: str) -> None:  # noqa: FBT001 - the statement itself
        """Give up unless the interleaving is the one that was meant."""
        if not is_so:
            raise NotStagedError(f"{self.stage.hole.name}: {text}")

    # --------------------------------------------------------------------------------------------------- what is asked

    def compute(self, instance: str, document: int, tokens: int = TOKENS, salt: str = "") -> None:
        """Have an instance's engine answer a prompt: it stores what it computes."""
        self.parts(instance).engine.answer(tokens_of(text_of(document, tokens)), salt)

    def fill(self, instance: str, documents: Sequence[int], salt: str = "") -> None:
        """Have an engine answer so many long prompts, for which it takes every page that it can get."""
        self.say(f"the engine of {instance} answers {len(documents)} long prompts: it takes every page it can get")
        for document in documents:
            self.compute(instance, document, salt=salt)

    def ask(
        self,
        destination: str,
        source: str,
        document: int,
        *,
        tokens: int = TOKENS,
        on_miss: OnMiss = "partial",
        budget_s: float = 20.0,
        queued: bool = False,
        request_id: str = "",
    ) -> TransferRequested:
        """Ask for a transfer, by request-reply or through the durable queue."""
        prompt = prompt_of(document, tokens, as_text=False)
        request = TransferRequested(
            request_id=request_id or f"r{next(self._numbers)}",
            request_hash=request_hash(model="", salt="", source=source, prompt=prompt.canonical()),
            requester=REQUESTER,
            source=source,
            destination=destination,
            prompt=prompt,
            salt="",
            on_miss=on_miss,
            budget_s=budget_s,
        )
        how = " through the queue" if queued else ""
        self.say(f"{request.request_id}: {destination} is asked{how} to get document {document} from {source}")
        self._requester.send(request, queued=queued)
        return request

    # ---------------------------------------------------------------------------------------------------- what is held

    def gate(self, kind: str, sender: str = "", *, mode: Mode = "hold", most: int = 1, to: str = "") -> Gate:
        """Hold, lose or double the next messages of a kind, or those to one member."""
        gate = Gate(kind, sender, mode, most, self.member(to).process.name if to else "")
        self.broker.gates.append(gate)
        return gate

    def stall(self, reader: str, *steps: str) -> PlaneGate:
        """Let the gets of a reader stop at these steps."""
        parts = self.parts(reader)
        self.say(f"gets of {reader} stall at {', '.join(step.strip('_') for step in steps)}")
        return PlaneGate(self.loop, self.member(reader).device, parts.reader, steps)

    async def stalled(self, gate: PlaneGate) -> None:
        """Wait until a get has come to its gate."""
        await self.until("a get stalls", lambda: bool(gate.held))

    async def caught(self, gate: Gate, count: int = 1) -> None:
        """Wait until a gate has met so many messages."""
        await self.until(f"a {gate.kind} comes by", lambda: gate.seen >= count)

    def freeze(self, instance: str) -> Member:
        """Stop a member's process, its gets with it: SIGSTOP, or a machine that swaps."""
        member = self.member(instance)
        self.say(f"{member.process.name} stands still")
        for actor in (member.actor, member.device):
            self.loop.pause(actor)
        return member

    def thaw(self, member: Member) -> None:
        """Let a frozen process go on."""
        self.say(f"{member.process.name} goes on")
        for actor in (member.actor, member.device):
            self.loop.resume(actor)

    def freeze_engine(self, instance: str) -> Actor:
        """Stop an instance's engine wherever it stands."""
        run = self.parts(instance).engine._run  # noqa: SLF001 - the process, which nobody else names
        if run is None:
            raise NotStagedError(f"no engine is attached to {instance}")
        self.say(f"the engine of {instance} stands still")
        self.loop.pause(run.actor)
        return run.actor

    def is_writing(self, instance: str) -> bool:
        """Whether somebody writes into an instance's pages now."""
        return bool(self.member(instance).process.writers)

    def kill(self, instance: str) -> Member:
        """Kill a member; a successor follows within seconds."""
        member = self.member(instance)
        self.town.kill(member)
        return member

    async def successor(self, instance: str) -> Member:
        """Start another member of an instance beside the one that runs, and wait until it is the one that is found."""
        before = self.member(instance)
        self.town._start(before.instance, before.rank)  # noqa: SLF001 - a second start is what no town means to do
        member = self.member(instance)
        await self.until("the successor can be found", self._all_registered)
        return member

    async def restarted(self, instance: str) -> Member:
        """Wait until the successor of a killed member can be found."""
        await self.until(f"{instance} is up again", lambda: self.member(instance).alive and self._all_registered())
        return self.member(instance)

    # --------------------------------------------------------------------------------------------------------- inside

    def _all_registered(self) -> bool:
        found = {(event.header.i, event.header.m, event.header.e) for event in self._records()}
        return all(
            member.parts is not None and (member.instance, member_name(member.rank), member.parts.epoch) in found
            for member in self.town.members.values()
        )

    def _records(self) -> list[Event]:
        return [decode(entry.value) for entry, _ in self.broker.entries(BUCKET_INSTANCES).values()]
