"""One bare member: a worker's pool, ledger, data plane and recorder, without bus and engine; it runs in a child.

What a worker hears over the bus comes in as calls here; what it records goes into a file, which outlives a kill.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.chaos_data.content import Window, fill
from bench.chaos_data.planes import FactsFile, NoEngine, open_plane, open_pool
from bench.chaos_data.records import TRANSPORTS, Described, End, HandOver, MemberSettings, Sealed, Standing
from kvbus.dataplane.reading import ReadOrder
from kvbus.dataplane.socket_lending import ServedLending
from kvbus.errors import PeerError
from kvbus.events import Event, Header, LendAnswered, LendRequested, ReaderKey, decode
from kvbus.grants import Expected, Grant, LenderKey, unseal
from kvbus.ledger.agreement import Agreement, Party
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import FactDetail, OutcomeRow
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.lending import LendBook
from kvbus.ledger.types import Containment, Direction, SubmitMode
from kvbus.pool.index import ReuseIndex
from kvbus.processes import ProcessWatch, identity
from kvbus.roles.local import LocalBackend
from kvbus.roles.prefills import Prefiller
from kvbus.roles.recorder import Recorder
from kvbus.roles.rounds import Rounds
from kvbus.roles.source import LenderName, Source
from kvbus.testing.bus import MemoryBroker
from kvbus.topics import Topics

TICK_S = 0.25
"""A round runs at least this often, as in a worker with transfers under way."""
READERS_MAX = 4_096
"""As in a worker."""
POSTED = frozenset({"length_bytes", "gets", "questions", "copies"})
"""Counters of which each transport has two or more."""


@dataclass
class Member:
    """A bare member at work; all methods belong to the loop."""

    settings: MemberSettings
    loop: asyncio.AbstractEventLoop
    ends: dict[int, End] = field(default_factory=dict)
    details: dict[int, str] = field(default_factory=dict)
    hand_overs: dict[int, HandOver] = field(default_factory=dict)
    known: dict[bytes, None] = field(default_factory=dict)
    """The names of all that was ever to be here."""
    refusals: int = 0
    lent: dict[str, int] = field(default_factory=dict)
    """The ticket of what was lent, by transfer."""

    def __post_init__(self) -> None:
        """Build every part, as a worker's assembly does."""
        settings = self.settings
        self.index = ReuseIndex()
        self.pool = open_pool(settings, self.index)
        self.plane = open_plane(settings, self.pool, self._wake)
        self.lending = ServedLending(wake=self._wake, server=self.plane.server)
        self.writes = LocalBackend(name="engine-write")
        self.recorder = Recorder(
            bus=FactsFile(MemoryBroker(), settings.facts),
            topics=Topics(),
            instance=settings.instance,
            member="m0",
            epoch=settings.epoch,
            unix_ns=time.time_ns,
        )
        holder = LeaseHolder(
            bindings=[
                Binding("engine-write", self.writes, Direction.WRITE, Containment.STOP_BINDING),
                Binding("lending", self.lending, Direction.READ),
                Binding(settings.transport, self.plane.reader, Direction.WRITE),
            ],
            lenders=[self.pool.lender],
        )
        self.rounds = Rounds(
            holder=holder,
            agreement=Agreement(term=settings.epoch),
            sink=self.recorder,
            member="m0",
            epoch=settings.epoch,
        )
        self.rounds.follow(self)
        key = LenderKey.generate()
        self.verify_key = key.verify_key
        nothing = NoEngine()
        self.source = Source(
            name=LenderName(settings.instance, "m0", settings.epoch),
            pool=self.pool,
            access=self.plane.access,
            rounds=self.rounds,
            lending=self.lending,
            key=key,
            book=LendBook(entries_max=READERS_MAX),
            prefiller=Prefiller(port=nothing, desk=nothing),
            recorder=self.recorder,
            watch=ProcessWatch(self.loop),
            clock=time.monotonic,
        )

    # ------------------------------------------------------------------------------------------------------ the round

    def _wake(self) -> None:
        self.loop.call_soon_threadsafe(self.round)

    def round(self) -> None:
        """What a worker does each time it is woken."""
        self._watch_hand_overs()
        if self.plane.ucx is not None:
            for notice in self.plane.ucx.notices():
                self.source.released(notice.key, notice.nonce)
        self.rounds.run()
        for reader in self.lending.closed_here():
            self.source.released(reader.key, reader.nonce)
        self._hand_over()

    def on_line(self, ticket: int, bits: int, lo: int, hi: int) -> None:
        """Lines are for the facts."""

    def on_outcome(self, row: OutcomeRow) -> None:
        """Note how an attempt ended, and when that was known here."""
        self.ends[row.ticket] = End(row.result, row.evidence, row.arrived, row.text, time.monotonic())

    def on_detail(self, detail: FactDetail) -> None:
        """Note why something failed."""
        self.details[detail.ticket] = f"{detail.failure.name.lower()}: {detail.text}"

    def _watch_hand_overs(self) -> None:
        """While an attempt's access has not ended, its pages must not be had by anybody."""
        for ticket, waiting in self.hand_overs.items():
            is_out = not waiting.taken_at and self.rounds.holder.bits(ticket) and ticket not in self.ends
            if is_out:
                waiting.looks += 1
                waiting.too_early += self.pool.lender.refusal(len(waiting.names), for_peer=False) is None

    def _hand_over(self) -> None:
        for ticket, waiting in self.hand_overs.items():
            if not waiting.taken_at and not self.rounds.holder.bits(ticket):
                waiting.refused = self.write(waiting.names)
                waiting.taken_at = time.monotonic()

    # ---------------------------------------------------------------------------------------------------- as a source

    def write(self, names: Sequence[bytes]) -> str:
        """Fill pages as an engine does; return why they are not had, or ""."""
        self.known |= dict.fromkeys(names)
        lease = self.pool.lender.lend_write(names, range(len(names)), for_peer=False, salt="")
        mode = SubmitMode("engine-write", Direction.WRITE)
        ticket = self.rounds.holder.take(lease, mode, None, now=time.monotonic(), peer="engine")
        self.rounds.run()
        view = self.rounds.holder.view(ticket)
        if view is None:
            return lease.failure.text if lease.failure else "no page was lent"
        for page, name in zip(view.pages, names, strict=True):
            fill(self.pool.memory.page_bytes(page), name)
        self.writes.completed(ticket, whole=True, page_bytes=self.settings.page_bytes)
        self.rounds.run()
        return ""

    def write_at(self, names: Sequence[bytes]) -> float:
        """As `write`, and return when it began; RuntimeError where no page is had."""
        began = time.monotonic()
        if refused := self.write(names):
            raise RuntimeError(refused)
        return began

    async def lend(self, asked: LendRequested) -> LendAnswered:
        """Answer a reader's question as over the bus."""
        header = Header(k=asked.KIND, i=asked.key.instance, m="m0", e=asked.key.epoch, s=1, t=time.time_ns())
        answer = decode(await self.source.answer(Event(header=header, body=asked))).body
        if not isinstance(answer, LendAnswered):
            raise TypeError(f"a question was answered by {answer}")
        if answer.status == "granted":
            self.lent[asked.key.transfer] = unseal(answer.grant, answer.signature, self.verify_key).ticket
        return answer

    def released(self, key: ReaderKey, nonce: bytes) -> bool:
        """Take a reader's word as over the bus."""
        return self.source.released(key, nonce)

    def evict(self, names: Sequence[bytes]) -> int:
        """Forget pages that nobody holds."""
        return self.pool.lender.evict(names)

    def fence(self, instance: str, epoch: int) -> int:
        """Take back what a silent reader was lent (P5); return how many leases that were."""
        return len(self.source.fence(instance, "m0", epoch, "the fault asks for it").tickets)

    def lent_end(self, transfer: str) -> End | None:
        """Return how the lease of a transfer ended here."""
        ticket = self.lent.get(transfer)
        return self.ends.get(ticket) if ticket is not None else None

    # ----------------------------------------------------------------------------------------------------- as a reader

    def fetch(
        self, sealed: Sealed, expected: Expected, names: Sequence[bytes], hand_to: Sequence[bytes] = ()
    ) -> tuple[int, tuple[int, ...]]:
        """Begin to read a granted lease; return its ticket here and its pages."""
        return self.fetch_grant(unseal(*sealed), expected, names, hand_to)

    def fetch_grant(
        self,
        grant: Grant,
        expected: Expected,
        names: Sequence[bytes],
        hand_to: Sequence[bytes] = (),
        *,
        story: str = "",
    ) -> tuple[int, tuple[int, ...]]:
        """Begin to read under a grant that may say anything; with `hand_to`, new content waits for the pages.

        `story` is the transfer's name in the facts, where it is not the reader's key that names it.
        """
        transfer, rounds = story or expected.reader.transfer, self.rounds
        self.known |= dict.fromkeys(names)
        lease = self.pool.lender.lend_write(names, range(len(names)), prompt_blocks=len(names), salt="")
        mode = SubmitMode(self.settings.transport, Direction.WRITE)
        now = time.monotonic()
        ticket = rounds.holder.take(lease, mode, now=now, peer=expected.lender_instance, transfer=transfer)
        party = Party("m0", self.settings.epoch, 0, ticket)
        rounds.decide(lambda agreement: agreement.open(transfer, (party,)))
        if hand_to:
            self.hand_overs[ticket] = HandOver(tuple(hand_to))
        rounds.run()
        view = rounds.holder.view(ticket)
        rounds.holder.assign(ticket, ReadOrder(grant, expected))
        self.round()
        return ticket, view.pages if view else ()

    def refuses(self, sealed: Sealed, expected: Expected, names: Sequence[bytes]) -> str:
        """Return why a sealed grant leads to nothing; RuntimeError where it is read."""
        try:
            grant = unseal(*sealed)
        except PeerError as error:
            return str(error)
        return self.refuses_grant(grant, expected, names)

    def refuses_grant(self, grant: Grant, expected: Expected, names: Sequence[bytes]) -> str:
        """Return why a grant leads to nothing; RuntimeError where it is read."""
        self.refusals += 1
        ticket, _ = self.fetch_grant(grant, expected, names, story=f"{expected.reader.transfer}.{self.refusals}")
        if not (refusal := self.refusal_of(ticket)):
            raise RuntimeError("it was not refused before anything was posted")
        return refusal

    def cancel(self, ticket: int) -> float:
        """Ask an attempt to stop; return when that was."""
        asked_at = time.monotonic()
        if self.rounds.holder.bits(ticket):
            self.rounds.holder.cancel(ticket, "the fault asks for it")
        self.round()
        return asked_at

    def end_of(self, ticket: int) -> End | None:
        """Return how an attempt ended, once it has."""
        return self.ends.get(ticket)

    def refusal_of(self, ticket: int) -> str:
        """Return why a lease came to nothing without an attempt, or ""."""
        return "" if ticket in self.ends or self.rounds.holder.bits(ticket) else self.details.get(ticket, "")

    def hand_over_of(self, ticket: int) -> HandOver:
        """Return how new content fared that waited for an attempt's pages."""
        return self.hand_overs[ticket]

    def counted(self) -> dict[str, object]:
        """Return the reader's own counters."""
        statistics = getattr(self.plane.reader, "statistics")()  # noqa: B009 - each reader has its own record
        return {name: getattr(statistics, name) for name in statistics.__slots__}

    def posted(self) -> dict[str, object]:
        """Return what the reader has asked for so far, of whomever: it stands still while nothing is being read."""
        return {name: count for name, count in self.counted().items() if name in POSTED}

    # -------------------------------------------------------------------------------------------------------- as both

    def describe(self) -> Described:
        """Say who this is, and where its pool can be looked at."""
        memory = self.pool.memory
        window = Window(
            os.getpid(),
            memory.fd,
            memory.pages_offset,
            memory.page_stride,
            self.settings.page_bytes,
            memory.length_bytes,
        )
        return Described(identity(), self.verify_key, memory.fingerprint, window, TRANSPORTS[self.settings.transport])

    def standing(self) -> Standing:
        """Return the books, checked."""
        fault = ""
        try:
            self.pool.lender.check()
            self.rounds.holder.check()
        except Exception as error:  # noqa: BLE001 - whatever a check finds is a finding
            fault = repr(error)
        pages = self.pool.allocator.statistics()
        places = zip(self.known, self.index.match(self.known), strict=True)
        content = {name: page for name, page in places if page is not None}
        if len(content) != pages.cached:
            fault = fault or f"{pages.cached} pages are content, {len(content)} of them under a name that was asked for"
        held = self.rounds.holder.statistics().held
        return Standing(self.pool.memory.page_count, pages.free, pages.idle, held, fault, content)

    def descriptors(self) -> int:
        """Count this process's open files."""
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
