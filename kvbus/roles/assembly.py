"""Assembly: builds a member's parts once, complete, when its engine has said which layout its pages have."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbus.config import WorkerSettings
from kvbus.dataplane.choosing import ChoosingReader
from kvbus.dataplane.lending import LendingBackend
from kvbus.dataplane.socket_lending import ServedLending
from kvbus.dataplane.ucx_plane import UcxPlane
from kvbus.engines.desk import Hello
from kvbus.engines.port import EnginePort
from kvbus.errors import ConfigError, KvbusError
from kvbus.events import HeartbeatSeen, InstanceRecord, NamesForgotten
from kvbus.grants import LenderKey
from kvbus.ledger.admission import AdmissionGate
from kvbus.ledger.agreement import Agreement
from kvbus.ledger.binding import Binding
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.lending import LendBook
from kvbus.ledger.types import Backend, Containment, Direction
from kvbus.pool.digests import DigestMode
from kvbus.pool.layout import PageLayout
from kvbus.processes import ProcessWatch, identity, network_namespace
from kvbus.roles.asking import Asker
from kvbus.roles.cache_desk import CacheDesk
from kvbus.roles.council import InstanceCouncil, Place
from kvbus.roles.desk import PoolDesk
from kvbus.roles.destination import Destination
from kvbus.roles.draining import Drain
from kvbus.roles.intake import Intake
from kvbus.roles.local import LocalBackend
from kvbus.roles.past import Past
from kvbus.roles.poolside import PoolSide
from kvbus.roles.portrait import Portrait
from kvbus.roles.prefills import Prefiller
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Presence
from kvbus.roles.results import Results
from kvbus.roles.rollback import Rollback
from kvbus.roles.rounds import Rounds
from kvbus.roles.running import ReaderSide
from kvbus.roles.sharing import Sharing
from kvbus.roles.source import LenderName, PoolAccess, Source
from kvbus.roles.tally import load_of, member_counters
from kvbus.roles.transports import DataPlane, open_data_plane
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

    base: Base
    pool: PoolSide
    rounds: Rounds
    plane: UcxPlane | None
    reader: ChoosingReader
    lending: ServedLending
    source: Source
    destination: Destination
    asker: Asker
    gate: AdmissionGate
    intake: Intake
    presence: Presence
    council: InstanceCouncil | None = None
    """The agreement with this instance's other members, where there are any."""
    sharing: Sharing | None = None
    rollback: Rollback | None = None
    ucx_tls: str = ""
    """The transports that UCX may take."""
    drain: Drain = field(init=False)

    def counters(self) -> Mapping[str, int | float | str]:
        """Return what is worth counting, by name."""
        return member_counters(self, self.base.recorder, self.base.bus)


def assemble(base: Base, port: EnginePort, desk: PoolDesk, layout: PageLayout, hello: Hello) -> Parts:
    """Build everything that needs the pool; ConfigError or BackendError where the pool or data plane cannot be made."""
    _require_own_rank(settings := base.settings, layout)
    pool = PoolSide.create(
        layout,
        pages=settings.pages,
        tokens_max=min(hello.tokens_max, settings.prompt_tokens_max),
        vocab_size=hello.vocab_size,
        epoch=base.epoch,
        digests=DigestMode(settings.digests),
    )
    moving, key = _data_plane(base, pool), LenderKey.generate()
    lending, access = moving.lending, moving.access
    rounds = _rounds(base, pool, lending, moving.reader)
    source = _source(base, pool, access, rounds, lending, key=key, prefiller=Prefiller(port=port, desk=desk))
    council = _council(base, rounds)
    asker, gate, destination = _destination(base, port, pool, rounds, council, moving=moving)
    desk.follow_forgetting(lambda: _forgotten(base, gate, pool), gate.forget_settled)
    intake = Intake(
        bus=base.bus,
        topics=base.topics,
        instance=settings.instance,
        member=settings.member,
        destination=destination,
        source=source,
        recorder=base.recorder,
        portrait=(portrait := _portrait(base, rounds, destination, council)),
        cache=CacheDesk(pool=pool, tokenizer=port, forget=desk.forget, on_evict=gate.forget_settled),
        counters=lambda: parts.counters(),  # noqa: PLW0108 - parts exists only after this
        leads=council,
    )
    presence = Presence(
        bus=base.bus,
        topics=base.topics,
        recorder=base.recorder,
        instance=settings.instance,
        member=settings.member,
        record=_record(pool, hello, key, access, settings.urls),
        load=lambda: _load(parts, base.recorder),
    )
    parts = Parts(
        base=base,
        pool=pool,
        rounds=rounds,
        plane=moving.plane,
        reader=moving.reader,
        lending=lending,
        source=source,
        destination=destination,
        asker=asker,
        gate=gate,
        intake=intake,
        presence=presence,
        council=council,
        sharing=_sharing(base, council, destination) if council is not None else None,
        rollback=_rollback(base, portrait),
        ucx_tls=moving.ucx_tls,
    )
    parts.drain = Drain(base.bus, base.topics, base.recorder, (settings.instance, settings.member), parts)
    return parts


def _data_plane(base: Base, pool: PoolSide) -> DataPlane:
    """Start what moves bytes; where it cannot start, the pool is given back at once, for the next try makes its own."""
    try:
        return open_data_plane(base.settings, pool, base.wake)
    except KvbusError:
        pool.memory.close()
        raise


