"""Decisions and shares as the wire has them, both ways: what the ledger holds, and what the events say."""

from typing import TypedDict

from kvbus.events import CancelDecided, Event, MadeVisible, SettleDecided, SettleVoided, TermTaken, TransferOpened
from kvbus.ledger.agreement import Decision, Party
from kvbus.ledger.shares import Share, ShareStage
from kvbus.parts import Body
from kvbus.settling import ShareRow, Stage


class _Place(TypedDict):
    """Where in the chain a decision stands."""

    term: int
    n: int
    previous: str


def body_of(decision: Decision) -> Body:
    """Return a decision as an event's body."""
    place: _Place = {"term": decision.term, "n": decision.n, "previous": decision.previous}
    members = tuple((party.member, party.epoch, party.rank, party.ticket) for party in decision.parties)
    match decision.kind:
        case "open":
            return TransferOpened(transfer=decision.transfer, members=members, **place)
        case "settle":
            return SettleDecided(transfer=decision.transfer, lo=decision.lo, hi=decision.hi, members=members, **place)
        case "visible":
            return MadeVisible(transfer=decision.transfer, lo=decision.lo, hi=decision.hi, members=members, **place)
        case "void":
            return SettleVoided(transfer=decision.transfer, reason=decision.reason[:2_000], members=members, **place)
        case "cancel":
            return CancelDecided(transfer=decision.transfer, reason=decision.reason[:2_000], **place)
        case _:
            party = decision.parties[0]
            return TermTaken(member=party.member, epoch=party.epoch, **place)


def decision_of(event: Event) -> Decision | None:
    """Return the decision that an event of the settle log holds; None for any other kind."""
    body = event.body
    match body:
        case TermTaken():
            coordinator = (Party(body.member, body.epoch, 0, 0),)
            return Decision("term", "", body.term, body.n, body.previous, coordinator)
        case TransferOpened():
            return Decision("open", body.transfer, body.term, body.n, body.previous, _parties(body.members))
        case SettleDecided() | MadeVisible():
            parties = _parties(body.members)
            return Decision(body.KIND, body.transfer, body.term, body.n, body.previous, parties, body.lo, body.hi)
        case SettleVoided():
            parties = _parties(body.members)
            return Decision("void", body.transfer, body.term, body.n, body.previous, parties, reason=body.reason)
        case CancelDecided():
            return Decision("cancel", body.transfer, body.term, body.n, body.previous, (), reason=body.reason)
        case _:
            return None


def row_of(share: Share) -> ShareRow:
    """Return a share as one row of a report."""
    return share.transfer, share.rank, share.ticket, share.bits, share.lo, share.hi, _STAGES[share.stage], share.reason


def share_of(row: ShareRow) -> Share:
    """Return the share in a row of a report; only its own member knows all of its parties."""
    transfer, rank, ticket, bits, lo, hi, stage, reason = row
    return Share(transfer, (), rank, ticket, bits, lo, hi, ShareStage(stage), reason)


_STAGES: dict[ShareStage, Stage] = {
    ShareStage.OPEN: "open",
    ShareStage.SETTLED: "settled",
    ShareStage.VISIBLE: "visible",
    ShareStage.VOID: "void",
}


def _parties(rows: tuple[tuple[str, int, int, int], ...]) -> tuple[Party, ...]:
    return tuple(Party(*row) for row in rows)
