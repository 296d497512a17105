"""All metrics that tell of a member, by what they are read from; `docs/metrics.md` is made of this table.

A worker tells its own; a gateway tells those of all members, by what they answer to `stats` (R24).
"""

from collections.abc import Sequence
from typing import Final, get_args

from kvbus.ledger.admission import Ground
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.metrics.reading import Kind, Metric
from kvbus.roles.spread import BYTES, SECONDS

EVIDENCE: Final = (*(one.name.lower() for one in Evidence), "fenced")
REASONS: Final = tuple(one.name.lower() for one in FailureClass if one is not FailureClass.NONE)
TRANSPORTS: Final = ("memory", "socket", "ucx", "ucx-py")


def _total(name: str, counter: str, about: str, **words: Sequence[str]) -> Metric:
    return Metric(f"kvbus_{name}_total", Kind.COUNTER, about, counter, words)


def _now(name: str, counter: str, about: str, **words: Sequence[str]) -> Metric:
    return Metric(f"kvbus_{name}", Kind.GAUGE, about, counter, words)


def _spread(name: str, counter: str, about: str, bounds: Sequence[float]) -> Metric:
    return Metric(f"kvbus_{name}", Kind.HISTOGRAM, about, counter, bounds=bounds)


REQUESTS: Final = (
    _total(
        "requests",
        "{verdict}",
        "Requests by what was answered; fired ones became a transfer.",
        verdict=("fired", "deduped", "skipped_busy", "refused"),
    ),
    _total(
        "requests_refused",
        "refused_{reason}",
        "Refused requests by reason.",
        reason=get_args(Ground),
    ),
    _now("requests_inflight", "inflight", "Requests that have a place now."),
    _total(
        "messages_unusable",
        "messages_{fault}",
        "Messages that could not be read, or were for somebody else.",
        fault=("malformed", "misplaced"),
    ),
)
TRANSFERS: Final = (
    _now("transfers_running", "transfers_running", "Transfers that run now."),
    _total(
        "transfers",
        "transfers_{outcome}",
        "Transfers that ended here, by how.",
        outcome=("settled", "partial", "failed", "cancelled"),
    ),
    _total("transfer_failures", "transfers_failed_{reason}", "Transfers that failed, by class.", reason=REASONS),
    _spread(
        "transfer_duration_seconds",
        "transfers_settled_s",
        "From admission to the end, of transfers that brought a usable prefix.",
        SECONDS,
    ),
    _spread("transfer_size_bytes", "transfers_settled_bytes", "Bytes that each of these moved.", BYTES),
    _total(
        "transfer_phase_seconds",
        "transfers_{phase}_s",
        "Time that ended transfers spent: in the queue, until the source had lent, and reading.",
        phase=("queue", "grant", "move"),
    ),
    _total("transferred_bytes", "transfers_bytes", "Bytes that all ended transfers moved, those that failed as well."),
)
LEASES: Final = (
    _total("leases_taken", "leases_taken", "Leases that the holder took."),
    _total("leases_returned", "leases_returned", "Leases that went back to their lender."),
    _now("leases_held", "leases_held", "Leases that are out now."),
    _now("leases_retained", "leases_retained", "Leases that nobody waits for, and whose memory may still be accessed."),
    _now("leases_oldest_age_seconds", "leases_oldest_s", "Age of the oldest lease that is out; 0 where none is."),
    _now("leases_blocking", "holding_blocking", "Write leases for which a request waits."),
    _now("leases_blocking_age_seconds", "holding_blocking_s", "Age of the oldest of these."),
    _now("holding_pages", "holding_pages", "Pages that are out of use: retained, or in quarantine."),
    _now("releases_unconfirmed", "releases_unconfirmed", "Releases that their source has not confirmed yet."),
)
BINDINGS: Final = (
    _now("binding_stopped", "{binding}_stopped", "Whether the binding takes no submissions any more."),
    _total("binding_submissions", "{binding}_submissions", "Leases that the binding's backend took on."),
    _total("binding_deliveries", "{binding}_deliveries", "Attempts that delivered."),
    _total("binding_rejections", "{binding}_rejections", "Submissions that the backend refused."),
    _total("binding_uncertain", "{binding}_uncertain", "Submissions that ended in an unknown error."),
    _total("binding_recomputed", "{binding}_recomputed", "Writes that brought less than was lent."),
    _total("binding_late_releases", "{binding}_late_releases", "Attempts that ended after their lease had a result."),
    _total("binding_isolations", "{binding}_isolations", "Peers that were isolated."),
    _now("binding_isolated_peers", "{binding}_isolated", "Peers that are isolated now."),
    _total("binding_contradictions", "{binding}_contradictions", "Reports that exclude each other."),
    _now("binding_retained_leases", "{binding}_retained", "Retained leases of the binding."),
    _now("binding_retained_age_seconds", "{binding}_retained_s", "Age of the oldest of these; 0 where there is none."),
    _total("binding_bytes", "{binding}_bytes", "Bytes that the binding moved."),
    _total(
        "binding_ends", "{binding}_ended_{evidence}", "Attempts by the evidence that ended them.", evidence=EVIDENCE
    ),
    _now("domain_stopped", "{domain}_stopped", "Whether the lender is stopped, with all that depends on it."),
)
POOL: Final = (
    _now("pool_size_pages", "pages", "Pages of the pool."),
    _now(
        "pool_pages",
        "pages_{state}",
        "Pages by state; these add up to the pool.",
        state=("free", "cached", "writing", "quarantined", "forgotten"),
    ),
    _now("pool_lent_pages", "pages_lent", "Pages that peers take up, or that are kept from the engine for them."),
    _now("pool_bound_pages", "pages_bound", "Pages that may take content of one salt only: a fenced reader may read."),
    _total(
        "page_digest_faults",
        "pages_{fault}",
        "Pages whose bytes were not those of their digest: as they arrived, where they lay, or as readers say.",
        fault=("differ", "spoiled", "reported"),
    ),
    _total("pages_rewritten", "pages_rewritten", "Pages that readers found rewritten while they read them."),
)
TRANSPORT: Final = (
    _total("transport_orders", "ways_by_{transport}", "Orders that a transport took.", transport=TRANSPORTS),
    _total("transport_refusals", "ways_refused_{transport}", "Orders that it refused.", transport=TRANSPORTS),
    _now("transport_open", "ways_open_{transport}", "1 for each transport that is open.", transport=TRANSPORTS),
)
BUS: Final = (
    _now("bus_connected", "bus_connected", "Whether the broker is there."),
    _total("bus_reconnects", "bus_reconnected", "Times that the connection came back."),
    _total("bus_disconnects", "bus_disconnected", "Times that the connection was lost."),
    _now("outbox_bytes", "outbox_bytes", "Bytes of facts that wait for the broker."),
    _now("outbox_busy_bytes", "outbox_busy_bytes", "From here on nothing new is taken."),
    _now("outbox_limit_bytes", "outbox_limit_bytes", "From here on facts are collapsed, and then lost."),
    _now("outbox_events", "outbox_events", "Facts that wait for the broker."),
    _total("outbox_retries", "outbox_retries", "Attempts to store facts that the broker did not take."),
    _total("outbox_collapsed", "outbox_collapsed", "Facts that made room for a newer one of the same lease."),
    _total("outbox_dropped", "outbox_dropped", "Facts that were lost."),
)
SETTLING: Final = (
    _total("rounds", "rounds", "Rounds that ran."),
    _now("settle_leads", "settle_leads", "Whether this member leads its instance; told where it has several."),
    _now("settle_term", "settle_term", "The term of its settle log."),
    _total("settle_terms_led", "settle_terms_led", "Terms that this member led."),
    _total("settle_decisions", "settle_decisions", "Decisions that it made or followed."),
    _total("settle_refused", "settle_refused", "Decisions that it refused."),
)
MEMBER: Final = (*REQUESTS, *TRANSFERS, *LEASES, *BINDINGS, *POOL, *TRANSPORT, *BUS, *SETTLING)

