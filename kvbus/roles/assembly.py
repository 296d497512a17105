"""Assembly: builds a member's parts once, complete, when its engine has said which layout its pages have."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbus.config import WorkerSettings
from kvbus.dataplane.lending import LendingBackend
from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.ucx import UcxReader, UcxReaderSettings
from kvbus.dataplane.ucx_plane import UcxPlane
from kvbus.engines.desk import Hello
from kvbus.engines.port import EnginePort
from kvbus.events import HeartbeatSeen, InstanceRecord
from kvbus.grants import LenderKey, MemoryAccess
from kvbus.ledger.admission import AdmissionGate
from kvbus.ledger.agreement import Agreement
from kvbus.ledger.binding import Binding
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.lending import LendBook
from kvbus.ledger.types import Backend, Containment, Direction
from kvbus.pool.layout import PageLayout
from kvbus.processes import ProcessWatch, identity
from kvbus.roles.asking import Asker
from kvbus.roles.desk import PoolDesk
from kvbus.roles.destination import Destination
from kvbus.roles.intake import Intake
from kvbus.roles.local import LocalBackend
from kvbus.roles.poolside import PoolSide
from kvbus.roles.prefills import Prefiller
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Presence
from kvbus.roles.results import Results
from kvbus.roles.rounds import Rounds
from kvbus.roles.running import ReaderSide
from kvbus.roles.source import LenderName, PoolAccess, Source
from kvbus.topics import Topics
from kvbus.transport import Bus
from kvbus.version import VERSION

READERS_MAX = 4_096
"""Readers served at once; the lending backend's own bound, so that its refusal is never met."""


@dataclass(frozen=True, slots=True)
class Base:
    """What exists before the engine attaches."""

    settings: WorkerSettings
    bus: Bus
    topics: Topics
    epoch: int
    recorder: Recorder
    watch: ProcessWatch
    wake: Callable[[], None]
    reads: LocalBackend
    writes: LocalBackend


@dataclass(slots=True)
class Parts:
    """A member's parts, as the worker runs and ends them."""

    pool: PoolSide
    rounds: Rounds
    plane: UcxPlane | None
    lending: LendingBackend
    source: Source
    destination: Destination
    asker: Asker
    gate: AdmissionGate
    intake: Intake
    presence: Presence

    def counters(self) -> Mapping[str, int | float | str]:
        """Return what is worth counting, by name."""
        holder, admission = self.rounds.holder.statistics(), self.gate.statistics()
        pages = self.pool.allocator.statistics()
        counters: dict[str, int | float | str] = {
            "leases_taken": holder.taken,
            "leases_returned": holder.returned,
            "leases_held": holder.held,
            "leases_retained": holder.retained,
            "transfers_running": self.destination.running,
            "releases_unconfirmed": self.asker.unconfirmed,
            "rounds": self.rounds.statistics.rounds,
            "pages": self.pool.memory.page_count,
            "pages_free": pages.free,
            "pages_cached": pages.cached,
            "pages_writing": pages.writing,
            "pages_quarantined": pages.quarantined,
            "requests": self.intake.statistics.requests,
            "messages_malformed": self.intake.statistics.malformed,
            "messages_misplaced": self.intake.statistics.misplaced,
        }
        for name in ("fired", "settled", "failed", "deduped", "skipped_busy", "refused", "inflight"):
            counters[name] = getattr(admission, name)
        for binding in holder.bindings:
            counters[f"{binding.name}_submissions"] = binding.submissions
            counters[f"{binding.name}_deliveries"] = binding.deliveries
            counters[f"{binding.name}_retained"] = binding.retained
        return counters


def assemble(base: Base, port: EnginePort, desk: PoolDesk, layout: PageLayout, hello: Hello) -> Parts:
    """Build everything that needs the pool. Raises ConfigError where the pool or the data plane cannot be made."""
    settings = base.settings
    tokens_max = min(hello.tokens_max, settings.prompt_tokens_max)
    pool = PoolSide.create(
        layout, pages=settings.pages, tokens_max=tokens_max, vocab_size=hello.vocab_size, epoch=base.epoch
    )
    lending = LendingBackend(wake=base.wake)
    plane, reader, access = _data_plane(base, pool)
    rounds = _rounds(base, pool, lending, reader)
    key = LenderKey.generate()
    source = Source(
        name=LenderName(settings.instance, settings.member, base.epoch),
        pool=pool,
        access=access,
        rounds=rounds,
        lending=lending,
        key=key,
        book=LendBook(entries_max=READERS_MAX),
        prefiller=Prefiller(port=port, desk=desk),
        recorder=base.recorder,
        watch=base.watch,
        clock=time.monotonic,
    )
    asker, gate, destination = _destination(base, port, pool, rounds)
    rounds.follow(destination)
    intake = Intake(
        bus=base.bus,
        topics=base.topics,
        instance=settings.instance,
        destination=destination,
        source=source,
        recorder=base.recorder,
        counters=lambda: parts.counters(),  # noqa: PLW0108 - parts exists only after this
    )
    presence = Presence(
        bus=base.bus,
        topics=base.topics,
        recorder=base.recorder,
        instance=settings.instance,
        member=settings.member,
        record=_record(pool, hello, key, access),
        load=lambda: _load(parts, base.recorder),
    )
    parts = Parts(pool, rounds, plane, lending, source, destination, asker, gate, intake, presence)
    return parts


