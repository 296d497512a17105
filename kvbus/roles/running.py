"""One running transfer: carries out what `ledger/transfer.py` decides, and tells it what happened."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from kvbus.dataplane.choosing import Found, Way
from kvbus.dataplane.reading import ReadOrder
from kvbus.errors import LedgerContradictionError
from kvbus.events import LendRequested, ReaderKey, TransferRequested, column
from kvbus.ledger.agreement import Party
from kvbus.ledger.facts import Fact, FailureClass
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
from kvbus.ledger.types import Direction, LeaseFailure, SubmitMode
from kvbus.names import token_bytes
from kvbus.parts import PagesFound, ProcessIdentity
from kvbus.pool.pins import PinSet
from kvbus.roles.asking import Asker, Granted, NotGranted
from kvbus.roles.digesting import keep_granted
from kvbus.roles.grouping import TransferGroup
from kvbus.roles.poolside import PoolSide
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Registered
from kvbus.roles.rounds import Rounds
from kvbus.roles.tasks import started
from kvbus.roles.tokens import Content

# Looking a name up in an enum costs more than what is decided by it here, for each line of facts.
_RESOLVING, _SUBMITTED = Phase.RESOLVING, int(Fact.SUBMITTED)


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
    ways: Callable[[int], Sequence[Way]] = lambda _ticket: ()
    """By ticket: what there is to tell of the way that its order takes; told once."""
    found: Callable[[int], Found] = lambda _ticket: Found()
    """By ticket: what its order found of the source's pages; told once."""
    group: TransferGroup | None = None
    network: int | None = None


@lru_cache(maxsize=16)  # one for each binding by which this process reads: they are shared by all leases (R3)
def _write_mode(binding: str) -> SubmitMode:
    return SubmitMode(binding, Direction.WRITE)