def _forgotten(base: Base, gate: AdmissionGate, pool: PoolSide) -> None:
    """All names are being forgotten: what settled may run again, here and for those who remember it elsewhere."""
    gate.forget_settled()
    base.recorder.event(NamesForgotten(names=pool.allocator.statistics().cached))


def _require_own_rank(settings: WorkerSettings, layout: PageLayout) -> None:
    """Raise ConfigError where the engine's pages are those of another rank than this member is to serve."""
    rank, ranks = settings.ranks[settings.member], len(settings.ranks)
    if (layout.rank, layout.ranks) != (rank, ranks):
        raise ConfigError(
            f"the engine has the pages of rank {layout.rank} of {layout.ranks}, and {settings.instance}/"
            f"{settings.member} serves rank {rank} of {ranks}: its place among the members {', '.join(settings.ranks)}"
        )


def _council(base: Base, rounds: Rounds) -> InstanceCouncil | None:
    settings = base.settings
    if len(settings.ranks) == 1:
        return None
    rounds.group = council = InstanceCouncil(
        place=Place(settings.instance, settings.member, base.epoch, settings.ranks),
        bus=base.bus,
        topics=base.topics,
        recorder=base.recorder,
        holder=rounds.holder,
        run_rounds=rounds.run,
        clock=time.monotonic,
    )
    return council


def _sharing(base: Base, council: InstanceCouncil, destination: Destination) -> Sharing:
    council.carrier = sharing = Sharing(
        bus=base.bus,
        topics=base.topics,
        recorder=base.recorder,
        instance=base.settings.instance,
        council=council,
        destination=destination,
        clock=time.monotonic,
    )
    return sharing


def _source(
    base: Base,
    pool: PoolSide,
    access: PoolAccess,
    rounds: Rounds,
    lending: LendingBackend,
    *,
    key: LenderKey,
    prefiller: Prefiller,
) -> Source:
    base.recorder.spans.page_bytes = pool.layout.page_bytes
    return Source(
        name=LenderName(base.settings.instance, base.settings.member, base.epoch),
        pool=pool,
        access=access,
        rounds=rounds,
        lending=lending,
        key=key,
        book=LendBook(entries_max=READERS_MAX),
        prefiller=prefiller,
        recorder=base.recorder,
        watch=base.watch,
        clock=time.monotonic,
    )


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
    base: Base,
    port: EnginePort,
    pool: PoolSide,
    rounds: Rounds,
    council: InstanceCouncil | None,
    *,
    moving: DataPlane,
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
        holding=lambda: load_of(rounds, pool),
        pages_kept_max=pool.lent_cap_pages,  # with that many out of use the pool refuses every lease for a peer
    )
    destination = Destination(
        side=_reader_side(base, pool, rounds, asker, council, moving=moving),
        gate=gate,
        results=Results(bus=base.bus, topics=base.topics, recorder=base.recorder),
        bus=base.bus,
        tokenizer=port,
        past=Past(base.bus, base.topics, base.settings.instance, time.time),
    )
    rounds.follow(destination)
    return asker, gate, destination


def _reader_side(
    base: Base,
    pool: PoolSide,
    rounds: Rounds,
    asker: Asker,
    council: InstanceCouncil | None,
    *,
    moving: DataPlane,
) -> ReaderSide:
    settings = base.settings
    return ReaderSide(
        instance=settings.instance,
        member=settings.member,
        epoch=base.epoch,
        process=identity(),
        network=network_namespace(),
        binding=settings.backend,
        transports=moving.transports,
        pool=pool,
        rounds=rounds,
        asker=asker,
        recorder=base.recorder,
        lend_wait_s=settings.limits.lend_wait_s,
        ways=moving.reader.ways,
        found=moving.reader.found,
        clock=time.monotonic,
        group=council,
    )


def _record(pool: PoolSide, hello: Hello, key: LenderKey, access: PoolAccess, urls: tuple[str, ...]) -> InstanceRecord:
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
        transports=access.names(),
        version=VERSION,
        urls=urls or None,
    )


def _portrait(base: Base, rounds: Rounds, destination: Destination, council: InstanceCouncil | None) -> Portrait:
    return Portrait(
        holder=rounds.holder,
        recorder=base.recorder,
        transfers=destination.open_transfers,
        place=lambda: _settle_place(rounds, council),
    )


def _rollback(base: Base, portrait: Portrait) -> Rollback:
    subject = base.topics.facts(base.settings.instance)
    return Rollback(bus=base.bus, subject=subject, recorder=base.recorder, tell=portrait.record)


def _settle_place(rounds: Rounds, council: InstanceCouncil | None) -> tuple[int, int]:
    """Return a member's place in the settle log; one without others has no term."""
    return (0, rounds.agreement.head) if council is None else council.book.place


def _load(parts: Parts, recorder: Recorder) -> HeartbeatSeen:
    pages = parts.pool.allocator.statistics()
    settle_term, settle_n = _settle_place(parts.rounds, parts.council)
    return HeartbeatSeen(
        transfers_running=parts.destination.running,
        leases_held=parts.rounds.holder.statistics().held,
        pages_free=pages.free,
        pages_cached=pages.cached,
        pages_lent=parts.pool.allocator.claimed,
        facts_sequence=recorder.stored_sequence,
        settle_term=settle_term,
        settle_n=settle_n,
    )
