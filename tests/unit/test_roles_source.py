"""The source with a real pool, holder and signed grants: a frozen reader is fenced on request, and by nothing else."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from kvbus.dataplane.lending import LendingBackend
from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.reading import ReadOrder
from kvbus.engines.base import Prefilled
from kvbus.engines.desk import Refusal
from kvbus.events import Header, LeaseReleased, LendAnswered, LendRequested, ReaderKey, ReleaseConfirmed, decode, encode
from kvbus.grants import Expected, Grant, LenderKey, MemoryAccess, refusal, unseal
from kvbus.ledger.agreement import Agreement, Decision
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import EVIDENCE_BITS, Fact, FailureClass, LeaseFacts, OutcomeRow
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.lending import LendBook
from kvbus.ledger.types import Change, Delivered, Direction, Failed, LeaseView, Order
from kvbus.names import page_names, token_bytes
from kvbus.parts import Body
from kvbus.pool.memory import PoolMemory
from kvbus.processes import ProcessWatch, identity
from kvbus.roles.offers import key_of as offers_key
from kvbus.roles.poolside import PoolSide
from kvbus.roles.prefills import Prefiller
from kvbus.roles.recorder import Recorder
from kvbus.roles.rounds import Rounds
from kvbus.roles.source import Fenced, LenderName, PoolAccess, Source
from kvbus.testing.bus import MemoryBus
from kvbus.topics import Topics
from tests.unit.pool_parts import EPOCH, TOY
from tests.waiting import until, wait_until

READER_EPOCH = 9 << 32 | 1
ELSEWHERE = identity().model_copy(update={"boot_id": "another host"})
"""A reader of another host: its death cannot be proved from here."""
SALT, TENANT = "tenant one", "tenant two"


class NoEngine:
    """A port and a desk that nobody asks for anything."""

    async def prefill(self, ids: tuple[int, ...], salt: str, budget_s: float) -> Prefilled | Refusal:
        return Refusal(f"no engine here for {len(ids)} tokens of {salt!r} within {budget_s} s")

    def release(self, handle: int) -> None:
        raise AssertionError(f"handle {handle} is released, and nothing was prefilled")


class Sink:
    """Keeps what a round says."""

    def __init__(self) -> None:
        self.bits: dict[int, int] = {}
        self.outcomes: list[OutcomeRow] = []

    def facts(self, facts: LeaseFacts) -> None:
        self.bits.update({ticket: bits for ticket, _, bits, _, _ in facts.lines})
        self.outcomes += [row for row in facts.rows if isinstance(row, OutcomeRow)]

    def decision(self, decision: Decision) -> None:
        raise AssertionError(f"nothing is decided here: {decision}")


class Lender:
    """One member that lends: everything but its engine and its bus is what a worker runs."""

    def __init__(self, bus: MemoryBus) -> None:
        self.pool = PoolSide.create(TOY, pages=16, tokens_max=32, vocab_size=100, epoch=EPOCH)
        self.now = 0.0
        self.sink, self.lending, self.key = Sink(), LendingBackend(wake=lambda: None), LenderKey.generate()
        self.holder = LeaseHolder(
            bindings=[Binding("lending", self.lending, Direction.READ)], lenders=[self.pool.lender]
        )
        self.rounds = Rounds(
            holder=self.holder, agreement=Agreement(term=EPOCH), sink=self.sink, member="m0", epoch=EPOCH
        )
        recorder = Recorder(
            bus=bus, topics=Topics(), instance="a", member="m0", epoch=EPOCH, unix_ns=lambda: int(self.now * 1e9)
        )
        self.source = Source(
            name=LenderName("a", "m0", EPOCH),
            pool=self.pool,
            access=PoolAccess(ucx=None, memory=MemoryAccess(process=identity(), fd=self.pool.memory.fd)),
            rounds=self.rounds,
            lending=self.lending,
            key=self.key,
            book=LendBook(entries_max=8),
            prefiller=Prefiller(port=NoEngine(), desk=NoEngine()),
            recorder=recorder,
            watch=ProcessWatch(asyncio.get_running_loop()),
            clock=lambda: self.now,
        )
        self._asked = 0

    def names(self, blocks: int = 4, salt: str = SALT, token: int = 1) -> tuple[bytes, ...]:
        return page_names(TOY.namespace(salt), [token] * (TOY.block_tokens * blocks), TOY.block_tokens)

    def fill(self, blocks: int = 4, *, byte: int, salt: str = SALT, token: int = 1) -> tuple[int, ...]:
        """Bring content in as the engine does."""
        lease = self.pool.lender.lend_write(self.names(blocks, salt, token), range(blocks), for_peer=False, salt=salt)
        view = lease.poll()
        assert view is not None, lease.failure
        for page in view.pages:
            self.pool.memory.page_bytes(page)[:] = byte
        lease.mark_arrived([True] * blocks)
        lease.release()
        return view.pages

    async def ask(
        self,
        transfer: str = "t1",
        *,
        epoch: int = READER_EPOCH,
        transports: tuple[str, ...] = ("memory",),
        names: tuple[bytes, ...] | None = None,
        wait_s: float = 0.0,
    ) -> LendAnswered:
        question = LendRequested(
            key=key_of(transfer, epoch),
            nonce=nonce_of(transfer),
            fingerprint=self.pool.layout.fingerprint(),
            names=b"".join(names or self.names()),
            first_block=0,
            tokens=b"",
            salt=SALT,
            on_miss="partial",
            budget_s=30.0,
            wait_s=wait_s,
            process=ELSEWHERE,
            source_epoch=EPOCH,
            transports=transports,
        )
        answer = await self.said(question)
        assert isinstance(answer, LendAnswered)
        return answer

    async def grant(self, transfer: str = "t1", **more: object) -> Grant:
        answer = await self.ask(transfer, **more)  # type: ignore[arg-type] # the keywords of ask
        assert answer.status == "granted", answer.reason
        return unseal(answer.grant, answer.signature, self.key.verify_key)

    async def release(self, transfer: str = "t1", nonce: bytes | None = None) -> bool:
        said = LeaseReleased(key=key_of(transfer), nonce=nonce or nonce_of(transfer))
        answer = await self.said(said)
        assert isinstance(answer, ReleaseConfirmed)
        return answer.known

    async def said(self, body: Body) -> object:
        self._asked += 1
        header = Header(k=body.KIND, i="b", m="m0", e=READER_EPOCH, s=self._asked, t=0)
        asked = decode(encode(header, body))
        return decode(await self.source.answer(asked)).body

    def fence(self, epoch: int = READER_EPOCH) -> Fenced:
        return self.source.fence("b", "m0", epoch, "its host has no power")


def key_of(transfer: str, epoch: int = READER_EPOCH) -> ReaderKey:
    return ReaderKey(instance="b", member="m0", epoch=epoch, transfer=transfer, attempt=1, rank=0)


def nonce_of(transfer: str) -> bytes:
    return transfer.encode().ljust(16, b".")


class Reader:
    """A real reading backend with a pool of its own; it starts when a test says so, however late."""

    def __init__(self) -> None:
        self.memory = PoolMemory.create(TOY, 8, READER_EPOCH)
        self.woken = threading.Event()
        self.backend = MemoryReader(wake=self.woken.set)
        self.backend.register(self.memory, 0)
        self.backend.start()

    def read(self, grant: Grant) -> Change:
        """Read what was granted, now, and return what counts as read."""
        rows = len(grant.page_indexes())
        view = LeaseView(
            self.memory.fingerprint,
            0,
            READER_EPOCH,
            tuple(range(rows)),
            tuple(bytes([row]) * 16 for row in range(rows)),
            tuple(range(rows)),
            (1,) * rows,
        )
        self.backend.submit(Order(1, 1, view, Direction.WRITE, ReadOrder(grant), "a", None))
        wait_until(self.woken.is_set)
        (change,) = self.backend.changes()
        return change

    def landed(self) -> set[int]:
        return {int(byte) for page in range(4) for byte in self.memory.page_bytes(page)}


@pytest.fixture
async def lender() -> AsyncIterator[Lender]:
    bus = MemoryBus()
    lender = Lender(bus)
    lender.fill(byte=0xA1)
    yield lender
    lender.pool.lender.check()
    lender.holder.check()
    await lender.source.close()
    await bus.close()


@pytest.fixture
def reader() -> Reader:
    return Reader()


async def test_a_reader_that_is_not_fenced_may_read_late(lender: Lender, reader: Reader) -> None:
    grant = await lender.grant()
    lender.now = 10_000.0
    lender.rounds.run()
    assert isinstance(reader.read(grant).result, Delivered)
    assert reader.landed() == {0xA1}


async def test_a_fenced_reader_that_reads_late_delivers_nothing(lender: Lender, reader: Reader) -> None:
    # P5
    grant = await lender.grant()
    assert grant.checked
    assert lender.fence() == Fenced(tickets=(grant.ticket,), refused={})
    bits = lender.sink.bits[grant.ticket]
    assert bits & Fact.FENCED
    assert bits & Fact.RETURNED
    assert not bits & (Fact.ACCESS_ENDED | EVIDENCE_BITS)
    assert [row.evidence for row in lender.sink.outcomes] == ["fenced"]
    lender.fill(8, byte=0xC3, salt=TENANT, token=2)
    assert lender.fill(4, byte=0xB2, token=3) == grant.page_indexes(), "the lent pages, for content of the same salt"
    change = reader.read(grant)
    assert isinstance(change.result, Failed)
    assert change.result.failure is FailureClass.PAGE_CHANGED
    assert reader.landed() == {0}, "this one looks before it copies, too"


async def test_a_fenced_reader_is_never_lent_to_again_and_its_successor_is(lender: Lender) -> None:
    # P5, P4, P16
    await lender.grant()
    lender.fence()
    lender.fill(byte=0xA1)
    assert (await lender.ask()).reason == "a has fenced this reader"
    refused = await lender.ask("t2")
    assert (refused.status, refused.failure) == ("refused", "lease_refused")
    assert (await lender.ask("t3", epoch=READER_EPOCH + 1)).status == "granted"


@pytest.mark.parametrize("late", ["its word", "its death"])
async def test_once_a_fenced_reader_is_heard_of_its_pages_are_free_for_all(lender: Lender, late: str) -> None:
    # P5, P4
    grant = await lender.grant()
    lender.fence()
    assert not await lender.release(nonce=b"somebody else\0\0\0"), "only its own word counts"
    assert lender.pool.lender.room(TENANT) == 12
    if late == "its word":
        assert await lender.release()
        assert await lender.release(), "a repeat is confirmed as well"
    else:
        lender.source.reader_died("b", "m0", READER_EPOCH)
    assert lender.pool.lender.room(TENANT) == 16
    assert lender.sink.bits[grant.ticket] & Fact.RETURNED
    assert lender.lending.statistics().fenced == 0
    assert lender.holder.statistics().bindings[0].contradictions == 0


async def test_neither_time_nor_isolation_fences(lender: Lender) -> None:
    # P5, contract 40
    grant = await lender.grant()
    lender.holder.isolate("lending", "b", "it is silent")
    for lender.now in (10.0, 1e6, 1e9):
        lender.rounds.run()
        assert (await lender.ask()).status == "granted"
    assert not lender.sink.bits[grant.ticket] & (Fact.FENCED | Fact.RETURNED)


async def test_a_reader_that_need_not_look_is_not_fenced(lender: Lender) -> None:
    # P5, P2
    grant = await lender.grant(transports=("memory", "raw"))
    assert not grant.checked
    fenced = lender.fence()
    assert fenced.tickets == ()
    assert "did not take its grant on the terms that it looks" in fenced.refused[grant.ticket]
    assert lender.holder.bits(grant.ticket) & Fact.SUBMITTED
    assert lender.pool.lender.statistics().pages.bound == 0


async def test_who_does_not_look_must_refuse_a_grant_for_those_who_do(lender: Lender) -> None:
    # P5, P2
    grant = await lender.grant()
    asked = Expected(grant.reader, "a", EPOCH, grant.fingerprint, TOY.page_bytes, 4)
    blind = Expected(grant.reader, "a", EPOCH, grant.fingerprint, TOY.page_bytes, 4, looks=False)
    assert refusal(grant, asked) is None
    assert "compare generations after reading" in str(refusal(grant, blind))
    assert refusal(grant.model_copy(update={"checked": False}), blind) is None


async def test_only_the_reader_that_is_named_is_fenced(lender: Lender) -> None:
    # P5, P4
    silent, alive = await lender.grant(), await lender.grant("t2", epoch=READER_EPOCH + 1)
    assert lender.fence().tickets == (silent.ticket,)
    assert lender.holder.bits(alive.ticket) & Fact.SUBMITTED
    assert (await lender.ask("t3", epoch=READER_EPOCH + 1)).status == "granted"
    assert lender.fence(epoch=1).tickets == ()


async def test_memory_under_a_fenced_reader_is_not_let_go(lender: Lender) -> None:
    # P5, contract 54, 55
    await lender.grant()
    lender.fence()
    assert not lender.holder.shutdown(0.0).complete
    await lender.release()
    assert lender.holder.shutdown(0.0).complete


def to_compute(lender: Lender) -> LendRequested:
    """A question for a prompt that nobody has computed."""
    return LendRequested(
        key=key_of("t1"),
        nonce=nonce_of("t1"),
        fingerprint=lender.pool.layout.fingerprint(),
        names=b"".join(lender.names(2, token=2)),
        first_block=0,
        tokens=token_bytes([2] * 8),
        salt=SALT,
        on_miss="prefill",
        budget_s=30.0,
        wait_s=0.0,
        process=ELSEWHERE,
        source_epoch=EPOCH,
        transports=("memory",),
    )


class BrokenEngine(NoEngine):
    """A port with a fault in it."""

    async def prefill(self, ids: tuple[int, ...], salt: str, budget_s: float) -> Prefilled | Refusal:
        raise RuntimeError(f"planted at {len(ids)} tokens of {salt!r} within {budget_s} s")


# R21
async def test_a_fault_while_a_prompt_is_computed_is_a_refusal_and_keeps_no_place(
    lender: Lender, caplog: pytest.LogCaptureFixture
) -> None:
    lender.source._prefiller = Prefiller(port=BrokenEngine(), desk=NoEngine())
    answer = await lender.said(to_compute(lender))
    assert isinstance(answer, LendAnswered)
    assert answer.status == "computing"
    await until(lambda: lender.source.computing == 0)
    answer = await lender.said(to_compute(lender))
    assert isinstance(answer, LendAnswered)
    assert (answer.status, answer.failure) == ("refused", "lease_refused")
    assert "planted" in answer.reason
    assert len(lender.source._book) == 0
    assert "planted" in caplog.text, "a fault of ours is told, too"


# P18
async def test_who_hears_of_a_refusal_late_takes_nothing_from_the_next_question_under_its_key(lender: Lender) -> None:
    book, key = lender.source._book, offers_key(key_of("t1"))
    late = book.open(key, nonce_of("t1"), now=0.0)
    late.refusal = ("source_misses", "nothing of it is here")
    assert lender.source._answer(key, late).status == "refused"
    grant = await lender.grant("t1")
    assert lender.source._answer(key, late).status == "refused"
    assert (await lender.grant("t1")).ticket == grant.ticket, "it is the same lease still"


class BusyEngine(NoEngine):
    """A port whose engine computes until a test lets it end."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()

    async def prefill(self, ids: tuple[int, ...], salt: str, budget_s: float) -> Prefilled | Refusal:
        await self.ends.wait()
        return await super().prefill(ids, salt, budget_s)


async def test_a_question_whose_prompt_is_being_computed_counts_until_the_engine_has_ended(lender: Lender) -> None:
    busy = BusyEngine()
    lender.source._prefiller = Prefiller(port=busy, desk=busy)
    assert lender.source.computing == 0
    answer = await lender.said(to_compute(lender))
    assert isinstance(answer, LendAnswered)
    assert (answer.status, lender.source.computing) == ("computing", 1)
    assert lender.holder.statistics().held == 0  # so nothing else keeps its member from leaving
    busy.ends.set()
    await until(lambda: lender.source.computing == 0)
