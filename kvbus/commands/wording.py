"""Recorded events in words: one readable line each, for `watch` as it happens and for `story` afterwards."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvbus.commands.leases import (
    MEMBER_TICKET,
    LeaseBook,
    LeaseChange,
    LeaseKey,
    LeaseLife,
    SettleLogBody,
)
from kvbus.events import (
    AttemptMade,
    CancelDecided,
    Event,
    FactsSeen,
    LeaseGranted,
    MadeVisible,
    OutcomeFixed,
    SettleDecided,
    SettleVoided,
    TermTaken,
    TransferOpened,
    TransferOutcome,
    TransferRequested,
    TransferStep,
    TransferVerdict,
)
from kvbus.ledger.facts import EVIDENCE_BITS, Fact, evidence_names, fact_names

RUNS_SHOWN = 6
"""Runs of pages named one by one: what fits beside the rest of a line of 100 columns."""

_READS_ON = frozenset({"accepted", "asking", "granted", "leased", "moved", "moving", "resolved"})
_BAD_STEPS = frozenset({"stopping", "giving_up", "isolating", "cancel", "refused"})
_BAD_BITS = int(
    Fact.FAILED
    | Fact.CANCELLED
    | Fact.UNCERTAIN
    | Fact.ABANDONED
    | Fact.RETURN_FAILED
    | Fact.LENDER_STOPPED
    | Fact.BINDING_STOPPED
)


class Tone(StrEnum):
    """What kind of news a line is; how that looks is the renderer's affair."""

    STEP = "step"
    LEASE = "lease"
    BYTES = "bytes"
    SETTLE = "settle"
    RETURN = "return"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened: `subject` says to what, `text` says what; `lease` where it is about one."""

    subject: str
    text: str
    tone: Tone
    transfer: str = ""
    lease: LeaseKey | None = None
    is_local: bool = False


def lines_of(event: Event, book: LeaseBook, *, only: Container[LeaseKey] | None = None) -> list[Line]:
    """Put one event into words, and note it in the book; lines about leases that are not in `only` are left out."""
    body = event.body
    if isinstance(body, FactsSeen):
        changes = book.changes(event.header, body)
        lines = [line for change in changes if only is None or change.life.key in only for line in _facts(change)]
        return lines if only is not None else [*lines, *_of_member(body)]
    life = book.note(event)
    if life is not None and only is not None and life.key not in only:
        return []
    line = _row(body, life) if isinstance(body, LeaseGranted | AttemptMade | OutcomeFixed) and life else _other(event)
    return [line]


def _row(body: LeaseGranted | AttemptMade | OutcomeFixed, life: LeaseLife) -> Line:
    if isinstance(body, LeaseGranted):
        text, tone = _granted(life), Tone.LEASE
    elif isinstance(body, AttemptMade):
        text, tone = f"attempt {body.attempt} by {body.binding} with {body.peer or 'nobody'}", Tone.BYTES
    else:
        text, tone = _ended(body, life), Tone.BAD if body.failure else Tone.BYTES
    return Line(f"T{life.key.ticket}", text, tone, life.transfer, life.key, life.is_local)


def _granted(life: LeaseLife) -> str:
    pages = life.pages
    whom = f"{'from' if life.direction == 'write' else 'for'} {life.peer}" if life.peer else "for nobody"
    text = f"{life.direction} {counted(len(pages), 'page')} {whom}"
    if pages:
        text += f": {page_runs(pages)}"
    if life.counters:
        text += f", generation {span(life.counters)}"
    return text


def _ended(body: OutcomeFixed, life: LeaseLife) -> str:
    text = f"attempt {body.attempt} {body.result}"
    if life.direction != "read":
        text += f": {body.arrived}/{counted(len(life.pages), 'block')}, {size(body.length_bytes)}"
    text += f", access ended by {body.evidence}"
    return f"{text}; {_why(body.failure, body.text)}" if body.failure else text


def _facts(change: LeaseChange) -> Iterator[Line]:
    life, bits = change.life, change.bits
    told = life.ended.text if life.ended else ""  # the end of its attempt has said why already
    failed = [_why(row.failure, "" if row.text == told else row.text) for row in change.failures]
    words = [*fact_names(bits & ~int(Fact.RETURNED) & ~EVIDENCE_BITS), *evidence_names(bits)]
    if bits & Fact.DELIVERED and life.ended is not None and life.direction == "write":
        words.append(f"{life.ended.arrived}/{counted(len(life.pages), 'block')}")
    if change.bounds:
        words.append(f"bounds {life.lo}–{life.hi}")
    if bits & Fact.RETURNED:
        words.append(f"returned, evidence {', '.join(life.evidence) or 'none'}")
    if not words and not failed:
        return
    tone = Tone.BAD if failed or bits & _BAD_BITS else Tone.RETURN if bits & Fact.RETURNED else Tone.LEASE
    text = "; ".join([" · ".join(words), *failed] if words else failed)
    is_local = life.is_local and not (failed and life.granted is None and change.failures[0].peer != "engine")
    yield Line(f"T{life.key.ticket}", text, tone, life.transfer, life.key, is_local)


def _of_member(facts: FactsSeen) -> Iterator[Line]:
    for row in facts.details:
        if row.ticket == MEMBER_TICKET:
            peer = f" (peer {row.peer})" if row.peer else ""
            yield Line("member", f"{_why(row.failure, row.text)}{peer}", Tone.WARNING)


def _other(event: Event) -> Line:
    body = event.body
    match body:
        case TransferStep():
            step = body.step.replace("_", " ")
            joint = " " if body.step in _READS_ON else ": "
            text = f"{step}{joint}{body.text}" if body.text else step
            return Line("transfer", text, Tone.BAD if body.step in _BAD_STEPS else Tone.STEP, body.transfer)
        case TransferOutcome():
            tone = Tone.GOOD if body.outcome == "settled" else Tone.BAD
            return Line("transfer", outcome_text(body), tone, body.transfer)
        case TransferOpened() | SettleDecided() | MadeVisible() | SettleVoided() | CancelDecided() | TermTaken():
            return _decision(body)
        case TransferRequested():
            text = f"from {body.source} to {body.destination}, on_miss {body.on_miss}, budget {body.budget_s:g} s"
            return Line("request", text, Tone.STEP)
        case TransferVerdict():
            text = f"{body.verdict}: {body.reason}" if body.reason else body.verdict
            return Line("verdict", text, Tone.BAD if body.verdict == "refused" else Tone.STEP, body.transfer)
        case _:
            return Line(event.header.k, "", Tone.STEP)


def _decision(body: SettleLogBody) -> Line:
    if isinstance(body, TermTaken):
        return Line(f"term #{body.n}", f"{body.member} leads, in term {body.term}", Tone.SETTLE)
    tone = Tone.SETTLE
    match body:
        case TransferOpened():
            parties = ((member, rank, f"T{ticket} of " if ticket else "") for member, _, rank, ticket in body.members)
            text = ", ".join(f"{of}{member} rank {rank}" for member, rank, of in parties)
        case SettleDecided() | MadeVisible():
            text = f"blocks {body.lo}–{body.hi}" if body.hi else "no block in common"
        case _:
            text, tone = body.reason, Tone.BAD
    return Line(f"{body.KIND} #{body.n}", text, tone, body.transfer)


def outcome_text(outcome: TransferOutcome) -> str:
    """Say how a transfer ended, with its bytes and times."""
    text = f"{outcome.outcome}: {outcome.pages_moved}/{counted(outcome.pages_wanted, 'block')} moved"
    if outcome.pages_held:
        text += f", {outcome.pages_held} here before"
    text += f", {size(outcome.length_bytes)} in {duration(outcome.total_s)}"
    parts = (("queue", outcome.queue_s), ("grant", outcome.grant_s), ("move", outcome.move_s))
    spent = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts if seconds)
    text += f" ({spent})" if spent else ""
    if outcome.failure or outcome.reason:
        text += f"; {_why(outcome.failure, outcome.reason)}"
    return text


def _why(failure: str, text: str) -> str:
    return f"{failure}: {text}" if failure and text else failure or text


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where that fits."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def page_runs(pages: Sequence[int]) -> str:
    """Return page indexes as runs such as `12–42`, in their order; what exceeds the line is counted."""
    runs = list(runs_of(pages))
    shown = [f"{first}" if first == last else f"{first}–{last}" for first, last in runs[:RUNS_SHOWN]]
    if len(runs) > RUNS_SHOWN:
        shown.append(f"and {counted(len(runs) - RUNS_SHOWN, 'more run')}")
    return ", ".join(shown)


def runs_of(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each stretch of pages that follow each other."""
    first = last = -1
    for page in pages:
        if first < 0:
            first = last = page
        elif page == last + 1:
            last = page
        else:
            yield first, last
            first = last = page
    if first >= 0:
        yield first, last


def span(numbers: Sequence[int]) -> str:
    """Return the smallest and the largest of some numbers, or the one that they all are."""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low}–{high}"


def size(length_bytes: int) -> str:
    """Return a number of bytes with a decimal unit."""
    value, unit = float(length_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1_000:
            break
        value, unit = value / 1_000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Return seconds in the unit in which a person reads them."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1_000:.1f} ms"
