"""A source that the test plays over the bus: it owns a real pool, and may forge any part of what it answers."""

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

from kvbus.codec import pack
from kvbus.engines.toy import ToyEngine
from kvbus.events import InstanceRecord, LeaseReleased, LendAnswered, LendRequested, ReleaseConfirmed, column, decode
from kvbus.grants import Grant, LenderKey, MemoryAccess, PoolGeometry
from kvbus.names import NAME_LENGTH_BYTES, epoch_from, page_names, tokens_from_bytes
from kvbus.parts import Body
from kvbus.pool.lender import PoolLender, lender_over
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity
from kvbus.roles.registry import REMEMBERED_S, registry_key
from kvbus.topics import Command
from kvbus.transport import BUCKET_INSTANCES, Delivery
from tests.flow.town import FAST, TOPICS, Town
from tests.waiting import until

FAKE = "fake"
PAGES = 16
_left_at = [-REMEMBERED_S]


@dataclass(slots=True)
class FakeSource:
    """Answers questions to `fake` with grants; `forge` changes a grant before it is sealed, `answer` what leaves."""

    town: Town
    engine: ToyEngine
    lender: PoolLender
    epoch: int
    key: LenderKey = field(default_factory=LenderKey.generate)
    forge: Callable[[Grant], Grant] = lambda grant: grant
    answer: Callable[[LendAnswered], Body | bytes] = lambda answered: answered
    questions: list[LendRequested] = field(default_factory=list)
    released: list[LeaseReleased] = field(default_factory=list)

    @property
    def memory(self) -> PoolMemory:
        return self.lender.memory

    async def register(self, **changed: object) -> None:
        """Stand in the registry, as any worker does for some seconds."""
        layout = self.memory.layout
        fields: Mapping[str, object] = {
            "verify_key": self.key.verify_key,
            "fingerprint": layout.fingerprint(),
            "model": "toy",
            "engine": "toy",
            "block_tokens": layout.block_tokens,
            "ranks": 1,
            "page_bytes": layout.page_bytes,
            "pages": self.memory.page_count,
            "process": identity(),
            "transports": ("memory",),
            "version": "0",
        }
        record = InstanceRecord.model_validate({**fields, **changed})
        await self.town.bus.put(BUCKET_INSTANCES, registry_key(FAKE, "m0"), self._encoded(record))

    def fill(self, ids: Sequence[int]) -> None:
        """Compute a prompt's whole blocks into the pool, as an engine does."""
        layout = self.memory.layout
        names = page_names(layout.namespace(""), ids, layout.block_tokens)
        lease = self.lender.lend_write(names, range(len(names)), for_peer=False)
        view = lease.poll()
        assert view is not None, lease.failure
        run = self.engine.resume(list(ids), [], lambda: False)
        run.prefill()
        run.export(0, [self.memory.page_bytes(page) for page in view.pages])
        lease.mark_arrived([True] * len(names))
        lease.release()

    async def respond(self, delivery: Delivery) -> bytes:
        """Answer as a worker's lease subject does."""
        body = decode(delivery.data).body
        if isinstance(body, LeaseReleased):
            self.released.append(body)
            return self._encoded(ReleaseConfirmed(known=True))
        assert isinstance(body, LendRequested)
        self.questions.append(body)
        if not self.held(body):
            self.fill(tokens_from_bytes(body.tokens))
        data, signature = self.seal(self.forge(self.grant(body)))
        said = self.answer(LendAnswered(status="granted", grant=data, signature=signature))
        return said if isinstance(said, bytes) else self._encoded(said)

    def held(self, asked: LendRequested) -> list[int]:
        return self.lender.pages_held(names_of(asked))

    def grant(self, asked: LendRequested) -> Grant:
        """The grant that an honest source would give."""
        memory = self.memory
        pages = self.held(asked)
        return Grant(
            lender_instance=FAKE,
            lender_member="m0",
            lender_epoch=self.epoch,
            reader=asked.key,
            ticket=1,
            rank=0,
            fingerprint=memory.fingerprint,
            nonce=asked.nonce,
            pool=PoolGeometry(
                base=memory.address,
                length_bytes=memory.length_bytes,
                generations_offset=memory.generations_offset,
                pages_offset=memory.pages_offset,
                page_stride=memory.page_stride,
                page_bytes=memory.layout.page_bytes,
                page_count=memory.page_count,
            ),
            pages=column(pages, 4),
            counters=column(memory.generations.counters(pages), 8),
            memory=MemoryAccess(process=identity(), fd=memory.fd),
        )

    def seal(self, grant: Grant) -> tuple[bytes, bytes]:
        """Sign a grant of any length and content."""
        data = pack(grant.model_dump(exclude_none=True))
        return self.sign(data)

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        """Sign any bytes."""
        return data, self.key._signing_key.sign(data).signature

    def _encoded(self, body: Body) -> bytes:
        return self.town.encoded(body, speaker=FAKE, member="m0", epoch=self.epoch)


def names_of(asked: LendRequested) -> tuple[bytes, ...]:
    step = NAME_LENGTH_BYTES
    return tuple(asked.names[at : at + step] for at in range(0, len(asked.names), step))


@asynccontextmanager
async def fake_source(town: Town) -> AsyncIterator[FakeSource]:
    """Listen as `fake`, with a pool of the toy's layout in this process; no process restarts as quickly as fakes do."""
    await until(lambda: monotonic() - _left_at[0] > REMEMBERED_S, what="readers have forgotten the fake before this")
    engine = ToyEngine.load(FAST)
    epoch = epoch_from(1, random.SystemRandom().randrange(1 << 32))  # one pool each: no reader may mix them up
    memory = PoolMemory.create(engine.describe().layout, PAGES, epoch)
    fake = FakeSource(town, engine, lender_over(memory, name="pool", engine_reserve_pages=0), epoch)
    subscription = await town.bus.respond(TOPICS.command(FAKE, Command.LEASE, "m0"), fake.respond)
    try:
        yield fake
    finally:
        await subscription.close()
        memory.close()
        _left_at[0] = monotonic()
