"""What logs that begin late leave unseen: leases and transfers that began before them.

A broker drops the oldest of its logs, by age and by size. Where it is known of the log itself where it begins, what
began behind that is judged as ever. What may have begun before is named: nothing that is missing of it refutes, and
nothing that stands there proves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbus.commands.leases import LeaseKey, SettleLogBody, fact_lines
from kvbus.commands.lifelines import Run, Trail, run_of, run_of_event
from kvbus.commands.replaying import Replay
from kvbus.commands.rules import Offence, Rule
from kvbus.events import Event, FactsSeen, TransferStep
from kvbus.ledger.facts import Fact

NEVER = 1 << 64
"""Beyond every ticket: of a run with such a first one no lease is recorded from its beginning."""


@dataclass(slots=True)
class Beginnings:
    """Tells which leases may have begun before their log; `facts` and `settle` say whether that log begins late.

    `events`: all of them, those of one log in its order.
    """

    facts: bool
    settle: bool
    events: Sequence[Event]
    replay: Replay
    _firsts: dict[Run, int] = field(default_factory=dict)
    _members: set[tuple[str, str]] = field(default_factory=set)
    _runs: set[Run] = field(default_factory=set)
    _successors: set[Run] = field(default_factory=set)
    _decided: dict[Run, Event] = field(default_factory=dict)
    _accepted: dict[tuple[str, str], Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look once at everything."""
        for event in self.events if self.facts or self.settle else ():
            self._note(event)
        for key, trail in self.replay.trails.items() if self.facts else ():
            if _is_fresh(trail):
                self._firsts[run_of(key)] = min(self._firsts.get(run_of(key), NEVER), key.ticket)

    def first_ticket(self, run: Run) -> int:
        """Return the first ticket from which on a run's leases must all be recorded, each from its beginning.

        Tickets count up. A run that follows on another one of its member began within the log, and so did its leases.
        """
        if not self.facts or run in self._successors:
            return 1
        return self._firsts.get(run, NEVER)

    def is_before(self, key: LeaseKey) -> bool:
        """Whether a lease may have begun before the facts that are there."""
        return 0 < key.ticket < self.first_ticket(run_of(key))

    def explains(self, offence: Offence) -> bool:
        """Whether what the offence misses may have stood before the beginning of a log."""
        if offence.proved or offence.rule is Rule.WRITE_ALONE:  # both grants are there: a return would be, too
            return False
        misses_decision = offence.rule in {Rule.SETTLED, Rule.DECIDED}
        return self.is_before(offence.lease) or (misses_decision and self._may_be_opened_before(offence))

    def _note(self, event: Event) -> None:
        run, body = run_of_event(event), event.body
        if isinstance(body, SettleLogBody):
            self._decided.setdefault(run, event)
            return
        if run not in self._runs:
            self._runs.add(run)
            if run[:2] in self._members:
                self._successors.add(run)
            self._members.add(run[:2])
        if isinstance(body, TransferStep) and body.step == "accepted":
            self._accepted.setdefault((event.header.i, body.transfer), event)

    def _may_be_opened_before(self, offence: Offence) -> bool:
        """Whether the transfer in question may have been opened before the decisions that are there.

        Who accepts a request decides about it afterwards. So where the run that accepted it had decided something
        before, and that is there, or all that this run has decided, the opening would be there as well.
        """
        trail = self.replay.trails.get(offence.lease)
        transfer = str(getattr(offence.event.body, "transfer", "")) or (trail.life.transfer if trail else "")
        if not self.settle or self.replay.is_opened(offence.lease.instance, transfer):
            return False
        accepted = self._accepted.get((offence.lease.instance, transfer))
        first = self._decided.get(run_of_event(accepted)) if accepted is not None else None
        if accepted is None or first is None or not isinstance(first.body, SettleLogBody):
            return True
        is_whole = first.body.n == 1 and first.body.term == first.header.e  # a term of this run's own
        return first.header.s > accepted.header.s and not is_whole


def _is_fresh(trail: Trail) -> bool:
    """Whether the first event about a lease is the one that says that it was taken: no more than that is known then."""
    first, ticket = trail.first.body, trail.life.key.ticket
    if not isinstance(first, FactsSeen):
        return False
    bits = next((bits for number, _, bits, *_ in fact_lines(first) if number == ticket), 0)
    return bool(bits & Fact.TAKEN) and not bits & Fact.GRANTED
