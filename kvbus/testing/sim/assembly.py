"""Builds a simulated member as `kvbus.roles.assembly` builds a worker: the real parts, between simulated edges."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kvbus.dataplane.lending import LendingBackend
from kvbus.engines.desk import Hello
from kvbus.events import HeartbeatSeen, InstanceRecord
from kvbus.grants import LenderKey, MemoryAccess
from kvbus.ledger.admission import AdmissionGate
from kvbus.ledger.agreement import Agreement
from kvbus.ledger.binding import Binding
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.lending import LendBook
from kvbus.ledger.types import Containment, Direction
from kvbus.pool.allocator import PageAllocator
from kvbus.pool.digests import DigestMode
from kvbus.pool.index import ReuseIndex
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory
from kvbus.roles.asking import Asker
from kvbus.roles.council import Place as InstancePlace
from kvbus.roles.desk import PoolDesk
from kvbus.roles.destination import Destination
from kvbus.roles.intake import Intake
from kvbus.roles.local import LocalBackend
from kvbus.roles.poolside import PoolSide
from kvbus.roles.portrait import Portrait
from kvbus.roles.prefills import Prefiller
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Presence
from kvbus.roles.results import Results
from kvbus.roles.rounds import Rounds
from kvbus.roles.running import ReaderSide
from kvbus.roles.sharing import Sharing
from kvbus.roles.source import LenderName, PoolAccess, Source
from kvbus.testing.sim.bus import SimBus
from kvbus.testing.sim.councils import Councils, WatchedCouncil, member_name
from kvbus.testing.sim.engine import SimEngine
from kvbus.testing.sim.loop import Actor
from kvbus.testing.sim.model import Model
from kvbus.testing.sim.pages import PAGE_BYTES
from kvbus.testing.sim.plane import SimReader
from kvbus.testing.sim.prompts import TOKEN_MAX
from kvbus.testing.sim.settings import SimSettings
from kvbus.testing.sim.truth import SimProcess, SimWatch, Truth, WatchedLender
from kvbus.testing.sim.watched import WatchedGate, WatchedRounds
from kvbus.topics import Topics

DEDUP_TTL_S = 1.0
"""Short, so that one document is asked for again and again within a run."""
DEDUP_ENTRIES_MAX = 1_000
LEND_WAIT_S = 1.0
RELEASE_RETRY_S = 0.5
READERS_MAX = 4_096
IDLE = HeartbeatSeen(
    transfers_running=0, leases_held=0, pages_free=0, pages_cached=0, pages_lent=0, facts_sequence=0, settle_n=0
)


@dataclass(slots=True)
class Parts:
    """A member's parts once it has an epoch."""

    epoch: int
    pool: PoolSide
    rounds: Rounds
    model: Model
    lending: LendingBackend
    reader: SimReader
    source: Source
    asker: Asker
    gate: AdmissionGate
    destination: Destination
    intake: Intake
    presence: Presence
    recorder: Recorder
    engine: SimEngine
    council: WatchedCouncil | None
    sharing: Sharing | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a member lives: its process, its connection, its clocks, its randomness."""

    settings: SimSettings
    truth: Truth
    process: SimProcess
    actor: Actor
    device: Actor
    bus: SimBus
    topics: Topics
    instance: str
    rank: int
    others: tuple[str, ...]
    seed: str
    ring: Callable[[], None]
    unix_ns: Callable[[], int]
    nonce: Callable[[int], bytes]
    councils: Councils

    @property
    def member(self) -> str:
        """The name of this member."""
        return member_name(self.rank)


class Builder:
    """Builds all parts of one member for one epoch, once."""

    def __init__(self, place: Place, epoch: int) -> None:
        self._place = place
        self._epoch = epoch
        self._clock = place.truth.loop.time
        self._reads = LocalBackend(name="engine-read")
        self._writes = LocalBackend(name="engine-write")
        self._lending = LendingBackend(wake=place.ring)
        self._key = LenderKey.generate()

    def build(self) -> Parts:
        """Return the parts, connected; nothing of them runs yet."""
        place, truth = self._place, self._place.truth
        pool = self._pool()
        recorder = self._recorder()
        reader = SimReader(
            truth,
            place.process,
            place.device,
            pool.memory,
            seed=place.seed,
            rates=place.settings.weather,
            flips=place.settings.flips,
            wake=place.ring,
        )
        model = Model(truth.trail, place.process, recorder, pool=pool)
        rounds = model.rounds = self._rounds(pool, reader, model)
        council = self._council(recorder, rounds)
        place.process.holds = rounds.holder.bits
        desk = self._desk(pool, rounds)
        engine = SimEngine(truth, place.actor, place.process, pool, desk, seed=place.seed)
        source = self._source(pool, rounds, recorder, Prefiller(port=engine, desk=desk))
        asker, gate = self._asker(recorder), self._gate()
        place.bus.on_taken_off = gate.taken_off
        destination = Destination(
            side=self._side(pool, rounds, asker, recorder, council),
            gate=gate,
            results=Results(bus=place.bus, topics=place.topics, recorder=recorder),
            bus=place.bus,
            tokenizer=engine,
        )
        rounds.follow(destination)
        portrait = Portrait(
            holder=rounds.holder,
            recorder=recorder,
            transfers=destination.open_transfers,
            place=lambda: (0, rounds.agreement.head) if council is None else council.book.place,
        )
        intake = self._intake(destination, source, recorder, portrait, council)
        return Parts(
            epoch=self._epoch,
            pool=pool,
            rounds=rounds,
            model=model,
            lending=self._lending,
            reader=reader,
            source=source,
            asker=asker,
            gate=gate,
            destination=destination,
            intake=intake,
            presence=self._presence(pool, recorder, council),
            recorder=recorder,
            engine=engine,
            council=council,
            sharing=self._sharing(recorder, council, destination),
        )

    def _pool(self) -> PoolSide:
        place, settings = self._place, self._place.settings
        layout = _layout(settings.block_tokens, place.rank, settings.ranks)
        memory = place.process.memory = PoolMemory.create(layout, settings.pages, self._epoch)
        memory.digests.turn_on(DigestMode.GRANT if settings.flips else DigestMode.OFF)
        allocator = PageAllocator(settings.pages)
        cap = settings.pages - settings.blocks_max
        lender = WatchedLender(
            memory, allocator, ReuseIndex(), name=f"pool{place.rank}", rank=place.rank, lent_cap_pages=cap
        )
        lender.truth, lender.process = place.truth, place.process
        tokens_max = settings.block_tokens * (settings.blocks_max + 1) - 1
        return PoolSide(layout, memory, allocator, lender, tokens_max, TOKEN_MAX, cap)

    def _recorder(self) -> Recorder:
        place = self._place
        return Recorder(
            bus=place.bus,
            topics=place.topics,
            instance=place.instance,
            member=place.member,
            epoch=self._epoch,
            unix_ns=place.unix_ns,
        )

    def _rounds(self, pool: PoolSide, reader: SimReader, model: Model) -> Rounds:
        holder = LeaseHolder(
            bindings=[
                Binding("engine-read", self._reads, Direction.READ, Containment.STOP_BINDING),
                Binding("engine-write", self._writes, Direction.WRITE, Containment.STOP_BINDING),
                Binding("lending", self._lending, Direction.READ),
                Binding("memory", reader, Direction.WRITE),
            ],
            lenders=[pool.lender],
        )
        agreement = Agreement(term=self._epoch)
        rounds = WatchedRounds(
            holder=holder, agreement=agreement, sink=model, member=self._place.member, epoch=self._epoch
        )
        rounds.model = model
        return rounds

    def _desk(self, pool: PoolSide, rounds: Rounds) -> PoolDesk:
        desk = PoolDesk(
            attach=lambda _layout, _hello: pool,
            rounds=lambda: rounds,
            reads=self._reads,
            writes=self._writes,
            clock=self._clock,
            counters=dict,
        )
        desk.welcome(
            Hello(
                engine="simulated",
                version="0",
                model="simulated",
                model_digest="ab",
                layout=dict(pool.layout.to_plain()),
                vocab_size=pool.vocab_size,
                tokens_max=pool.tokens_max,
                process=self._place.process.identity,
            )
        )
        return desk

    def _source(self, pool: PoolSide, rounds: Rounds, recorder: Recorder, prefiller: Prefiller) -> Source:
        place = self._place
        return Source(
            name=LenderName(place.instance, place.member, self._epoch),
            pool=pool,
            access=PoolAccess(ucx=None, memory=MemoryAccess(process=place.process.identity, fd=pool.memory.fd)),
            rounds=rounds,
            lending=self._lending,
            key=self._key,
            book=LendBook(entries_max=READERS_MAX),
            prefiller=prefiller,
            recorder=recorder,
            watch=SimWatch(place.truth, place.actor),
            clock=self._clock,
        )

    def _asker(self, recorder: Recorder) -> Asker:
        place = self._place
        return Asker(
            bus=place.bus,
            topics=place.topics,
            recorder=recorder,
            pause_s=RELEASE_RETRY_S,
            clock=self._clock,
            has_died=place.truth.has_died,
        )

    def _gate(self) -> WatchedGate:
        place = self._place
        return WatchedGate(
            place.truth.trail,
            place.process.name,
            instance=place.instance,
            source_allow=place.others,
            inflight_max=place.settings.inflight_max,
            dedup_ttl_s=DEDUP_TTL_S,
            entries_max=DEDUP_ENTRIES_MAX,
        )

    def _council(self, recorder: Recorder, rounds: Rounds) -> WatchedCouncil | None:
        place, ranks = self._place, self._place.settings.ranks
        if ranks == 1:
            return None
        council = WatchedCouncil(
            place=InstancePlace(
                place.instance, place.member, self._epoch, {member_name(rank): rank for rank in range(ranks)}
            ),
            bus=place.bus,
            topics=place.topics,
            recorder=recorder,
            holder=rounds.holder,
            run_rounds=rounds.run,
            clock=self._clock,
        )
        council.watched_by(place.councils, place.process, place.bus, place.truth.trail)
        rounds.group = council
        return council

    def _sharing(self, recorder: Recorder, council: WatchedCouncil | None, destination: Destination) -> Sharing | None:
        if council is None:
            return None
        place = self._place
        council.carrier = sharing = Sharing(
            bus=place.bus,
            topics=place.topics,
            recorder=recorder,
            instance=place.instance,
            council=council,
            destination=destination,
            clock=self._clock,
        )
        return sharing

    def _side(
        self, pool: PoolSide, rounds: Rounds, asker: Asker, recorder: Recorder, council: WatchedCouncil | None
    ) -> ReaderSide:
        place = self._place
        return ReaderSide(
            instance=place.instance,
            member=place.member,
            epoch=self._epoch,
            process=place.process.identity,
            binding="memory",
            transports=("memory",),
            pool=pool,
            rounds=rounds,
            asker=asker,
            recorder=recorder,
            lend_wait_s=LEND_WAIT_S,
            clock=self._clock,
            nonce=place.nonce,
            group=council,
        )

    def _intake(
        self,
        destination: Destination,
        source: Source,
        recorder: Recorder,
        portrait: Portrait,
        council: WatchedCouncil | None,
    ) -> Intake:
        place = self._place
        return Intake(
            bus=place.bus,
            topics=place.topics,
            instance=place.instance,
            member=place.member,
            destination=destination,
            source=source,
            recorder=recorder,
            portrait=portrait,
            counters=dict,
            leads=council,
        )

    def _presence(self, pool: PoolSide, recorder: Recorder, council: WatchedCouncil | None) -> Presence:
        place = self._place
        record = InstanceRecord(
            verify_key=self._key.verify_key,
            fingerprint=pool.layout.fingerprint(),
            model="simulated",
            engine="simulated",
            block_tokens=pool.layout.block_tokens,
            ranks=place.settings.ranks,
            page_bytes=pool.layout.page_bytes,
            pages=pool.memory.page_count,
            process=place.process.identity,
            transports=("memory",),
            version="0",
        )
        return Presence(
            bus=place.bus,
            topics=place.topics,
            recorder=recorder,
            instance=place.instance,
            member=place.member,
            record=record,
            load=lambda: IDLE if council is None else council.load(IDLE),
        )


@lru_cache(maxsize=64)  # one for each rank of the runs of a process
def _layout(block_tokens: int, rank: int, ranks: int) -> PageLayout:
    return PageLayout("toy", 1, 1, block_tokens, PAGE_BYTES // (4 * block_tokens), "uint32", rank, ranks, "ab")
