"""The rules of ownership that recorded events can show to be kept or broken, and what a breach is."""

from dataclasses import dataclass
from enum import StrEnum

from kvbus.commands.leases import LeaseKey
from kvbus.events import Event


class Rule(StrEnum):
    """What the ledger promises, as far as events can show it."""

    WRITE_ALONE = "no page is lent for writing while it is lent"
    COUNTER = "a page's counter never goes back; it is odd for writing and even for reading"
    GRANTED_ONCE = "a lease is granted once"
    RETURNED_ONCE = "a lease is returned once"
    EVIDENCE = "access has ended, by evidence, before a lease is returned"
    FENCED = "only a read lease is fenced"
    SETTLED = "a write lease is settled before it is returned"
    CONSUMED = "only what was delivered is consumed"
    RETURNED_LAST = "nothing happens to a lease after its return"
    FACTS_STAY = "facts only turn on, and a lease has one result"
    DECIDED = "a settle decision names the leases that its transfer opened, once access to them has ended"
    ONE_END = "a transfer is visible only once it was settled, as it was settled, and never both visible and void"
    TERM = "a coordinator that another one has followed decides no more"
    RETURNED = "a lease is returned once nothing stands in its way"


@dataclass(frozen=True, slots=True)
class Offence:
    """An event that breaks a rule; `other` and `other_event` are the lease and the event that it collides with."""

    place: int
    rule: Rule
    event: Event
    text: str
    lease: LeaseKey
    proved: bool
    other: LeaseKey | None = None
    other_event: Event | None = None