def _rounds(base: Base, pool: PoolSide, lending: LendingBackend, reader: Backend) -> Rounds:
    holder = LeaseHolder(
        bindings=[
            Binding("engine-read", base.reads, Direction.READ, Containment.STOP_BINDING),
            Binding("engine-write", base.writes, Direction.WRITE, Containment.STOP_BINDING),
            Binding("lending", lending, Direction.READ),
            Binding(base.settings.backend, reader, Direction.WRITE),
        ],
        lenders=[pool.lender],
    )
    return Rounds(
        holder=holder,
        agreement=Agreement(term=base.epoch),
        sink=base.recorder,
        member=base.settings.member,
        epoch=base.epoch,
    )


def _destination(
    base: Base, port: EnginePort, pool: PoolSide, rounds: Rounds
) -> tuple[Asker, AdmissionGate, Destination]:
    limits = base.settings.limits
    asker = Asker(
        bus=base.bus,
        topics=base.topics,
        recorder=base.recorder,
        pause_s=limits.release_retry_s,
        clock=time.monotonic,
    )
    gate = AdmissionGate(
        instance=base.settings.instance,
        source_allow=limits.source_allow,
        inflight_max=limits.inflight_max,
        dedup_ttl_s=limits.dedup_ttl_s,
        entries_max=limits.dedup_entries_max,
    )
    destination = Destination(
        side=_reader_side(base, pool, rounds, asker),
        gate=gate,
        results=Results(bus=base.bus, topics=base.topics, recorder=base.recorder),
        bus=base.bus,
        tokenizer=port,
        wall_s=time.time,
    )
    return asker, gate, destination


def _data_plane(base: Base, pool: PoolSide) -> tuple[UcxPlane | None, Backend, PoolAccess]:
    settings = base.settings
    rate_limit_bytes_s = settings.rate_limit_bytes_s or None
    pool.memory.export()  # from here on it stays mapped: engines, peers and grants know its place
    memory_access = MemoryAccess(process=identity(), fd=pool.memory.fd)
    if settings.backend == "memory":
        memory_reader = MemoryReader(wake=base.wake, rate_limit_bytes_s=rate_limit_bytes_s)
        memory_reader.register(pool.memory, pool.layout.rank)
        memory_reader.start()
        return None, memory_reader, PoolAccess(ucx=None, memory=memory_access)
    plane = UcxPlane(wake=base.wake, settings={"NET_DEVICES": settings.network_devices})
    plane.start()
    ucx_access = plane.register(pool.memory, pool.layout.rank)
    ucx_reader = UcxReader(plane, wake=base.wake, settings=UcxReaderSettings(rate_limit_bytes_s=rate_limit_bytes_s))
    return plane, ucx_reader, PoolAccess(ucx=ucx_access, memory=memory_access)


def _reader_side(base: Base, pool: PoolSide, rounds: Rounds, asker: Asker) -> ReaderSide:
    settings = base.settings
    return ReaderSide(
        instance=settings.instance,
        member=settings.member,
        epoch=base.epoch,
        process=identity(),
        binding=settings.backend,
        transports=(settings.backend,),
        pool=pool,
        rounds=rounds,
        asker=asker,
        recorder=base.recorder,
        lend_wait_s=settings.limits.lend_wait_s,
        clock=time.monotonic,
    )


def _record(pool: PoolSide, hello: Hello, key: LenderKey, access: PoolAccess) -> InstanceRecord:
    transports = tuple(name for name in ("ucx", "memory") if getattr(access, name) is not None)
    return InstanceRecord(
        verify_key=key.verify_key,
        fingerprint=pool.layout.fingerprint(),
        model=hello.model,
        engine=hello.engine,
        block_tokens=pool.layout.block_tokens,
        ranks=pool.layout.ranks,
        page_bytes=pool.layout.page_bytes,
        pages=pool.memory.page_count,
        process=identity(),
        transports=transports,
        version=VERSION,
    )


def _load(parts: Parts, recorder: Recorder) -> HeartbeatSeen:
    pages = parts.pool.allocator.statistics()
    return HeartbeatSeen(
        transfers_running=parts.destination.running,
        leases_held=parts.rounds.holder.statistics().held,
        pages_free=pages.free,
        pages_cached=pages.cached,
        pages_lent=parts.pool.allocator.claimed,
        facts_sequence=recorder.stored_sequence,
        settle_n=parts.rounds.agreement.head,
    )
