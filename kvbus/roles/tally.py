"""What a member has counted, put together when somebody asks: nothing here is kept up while nobody does."""

import time
from typing import Final, Protocol

from kvbus.dataplane.choosing import ChoosingReader
from kvbus.ledger.admission import AdmissionGate
from kvbus.ledger.holding import HoldingCost, holding_cost
from kvbus.roles.asking import Asker
from kvbus.roles.council import InstanceCouncil
from kvbus.roles.counting import (
    Counters,
    admission_counters,
    bus_counters,
    council_counters,
    digest_counters,
    holder_counters,
    holding_counters,
    page_counters,
    way_counters,
)
from kvbus.roles.destination import Destination
from kvbus.roles.intake import Intake
from kvbus.roles.poolside import PoolSide
from kvbus.roles.recorder import Recorder
from kvbus.roles.rollback import Rollback
from kvbus.roles.rounds import Rounds
from kvbus.transport import Bus

NOTHING_HELD: Final = HoldingCost({}, {}, 0, 0, None)
"""What holding costs while no lease is retained and no page quarantined, which is nearly always."""


class Counting(Protocol):
    """The parts of a member that count."""

    pool: PoolSide
    rounds: Rounds
    reader: ChoosingReader
    destination: Destination
    asker: Asker
    gate: AdmissionGate
    intake: Intake
    council: InstanceCouncil | None
    rollback: Rollback | None
    ucx_tls: str


def member_counters(parts: Counting, recorder: Recorder, bus: Bus) -> Counters:
    """Return what is worth counting, by name."""
    now, holder = time.monotonic(), parts.rounds.holder
    counters: Counters = {
        "transfers_running": parts.destination.running,
        "releases_unconfirmed": parts.asker.unconfirmed,
        "rounds": parts.rounds.statistics.rounds,
        "requests": parts.intake.statistics.requests,
        "messages_malformed": parts.intake.statistics.malformed,
        "messages_misplaced": parts.intake.statistics.misplaced,
        "snapshots": parts.rollback.snapshots if parts.rollback else 0,
    }
    counters |= holder_counters(holder.statistics(), lenders=(parts.pool.lender.name,), now=now)
    counters |= page_counters(parts.pool.allocator.statistics()) | digest_counters(parts.pool.memory.digests)
    counters |= way_counters(parts.reader.statistics(), ucx_tls=parts.ucx_tls)
    counters |= holding_counters(holding_of(parts.rounds, parts.pool), holder.blocking(), now=now)
    counters |= parts.destination.results.totals.counters() | admission_counters(parts.gate.statistics())
    counters |= bus_counters(recorder, bus.health())
    return counters if parts.council is None else counters | council_counters(parts.council)


def load_of(rounds: Rounds, pool: PoolSide) -> HoldingCost:
    """Return what `holding_of` does, for whoever asks with each request: in short, while nothing is out of use."""
    if rounds.holder.retained or pool.allocator.statistics().quarantined:
        return holding_of(rounds, pool)
    return NOTHING_HELD


def holding_of(rounds: Rounds, pool: PoolSide) -> HoldingCost:
    """Return what is held without being of use, at the holder and in the pool."""
    pages = pool.allocator.statistics()
    return holding_cost(rounds.holder.statistics(), quarantined=pages.quarantined, bound=pages.bound)
