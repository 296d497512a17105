"""One running transfer: carries out what `ledger/transfer.py` decides, and tells it what happened."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbus.dataplane.reading import ReadOrder
from kvbus.errors import LedgerContradictionError
from kvbus.events import LendRequested, ReaderKey, TransferRequested, TransferStep
from kvbus.ledger.agreement import Party
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.transfer import (
    Action,
    AskSource,
    CloseKey,
    GiveUp,
    IsolateSource,
    LeasePages,
    Phase,
    Read,
    Report,
    Stop,
    Transfer,
)
from kvbus.ledger.types import Direction, SubmitMode
from kvbus.names import token_bytes
from kvbus.parts import ProcessIdentity
from kvbus.pool.pins import PinSet
from kvbus.roles.asking import Asker, Granted, NotGranted
from kvbus.roles.poolside import PoolSide
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Registered
from kvbus.roles.rounds import Rounds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReaderSide:
    """Who reads: this member, the binding by which it reads, and the parts that its transfers share."""

    instance: str
    member: str
    epoch: int
    process: ProcessIdentity
    binding: str
    transports: tuple[str, ...]
    pool: PoolSide
    rounds: Rounds
    asker: Asker
    recorder: Recorder
    lend_wait_s: float
    clock: Callable[[], float]
    nonce: Callable[[int], bytes] = secrets.token_bytes


@dataclass(slots=True)
class Running:
    """A transfer in flight: its ledger state, its prompt once it has token ids, its leases, its grant."""

    side: ReaderSide
    request: TransferRequested
    transfer: Transfer
    on_leased: Callable[["Running"], None]
    on_ended: Callable[["Running"], None]
    source: Registered | None = None
    token_ids: tuple[int, ...] = ()
    names: tuple[bytes, ...] = ()
    missing: tuple[int, ...] = ()
    tickets: dict[int, int] = field(default_factory=dict)
    pins: PinSet | None = None
    granted: Granted | None = None
    nonce: bytes = b""
    _ask_task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------------- events

    def resolved(self, source: Registered, token_ids: Sequence[int]) -> None:
        """The prompt has token ids: see what is missing here, and pin what is not."""
        if self.transfer.phase is not Phase.RESOLVING:
            return  # cancelled, or out of time, meanwhile
        self.source = source
        pool = self.side.pool
        self.token_ids = tuple(token_ids)
        self.names = pool.names(self.token_ids, self.request.salt)
        held = pool.lender.held(self.names)
        self.missing = tuple(block for block, here in enumerate(held) if not here)
        self.pins = pool.lender.pin_set(for_peer=False)
        for block, here in enumerate(held):
            if here:  # a hit is pinned from planning on, so that the prefix is still here when the rest arrives (P10)
                self.pins.pin((self.names[block],))
        wanted = len(self.names)
        self._step("resolved", f"{len(token_ids)} tokens, {wanted} blocks, {wanted - len(self.missing)} here already")
        now = self.side.clock()
        blocks_held = wanted - len(self.missing)
        prefix = self.missing[0] if self.missing else wanted
        self.act(
            self.transfer.resolved(
                now, prompt_tokens=len(token_ids), blocks_wanted=wanted, blocks_held=blocks_held, prefix_held=prefix
            )
        )

    def failed(self, failure: FailureClass, text: str) -> None:
        """It ends before any byte moved."""
        self.act(self.transfer.failed(self.side.clock(), failure, text))

    def cancelled(self, failure: FailureClass, text: str) -> None:
        """Somebody asked that it stop, or this member is stopping."""
        if actions := self.transfer.cancelled(self.side.clock(), failure, text):
            self._step("cancel", text)
            self.act(actions)

    def tick(self) -> None:
        """Time has passed."""
        self.act(self.transfer.tick(self.side.clock()))

    def on_line(self, ticket: int, bits: int, lo: int, hi: int) -> None:
        """A line of facts about one of this transfer's leases."""
        self.act(self.transfer.facts(self.side.clock(), ticket, bits, lo, hi))

    # ------------------------------------------------------------------------------------------------------ actions

    def act(self, actions: Sequence[Action]) -> None:
        """Carry out what the transfer decided, in order."""
        for action in actions:
            match action:
                case LeasePages():
                    self._lease_pages()
                case AskSource():
                    self._ask()
                case Read():
                    self._read()
                case Stop(text):
                    self._step("stopping", text)
                    self._stop(text)
                case GiveUp(failure, text):
                    self._step("giving_up", text)
                    self._give_up(failure, text)
                case IsolateSource(text):
                    self._step("isolating", text)
                    self.side.rounds.holder.isolate(self.side.binding, self.request.source, text)
                    self.side.rounds.run()
                case CloseKey():
                    self._step("access_ended", ", ".join(self.transfer.evidence))
                    self.side.asker.release(self._key(), self.nonce, self._source())
                case Report():
                    self._report()

    def _lease_pages(self) -> None:
        side, request = self.side, self.request
        names = tuple(self.names[block] for block in self.missing)
        try:
            lease = side.pool.lender.lend_write(names, self.missing, prompt_blocks=len(self.names))
        except ValueError as error:
            self.failed(FailureClass.BAD_REQUEST, str(error))
            return
        mode = SubmitMode(side.binding, Direction.WRITE)
        now = side.clock()
        ticket = side.rounds.holder.take(
            lease, mode, now=now, timeout_s=self.transfer.remaining_s(now), peer=request.source, transfer=self._id
        )
        self.tickets = {ticket: lease.rank}
        self.on_leased(self)  # from here on the facts of this lease find their way here
        parties = tuple(Party(side.member, side.epoch, rank, number) for number, rank in self.tickets.items())
        side.rounds.decide(lambda agreement: agreement.open(self._id, parties))
        self.nonce = side.nonce(16)
        actions = self.transfer.leased(now, self.tickets)
        side.rounds.run()  # a refusal by the pool or the binding is known after this
        self._step("leased", f"T{ticket}: {len(names)} pages")
        if self.transfer.phase is Phase.ASKING:
            self.act(actions)

    def _ask(self) -> None:
        self._ask_task = asyncio.get_running_loop().create_task(self._ask_source())

    async def _ask_source(self) -> None:
        side, request = self.side, self.request
        asked = LendRequested(
            key=self._key(),
            nonce=self.nonce,
            fingerprint=side.pool.layout.fingerprint(),
            names=b"".join(self.names[block] for block in self.missing),
            first_block=self.missing[0],
            tokens=token_bytes(self.token_ids) if request.on_miss == "prefill" else b"",
            salt=request.salt,
            on_miss=request.on_miss,
            budget_s=max(0.001, self.transfer.remaining_s(side.clock())),
            wait_s=side.lend_wait_s,
            process=side.process,
            source_epoch=self._source().epoch,
            transports=side.transports,
        )
        self._step("asking", f"{request.source} for {len(self.missing)} blocks, on_miss {request.on_miss}")
        answer = await side.asker.ask(
            asked,
            self._source(),
            page_bytes=side.pool.layout.page_bytes,
            deadline=self.transfer.deadline,
            on_computing=lambda: self._step("computing", f"{request.source} computes the prompt"),
        )
        now = side.clock()
        if isinstance(answer, NotGranted):
            self.act(self.transfer.failed(now, answer.failure, answer.text))
            return
        self.granted = answer
        blocks = len(answer.grant.page_indexes())
        self._step("granted", f"lease T{answer.grant.ticket} of {request.source}: {blocks} pages")
        self.act(self.transfer.granted(now, blocks))

    def _read(self) -> None:
        if self.granted is None:
            raise LedgerContradictionError("a read without a grant", transfer=self._id)
        order = ReadOrder(self.granted.grant, self.granted.expected)
        self._step("moving", f"by {self.side.binding}")
        self._each_ticket(lambda ticket: self.side.rounds.holder.assign(ticket, order))

    def _stop(self, text: str) -> None:
        self._each_ticket(lambda ticket: self.side.rounds.holder.cancel(ticket, text))

    def _give_up(self, failure: FailureClass, text: str) -> None:
        if self._ask_task is not None and self._ask_task is not asyncio.current_task():
            self._ask_task.cancel()
        self._each_ticket(lambda ticket: self.side.rounds.holder.abandon(ticket, failure, text))

    def _each_ticket(self, call: Callable[[int], None]) -> None:
        holder = self.side.rounds.holder
        for ticket in self.tickets:
            if holder.bits(ticket):  # still held
                call(ticket)
        self.side.rounds.run()

    def _report(self) -> None:
        if self.pins is not None:
            self.pins.drop()
        self.on_ended(self)

    # ------------------------------------------------------------------------------------------------------- naming

    @property
    def _id(self) -> str:
        return self.transfer.transfer

    def _source(self) -> Registered:
        if self.source is None:
            raise LedgerContradictionError("a transfer without its source", transfer=self._id)
        return self.source

    def _key(self) -> ReaderKey:
        side = self.side
        return ReaderKey(
            instance=side.instance,
            member=side.member,
            epoch=side.epoch,
            transfer=self._id,
            attempt=1,
            rank=side.pool.layout.rank,
        )

    def _step(self, step: str, text: str) -> None:
        self.side.recorder.event(
            TransferStep(transfer=self._id, request_hash=self.request.request_hash, step=step, text=text[:2_000]),
            cause=self.request.request_id,
        )
