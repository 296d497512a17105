"""A story as a document, for programs and for the live page: the same words in both."""

from kvbus.commands.stories import Entry, LeaseTold, Story
from kvbus.commands.trails import NotFound
from kvbus.ledger.facts import fact_names


def story_document(story: Story) -> dict[str, object]:
    """Return a story for programs."""
    return {
        "transfer": story.transfer,
        "request_hash": story.request_hash,
        "request_id": story.request_id,
        "source": story.source,
        "destination": story.destination,
        "began_ns": story.began_ns,
        "complete": story.complete,
        "missing": list(story.missing),
        "contradictions": list(story.contradictions),
        "note": story.note,
        "events": [_entry_document(entry) for entry in story.entries],
        "leases": [_lease_document(told) for told in story.leases],
        "outcome": story.outcome.model_dump() if story.outcome else None,
        "summary": story.summary,
    }


def not_found_document(not_found: NotFound) -> dict[str, object]:
    """Return, for programs, why there is no story, and what may have been meant."""
    candidates = [
        {"transfer": known.transfer, "request_hash": known.request_hash, "outcome": known.outcome}
        for known in not_found.candidates
    ]
    return {"wanted": not_found.wanted, "error": not_found.reason, "candidates": candidates}


def _entry_document(entry: Entry) -> dict[str, object]:
    header, line = entry.event.header, entry.line
    return {
        "after_ms": round(entry.after_ns / 1e6, 3),
        "lane": entry.lane.value,
        "instance": header.i,
        "kind": header.k,
        "id": header.event_id,
        "ticket": line.lease.ticket if line.lease else None,
        "subject": line.subject,
        "tone": line.tone.value,
        "text": line.text,
    }


def _lease_document(told: LeaseTold) -> dict[str, object]:
    life = told.life
    return {
        "instance": life.key.instance,
        "member": life.key.member,
        "epoch": life.key.epoch,
        "ticket": life.key.ticket,
        "rank": life.rank,
        "direction": life.direction,
        "peer": life.peer,
        "pages": list(life.pages),
        "counters": list(life.counters),
        "facts": fact_names(life.bits),
        "evidence": list(life.evidence),
        "returned": told.returned,
        "returns": life.returns,
        "why_not": told.out,
    }
