"""Counters by name, made of what the real holder and pool say."""

from kvbus.events import TransferOutcome
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.holding import holding_cost
from kvbus.roles.counting import TransferTotals, holder_counters, holding_counters, page_counters
from tests.unit.ledger.bench import Bench
from tests.unit.pool_parts import names_of, small_lender


def test_a_holders_counters_have_each_binding_and_each_lender() -> None:
    # R24
    bench = Bench()
    ticket, _ = bench.submitted_write(2)
    bench.pull.deliver(ticket)
    bench.round()
    bench.round(ticket)
    kept, _ = bench.submitted_write(3)
    bench.holder.abandon(kept, FailureClass.DEADLINE, "the budget is spent")
    bench.holder.isolate("pull", "peer", "silent")
    bench.other_lender.faults.plant("progress", OSError("gone"))
    bench.round()
    counters = holder_counters(bench.holder.statistics(), lenders=("lender", "other"), now=6.0)
    said = {name: counters[name] for name in counters if name.startswith(("pull", "lender", "other", "leases"))}
    assert said == {
        "leases_taken": 2,
        "leases_returned": 1,
        "leases_held": 1,
        "leases_retained": 1,
        "leases_oldest_s": 6.0,
        "lender_stopped": 0,
        "other_stopped": 1,
        "pull_stopped": 0,
        "pull_submissions": 2,
        "pull_deliveries": 1,
        "pull_rejections": 0,
        "pull_uncertain": 0,
        "pull_recomputed": 0,
        "pull_retained": 1,
        "pull_retained_s": 6.0,
        "pull_late_releases": 0,
        "pull_isolations": 1,
        "pull_isolated": 1,
        "pull_contradictions": 0,
        "pull_bytes": 2_000,
        "pull_ended_completed": 1,
    }


def test_what_holding_costs_is_counted_too() -> None:
    # R19, R20
    bench = Bench()
    kept, _ = bench.submitted_write(3)
    bench.holder.abandon(kept, FailureClass.DEADLINE, "the budget is spent")
    bench.round()
    cost = holding_cost(bench.holder.statistics(), quarantined=1)
    assert holding_counters(cost, bench.holder.blocking(), now=2.5) == {
        "holding_blocking": 1,
        "holding_blocking_s": 2.5,
        "holding_pages": 4,
        "holding_oldest_s": 2.5,
        "holding_pages_lender": 3,
    }


def test_a_pools_counters_have_each_state() -> None:
    # R24, P26
    lender = small_lender()
    lender.lend_write(names_of(2), range(2))
    lender.quarantine((7,))
    counters = page_counters(lender.statistics().pages)
    assert counters["pages"] == 8
    assert counters["pages_lent"] == 3
    states = ("free", "cached", "writing", "quarantined", "forgotten")
    assert [counters[f"pages_{state}"] for state in states] == [5, 0, 2, 1, 0]


def test_transfers_add_up_by_outcome_with_their_bytes_and_times() -> None:
    # R24
    totals = TransferTotals()
    for word, length_bytes in (("settled", 4_096), ("settled", 4_096), ("failed", 0)):
        totals.add(
            TransferOutcome.model_validate(
                {
                    "transfer": "t",
                    "request_hash": "9f3c" + "0" * 28,
                    "source": "a",
                    "destination": "b",
                    "outcome": word,
                    "failure": "" if word == "settled" else "transport",
                    "length_bytes": length_bytes,
                    "queue_s": 0.5,
                    "grant_s": 0.25,
                    "move_s": 1.0,
                    "total_s": 2.0,
                }
            )
        )
    counters = totals.counters()
    spread = {name: counters.pop(name) for name in [*counters] if "_settled_" in name}
    assert {name: count for name, count in spread.items() if count} == {
        "transfers_settled_s_le_2.5": 2,
        "transfers_settled_s_sum": 4.0,
        "transfers_settled_bytes_le_65536": 2,
        "transfers_settled_bytes_sum": 8_192,
    }
    assert counters == {
        "transfers_ended": 3,
        "transfers_bytes": 8_192,
        "transfers_queue_s": 1.5,
        "transfers_grant_s": 0.75,
        "transfers_move_s": 3.0,
        "transfers_total_s": 6.0,
        "transfers_settled": 2,
        "transfers_failed": 1,
        "transfers_failed_transport": 1,
    }
