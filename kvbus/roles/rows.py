"""The ledger's rows, lines and decisions as fields of an event, as their kinds have them.

What the ledger says needs no check, and thousands of these are written each second: so they are packed as they stand,
without the models by which they are read.
"""

import struct

from kvbus.columns import column
from kvbus.events import AttemptMade, LeaseGranted, OutcomeFixed, SettleDecided, SettleVoided, TransferOpened
from kvbus.ledger.agreement import Decision
from kvbus.ledger.facts import AttemptRow, FactDetail, GrantedRow, LeaseFacts, OutcomeRow
from kvbus.speaking import Fields


def fields_of_lines(facts: LeaseFacts) -> Fields:
    """Return the columns of a round's facts, and its failures.

    All columns are packed by one call, and cut apart: a round has few lines, so that a call for each would cost more.
    """
    n = len(facts.lines)
    tickets, ranks, all_bits, lows, ends = facts.columns
    rank, bits, lo, hi = 8 * n, 10 * n, 14 * n, 18 * n  # where each column begins, behind the tickets
    columns = struct.pack(f"<{n}Q{n}H{3 * n}I", *tickets, *ranks, *all_bits, *lows, *ends)
    return {
        "n": n,
        "ticket": columns[:rank],
        "rank": columns[rank:bits],
        "bits": columns[bits:lo],
        "lo": columns[lo:hi],
        "hi": columns[hi:],
        "details": [_detail_row(one) for one in facts.details] if facts.details else (),
    }


def _detail_row(detail: FactDetail) -> Fields:
    failure = detail.failure.name.lower()
    return {"ticket": detail.ticket, "failure": failure, "text": detail.text[:2_000], "peer": detail.peer[:64]}


def fields_of_row(row: GrantedRow | AttemptRow | OutcomeRow) -> tuple[str, Fields]:
    """Return the kind and the fields of an audit row."""
    match row:
        case GrantedRow():
            return LeaseGranted.KIND, {
                "ticket": row.ticket,
                "transfer": row.transfer,
                "rank": row.rank,
                "direction": "write" if row.writes else "read",
                "lender": row.lender,
                "peer": row.peer,
                "pages": column(row.pages, 4),
                "counters": column(row.counters, 8),
            }
        case AttemptRow():
            return AttemptMade.KIND, {
                "ticket": row.ticket,
                "attempt": row.attempt,
                "binding": row.binding,
                "peer": row.peer,
            }
        case OutcomeRow():
            return OutcomeFixed.KIND, {
                "ticket": row.ticket,
                "attempt": row.attempt,
                "result": row.result,
                "arrived": row.arrived,
                "length_bytes": row.length_bytes,
                "evidence": row.evidence,
                "failure": row.failure.name.lower() if row.failure else "",
                "text": row.text[:2_000],
            }


def fields_of_decision(decision: Decision) -> tuple[str, Fields]:
    """Return the kind and the fields of a decision of an instance that has one member."""
    fields: Fields = {
        "transfer": decision.transfer,
        "term": decision.term,
        "n": decision.n,
        "previous": decision.previous,
    }
    members = [(party.member, party.epoch, party.rank, party.ticket) for party in decision.parties]
    match decision.kind:
        case "open":
            return TransferOpened.KIND, {**fields, "members": members}
        case "void":
            return SettleVoided.KIND, {**fields, "reason": decision.reason[:2_000], "members": ()}
        case _:
            return SettleDecided.KIND, {**fields, "lo": decision.lo, "hi": decision.hi, "members": members}