BUILD: Final = (_now("build_info", "one", "1; the version is a label."),)
INFO: Final = (_now("member_info", "one", "1; what the registry says of a member is in the labels."),)
PRESENCE: Final = (
    _now("member_up", "up", "Whether a member that is or was registered answered this time."),
    _now("member_epoch", "starts", "How often the member was started, by the registry's count."),
    _now("heartbeat_age_seconds", "heartbeat_s", "Time since the member's last heartbeat, as this gateway heard it."),
)
GATE: Final = (
    _total("gateway_transfers_fired", "fired", "Transfers that this gateway fired: transferred + failed + inflight."),
    _total("gateway_transfers_transferred", "transferred", "Of these, those that brought what was asked for."),
    _total("gateway_transfers_failed", "failed", "Of these, those that did not, cancelled ones among them."),
    _now("gateway_transfers_inflight", "inflight", "Of these, those that run."),
    _total("gateway_transfers_deduped", "deduped", "Requests that joined an earlier one."),
    _total("gateway_transfers_skipped_busy", "skipped_busy", "Requests for which there was no place."),
    _now("gateway_transfers_remembered", "seen", "Requests that a repeat would join."),
)
GATEWAY: Final = (
    _total(
        "gateway_requests_refused",
        "refused_{reason}",
        "Requests for a transfer that were not taken on, by reason.",
        reason=("bad_request", "source", "unknown_instance", "slow_body", "too_long", "unavailable", "busy", "fault"),
    ),
    _now("gateway_followers", "followers", "Clients that follow by server-sent events."),
    _now("gateway_body_bytes", "body_bytes", "Bytes of request bodies that are held now."),
    _now("gateway_feed_listening", "feed_listening", "Whether the facts are heard."),
    _total("gateway_feed_gaps_repaired", "feed_repaired", "Gaps in the live facts that were read from the log."),
    _total("gateway_feed_losses", "feed_losses", "Gaps that the log could not fill any more."),
    _total("gateway_feed_duplicates", "feed_duplicate", "Facts that came twice, and counted once."),
    _total("gateway_feed_malformed", "feed_malformed", "Facts that could not be read."),
    _now("gateway_registry_fresh", "registry_fresh", "Whether the last look at the registry succeeded."),
    _now("gateway_stale", "stale", "Whether what this gateway shows may be old: bus, facts or registry are away."),
    _now("gateway_bus_connected", "bus_connected", "Whether the broker is there."),
    _total("gateway_bus_reconnects", "bus_reconnected", "Times that the connection came back."),
)
HTTP: Final = (_total("gateway_http_requests", "requests", "HTTP requests by method, route and class of status."),)