@dataclass(frozen=True, slots=True)
class Agreed:
    """How the members of this instance ended a transfer; lo and hi are the bounds in blocks that all ranks have."""

    visible: bool
    lo: int
    hi: int
    reason: str


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
    agreed: Agreed | None = None
    concluded: bool = False
    follows: bool = False
    """Whether another member admitted it: nobody hears of its end from here."""
    queued: bool = False
    """Whether the queue offered its request: then it can be handed back."""
    unwanted: str = ""
    """Who cancelled it; empty while nobody has."""
    _told_way: bool = False
    _reader: ReaderKey | None = None
    _ask_task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        """From here on it is traced, where anything is."""
        self.side.recorder.spans.began(self._id, self.request)

    @property
    def is_handed_back(self) -> bool:
        """Whether its member stopped before it could end, so that its request is for whoever the queue offers it to."""
        transfer = self.transfer
        stopped = transfer.outcome == "cancelled" and transfer.failure is FailureClass.SHUTDOWN
        return self.queued and stopped and not self.unwanted

    # ------------------------------------------------------------------------------------------------------- events

    def resolved(self, source: Registered, content: Content) -> None:
        """The prompt has its page names: see what is missing here, and pin what is not."""
        if self.transfer.phase is not _RESOLVING:
            return  # cancelled, or out of time, meanwhile
        self.source = source
        pool = self.side.pool
        self.token_ids, self.names = content.token_ids, content.names
        if self.request.prompt.prefix is not None:  # of its source's salt, and nothing that anybody could compute
            self.request = self.request.model_copy(update={"salt": content.salt, "on_miss": "partial"})
        pool.prompts.note(self.names, content.salt)
        held = pool.lender.held(self.names)
        self.missing = tuple([block for block, here in enumerate(held) if not here])
        wanted = len(self.names)
        blocks_held = wanted - len(self.missing)
        # A hit is pinned from planning on, so that the prefix is still here when the rest arrives (P10), and counts as
        # what is lent does (P26).
        hits = [name for name, here in zip(self.names, held, strict=True) if here] if blocks_held else []
        kept = pool.kept([page for name in hits for page in pool.lender.pages_held((name,))]) if hits else None
        self.pins = kept if isinstance(kept, PinSet) else None
        self._step("resolved", f"{content.tokens} tokens, {wanted} blocks, {blocks_held} here already")
        now = self.side.clock()
        if isinstance(kept, LeaseFailure) and (self.missing or self.side.group is not None):  # else it ends at once
            self.failed(kept.failure, kept.text)
            return
        if self.side.group is not None and not self.missing:
            self.side.group.nothing_missing(self._id, wanted)
        prefix = self.missing[0] if self.missing else wanted
        self.act(
            self.transfer.resolved(
                now, prompt_tokens=content.tokens, blocks_wanted=wanted, blocks_held=blocks_held, prefix_held=prefix
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
        if actions := self.transfer.tick(self.side.clock()):
            self.act(actions)

    def on_line(self, ticket: int, bits: int, lo: int, hi: int) -> None:
        """A line of facts about one of this transfer's leases."""
        if self.granted is not None:  # else nothing was ordered
            self._tell_ways(bits)
        if actions := self.transfer.facts(self.side.clock(), ticket, bits, lo, hi):
            self.act(actions)

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
                    self.side.asker.release(self._key(), self.nonce, self._source(), self._found())
                case Report():
                    self._report()

    def _lease_pages(self) -> None:
        side, request = self.side, self.request
        names = self._missing_names()
        try:
            lease = side.pool.lender.lend_write(names, self.missing, prompt_blocks=len(self.names), salt=request.salt)
        except ValueError as error:
            self.failed(FailureClass.BAD_REQUEST, str(error))
            return
        mode, now = _write_mode(side.binding), side.clock()
        ticket = side.rounds.holder.take(
            lease, mode, now=now, timeout_s=self.transfer.remaining_s(now), peer=request.source, transfer=self._id
        )
        self.tickets = {ticket: lease.rank}
        self.on_leased(self)  # from here on the facts of this lease find their way here
        if side.group is not None:
            side.group.leased(self._id, ticket)
        else:
            party = Party(side.member, side.epoch, lease.rank, ticket)
            side.rounds.decide(lambda agreement: agreement.open(self._id, (party,)))
        self.nonce = side.nonce(16)
        actions = self.transfer.leased(now, self.tickets)
        self._step("leased", f"T{ticket}: {len(names)} pages")
        self.act(actions)

    def _ask(self) -> None:
        on_fault = partial(self.failed, FailureClass.CONTRADICTION)
        self.side.rounds.call_for()
        self._ask_task = started(self._ask_source(), name="asking", on_fault=on_fault)

    async def _ask_source(self) -> None:
        side, request = self.side, self.request
        side.rounds.run_due()  # a refusal by the pool or the binding is known after this
        if self.transfer.phase is not Phase.ASKING:
            return
        source, on_miss = self._source(), request.on_miss
        asked = LendRequested(
            key=self._key(),
            nonce=self.nonce,
            fingerprint=side.pool.layout.fingerprint(),
            names=b"".join(self._missing_names()),
            first_block=self.missing[0],
            tokens=token_bytes(self.token_ids) if on_miss == "prefill" else b"",
            salt=request.salt,
            on_miss=on_miss,
            budget_s=max(0.001, self.transfer.remaining_s(side.clock())),
            wait_s=side.lend_wait_s,
            process=side.process,
            source_epoch=source.epoch,
            transports=side.transports,
            network=side.network,
            traceparent=side.recorder.spans.traceparent(self._id),
        )
        self._step("asking", f"{source.instance} for {len(self.missing)} blocks, on_miss {on_miss}")
        answer = await side.asker.ask(
            asked,
            source,
            page_bytes=side.pool.layout.page_bytes,
            deadline=self.transfer.deadline,
            on_computing=lambda: self._step("computing", f"{source.instance} computes the prompt"),
        )
        now = side.clock()
        if isinstance(answer, NotGranted):
            self.act(self.transfer.failed(now, answer.failure, answer.text))
            return
        self.granted = answer
        blocks = len(answer.grant.page_indexes())
        self._step("granted", f"lease T{answer.grant.ticket} of {source.instance}: {blocks} pages")
        self.act(self.transfer.granted(now, blocks))
        await side.rounds.shared()  # with those whose grants came at the same time

    def _read(self) -> None:
        side, granted = self.side, self.granted
        if granted is None:
            raise LedgerContradictionError("a read without a grant", transfer=self._id)
        order = ReadOrder(granted.grant, granted.expected, self._source().record.process)
        for ticket in self.tickets:
            keep_granted(side.pool.memory, side.rounds.holder.view(ticket), granted.grant)
            if side.rounds.holder.bits(ticket):  # still held
                side.rounds.holder.assign(ticket, order)

    def _tell_ways(self, bits: int) -> None:
        """Say which way the pages take, and why; and over which lanes they came, once that is known."""
        told = [way for ticket in self.tickets for way in self.side.ways(ticket)]
        if not (told or self._told_way) and bits & _SUBMITTED:
            told = [Way("moving", f"by {self.side.binding}")]
        for way in told:
            self._step(way.step, way.text)
        self._told_way = self._told_way or bool(told)

    def _found(self) -> PagesFound | None:
        """Return what the source should know of its pages, by their place and content there; None where all is well."""
        if self.granted is None:
            return None  # nothing was ordered
        told = [self.side.found(ticket) for ticket in self.tickets]
        rows, changed = [row for one in told for row in one.differing], sum(one.changed for one in told)
        if not (rows or changed):
            return None
        pages, digests = self.granted.grant.page_indexes(), self.granted.grant.page_digests()
        return PagesFound(
            request_hash=self.request.request_hash,
            pages=column((pages[row] for row in rows), 4),
            digests=column((digests[row] for row in rows), 8),
            changed=changed,
        )

    def _stop(self, text: str) -> None:
        self._each_ticket(lambda ticket: self.side.rounds.holder.cancel(ticket, text))

    def _give_up(self, failure: FailureClass, text: str) -> None:
        if self._ask_task is not None and self._ask_task is not asyncio.current_task():
            self._ask_task.cancel()
        group = self.side.group
        if group is not None and not group.may_give_up(self._id):
            return  # promised to the other members: only waiting stops here (P11)
        if group is not None:
            group.explain(self._id, text)
        self._each_ticket(lambda ticket: self.side.rounds.holder.abandon(ticket, failure, text))

    def _each_ticket(self, call: Callable[[int], None]) -> None:
        holder = self.side.rounds.holder
        for ticket in self.tickets:
            if holder.bits(ticket):  # still held
                call(ticket)
        self.side.rounds.run()

    def _report(self) -> None:
        if self.side.group is not None:
            # acts only where it ended here without a share to show
            self.side.group.refuse(self._id, self.transfer.reason)
        else:
            self.drop_pins()
        if self.follows:
            self.side.recorder.spans.forget(self._id, self.transfer.reason)
        self.on_ended(self)

    def drop_pins(self) -> None:
        """Let go what was here already; with other members, only once all of them know how the transfer ends (P10)."""
        if self.pins is not None:
            self.pins.drop()

    # ------------------------------------------------------------------------------------------------------- naming

    @property
    def _id(self) -> str:
        return self.transfer.transfer

    def _source(self) -> Registered:
        if self.source is None:
            raise LedgerContradictionError("a transfer without its source", transfer=self._id)
        return self.source

    def _missing_names(self) -> tuple[bytes, ...]:
        names, missing = self.names, self.missing
        return names if len(missing) == len(names) else tuple([names[block] for block in missing])

    def _key(self) -> ReaderKey:
        """Return under which key the source is asked, and hears that access has ended."""
        if self._reader is None:
            side, rank = self.side, self.side.pool.layout.rank
            self._reader = ReaderKey(
                instance=side.instance, member=side.member, epoch=side.epoch, transfer=self._id, attempt=1, rank=rank
            )
        return self._reader

    def _step(self, step: str, text: str) -> None:
        transfer = self.transfer
        self.side.recorder.step(transfer.transfer, transfer.request_hash, step, text, self.request.request_id)
