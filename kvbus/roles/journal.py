"""A member's transfers and leases as log lines, beside the facts: with ids, for who reads logs and not the bus.

What fails is told at the level `info`, all else at `debug`: facts are the record, and a busy member makes thousands a
second. No line holds a prompt or a token id; neither do the events that it is made of.
"""

import logging

from kvbus.events import TransferOutcome, TransferStep
from kvbus.ledger.facts import (
    Fact,
    FactDetail,
    FailureClass,
    GrantedRow,
    LeaseFacts,
    OutcomeRow,
    evidence_names,
)
from kvbus.ledger.holder import STOPPING
from kvbus.parts import Body

log = logging.getLogger(__name__)

_WELL = frozenset({"settled", "partial"})


def note_event(body: Body, cause: str) -> None:
    """Log a step or an outcome of a transfer.

    The types are compared, not asked for: pydantic's `isinstance` costs more than all else here does.
    """
    if type(body) is TransferOutcome and log.isEnabledFor(logging.INFO):
        level = logging.DEBUG if body.outcome in _WELL else logging.INFO
        about = {"transfer": body.transfer, "cause": cause, "request_hash": body.request_hash}
        pages = f"{body.pages_moved} of {body.pages_wanted - body.pages_held} pages, {body.length_bytes} bytes"
        why = f": {body.failure} {body.reason}" if body.failure or body.reason else ""
        log.log(level, "%s from %s, %s%s", body.outcome, body.source, pages, why, extra=about)
    elif type(body) is TransferStep:
        note_step(body.transfer, body.request_hash, body.step, body.text, cause)


def note_step(transfer: str, request_hash: str, step: str, text: str, cause: str) -> None:
    """Log a step of a transfer."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s %s", step, text, extra={"transfer": transfer, "cause": cause, "request_hash": request_hash})


def note_facts(facts: LeaseFacts) -> None:
    """Log which leases were taken, how attempts at them ended, and by which evidence they went back."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    for row in facts.rows:
        if isinstance(row, GrantedRow):
            kind, about = "write" if row.writes else "read", {"transfer": row.transfer, "ticket": row.ticket}
            log.debug("%s lease of %d pages with %s", kind, len(row.pages), row.peer or "nobody", extra=about)
        elif isinstance(row, OutcomeRow):
            log.debug("attempt %d ended: %d pages arrived", row.attempt, row.arrived, extra={"ticket": row.ticket})
    for ticket, _, bits, _, _ in facts.lines:
        if bits & Fact.RETURNED:
            evidence = ", ".join(evidence_names(bits))
            log.debug("lease went back%s", f" by {evidence}" if evidence else "", extra={"ticket": ticket})


class TroubleLog:
    """Logs what stopped a binding or a lender: facts say it too, but a person looks here first."""

    def on_line(self, ticket: int, bits: int, lo: int, hi: int) -> None:
        """Lines are for the facts stream."""

    def on_outcome(self, row: OutcomeRow) -> None:
        """Outcomes are for the facts stream."""

    def on_detail(self, detail: FactDetail) -> None:
        """Log what concerns no single lease, and contradictions."""
        if detail.ticket == 0 or detail.failure is FailureClass.CONTRADICTION:
            level = logging.INFO if detail.text.endswith(STOPPING) else logging.WARNING
            about = {"ticket": detail.ticket}
            log.log(level, "%s: %s %s", detail.failure.name.lower(), detail.text, detail.peer, extra=about)
