"""Counters by name, as an instance answers them over the bus: what its holder, its pool and its transfers say (R24)."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbus.dataplane.choosing import ChoosingStatistics
from kvbus.events import TransferOutcome
from kvbus.ledger.admission import AdmissionStatistics
from kvbus.ledger.books import HolderStatistics
from kvbus.ledger.holding import BlockingLease, HoldingCost
from kvbus.pool.allocator import PageStatistics
from kvbus.pool.digests import PageDigests
from kvbus.roles.council import InstanceCouncil
from kvbus.roles.recorder import OUTBOX_BUSY_BYTES, OUTBOX_LENGTH_MAX_BYTES, Recorder
from kvbus.roles.spread import BYTES, SECONDS, Spread
from kvbus.transport import BusHealth

Counters = dict[str, int | float | str]
USABLE = frozenset({"settled", "partial"})
"""The outcomes whose time and size are spread: what failed took as long as its deadline allows, and moved anything."""
BUS_EVENTS = ("reconnected", "disconnected", "rebuilt")


@dataclass(slots=True)
class TransferTotals:
    """What the ended transfers came to: how many by outcome, their bytes, and the time that they took, in seconds."""

    ended: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    spread_s: Spread = field(default_factory=lambda: Spread("transfers_settled_s", SECONDS))
    spread_bytes: Spread = field(default_factory=lambda: Spread("transfers_settled_bytes", BYTES))
    length_bytes: int = 0
    queue_s: float = 0.0
    grant_s: float = 0.0
    move_s: float = 0.0
    total_s: float = 0.0

    def add(self, outcome: TransferOutcome) -> None:
        """Count one transfer that has ended."""
        word, length_bytes, total_s = outcome.outcome, outcome.length_bytes, outcome.total_s
        self.ended[word] = self.ended.get(word, 0) + 1
        self.length_bytes += length_bytes
        self.queue_s += outcome.queue_s
        self.grant_s += outcome.grant_s
        self.move_s += outcome.move_s
        self.total_s += total_s
        if word in USABLE:
            self.spread_s.add(total_s)
            self.spread_bytes.add(length_bytes)
        elif failure := outcome.failure:
            self.failures[failure] = self.failures.get(failure, 0) + 1

    def counters(self) -> Counters:
        """Return them by name; a mean time is its sum divided by `transfers_ended`."""
        counters: Counters = {
            "transfers_ended": sum(self.ended.values()),
            "transfers_bytes": self.length_bytes,
            "transfers_queue_s": self.queue_s,
            "transfers_grant_s": self.grant_s,
            "transfers_move_s": self.move_s,
            "transfers_total_s": self.total_s,
        }
        counters |= {f"transfers_{word}": count for word, count in self.ended.items()}
        counters |= {f"transfers_failed_{failure}": count for failure, count in self.failures.items()}
        return counters | self.spread_s.counters() | self.spread_bytes.counters()


def admission_counters(admission: AdmissionStatistics) -> Counters:
    """Return how requests were answered: `fired` is `settled` + `failed` + `inflight`."""
    names = ("fired", "settled", "failed", "deduped", "skipped_busy", "refused", "inflight")
    counters: Counters = {name: getattr(admission, name) for name in names}
    return counters | {f"refused_{ground}": count for ground, count in admission.grounds.items()}


def bus_counters(recorder: Recorder, health: BusHealth) -> Counters:
    """Return what waits for the broker, what was lost on the way to it, and how its connection fared."""
    counters: Counters = {
        "outbox_bytes": recorder.queued_bytes,
        "outbox_busy_bytes": OUTBOX_BUSY_BYTES,
        "outbox_limit_bytes": OUTBOX_LENGTH_MAX_BYTES,
        "outbox_events": recorder.queued_events,
        "outbox_retries": recorder.retries,
        "outbox_collapsed": recorder.collapsed,
        "outbox_dropped": recorder.dropped,
        "bus_connected": int(health.connected),
    }
    return counters | {f"bus_{name}": health.counters.get(name, 0) for name in BUS_EVENTS}


def holder_counters(statistics: HolderStatistics, *, lenders: Iterable[str], now: float) -> Counters:
    """Return what a holder counts, in all, for each binding and for each lender; ages are those of `now`."""
    counters: Counters = {
        "leases_taken": statistics.taken,
        "leases_returned": statistics.returned,
        "leases_held": statistics.held,
        "leases_retained": statistics.retained,
        "leases_oldest_s": 0.0 if statistics.oldest_taken_at is None else now - statistics.oldest_taken_at,
    }
    for lender in lenders:
        counters[f"{lender}_stopped"] = int(lender in statistics.lenders_stopped)
    for binding in statistics.bindings:
        name = binding.name
        counters |= {
            f"{name}_stopped": int(not binding.accepting),
            f"{name}_submissions": binding.submissions,
            f"{name}_deliveries": binding.deliveries,
            f"{name}_rejections": binding.rejections,
            f"{name}_uncertain": binding.uncertain,
            f"{name}_recomputed": binding.recomputed,
            f"{name}_retained": binding.retained,
            f"{name}_retained_s": binding.retained_s(now),
            f"{name}_late_releases": binding.late_releases,
            f"{name}_isolations": binding.isolations,
            f"{name}_isolated": binding.isolated,
            f"{name}_contradictions": binding.contradictions,
            f"{name}_bytes": binding.length_bytes,
        }
        counters |= {f"{name}_ended_{evidence}": count for evidence, count in binding.ends.items()}
    return counters


def page_counters(pages: PageStatistics) -> Counters:
    """Return the pool's pages by state."""
    return {
        "pages": pages.pages,
        "pages_free": pages.free,
        "pages_cached": pages.cached,
        "pages_writing": pages.writing,
        "pages_quarantined": pages.quarantined,
        "pages_forgotten": pages.forgotten,
        "pages_bound": pages.bound,
        "pages_lent": pages.claimed,
    }


def way_counters(ways: ChoosingStatistics, *, ucx_tls: str = "") -> Counters:
    """Return by which transports orders went, which came to nothing, and which lanes UCX found to how many peers.

    `ucx_tls`: what UCX may take, in its own words; nothing is told of it where there is no UCX.
    """
    counters: Counters = {"ways_passed_on": ways.passed_on}
    if ucx_tls:
        counters["ways_ucx_tls"] = ucx_tls
    counters |= {f"ways_open_{transport}": 1 for transport in ways.opened}
    counters |= {f"ways_failed_{transport}": why for transport, why in ways.failed.items()}
    counters |= {f"ways_by_{transport}": orders for transport, orders in ways.taken.items()}
    counters |= {f"ways_refused_{transport}": tries for transport, tries in ways.refused.items()}
    return counters | {f"ways_lane_{lane.replace('/', '_')}": peers for lane, peers in ways.lanes.items()}


def digest_counters(digests: PageDigests) -> Counters:
    """Return how many pages arrived with other bytes than their digests say, and how many changed while they lay here.

    Both are faults of memory, of a transport, or of a writer without a lease; neither page was used. `pages_reported`
    are ours of which readers say the first, `pages_rewritten` ours that they found changed while they read.
    """
    return {
        "pages_differ": digests.differing,
        "pages_spoiled": digests.spoiled,
        "pages_reported": digests.reported,
        "pages_rewritten": digests.rewritten,
        "pages_dropped": digests.dropped,
        "digests_made": digests.made,
    }


def holding_counters(cost: HoldingCost, blocking: Iterable[BlockingLease], *, now: float) -> Counters:
    """Return what holding costs: requests that wait, and pages out of use because of leases that nobody waits for."""
    ages = [lease.held_s(now) for lease in blocking]
    counters: Counters = {
        "holding_blocking": len(ages),
        "holding_blocking_s": max(ages, default=0.0),
        "holding_pages": cost.pages,
        "holding_oldest_s": cost.oldest_s(now),
    }
    return counters | {f"holding_pages_{lender}": pages for lender, pages in cost.pages_kept.items()}


def council_counters(council: InstanceCouncil) -> Counters:
    """Return a member's place in its instance's agreement: who leads, what waits, what was decided and refused."""
    counted = council.statistics
    return {
        "settle_term": council.book.term,
        "settle_n": council.book.n,
        "settle_leads": int(council.leads),
        "settle_shares": council.book.live,
        "settle_terms_led": counted.terms_led,
        "settle_decisions": counted.decisions,
        "settle_refused": counted.refused,
        "settle_reports": counted.reports,
        "settle_malformed": counted.malformed,
    }
