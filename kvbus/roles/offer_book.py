"""How often the queue has offered a request in vain: to runs that did not live to end it, as far as anybody can tell.

The broker counts every offer. What this run has looked at, and what earlier runs left to the next one, did no harm, so
it is not held against a request.
"""

from collections import OrderedDict

from kvbus.roles.admitting import TRIES_MAX
from kvbus.transport import Work

OFFERS_MAX = 2 * TRIES_MAX
"""So often it is tried to run a request, and then to tell that it failed; after that it leaves the queue unread."""
KNOWN_MAX = 4_096
"""Requests whose offers are counted here: several times what the queue gives out at a time."""


class OfferBook:
    """Counts offers by the request's place in its stream, of the newest requests."""

    def __init__(self) -> None:
        self._survived: OrderedDict[int, int] = OrderedDict()
        self._left: OrderedDict[int, int] = OrderedDict()

    def note(self, work: Work) -> None:
        """Count an offer that this run lives to see: while a transfer runs, its request may be offered for ever."""
        sequence = work.delivery.sequence
        _keep(self._survived, sequence, self._survived.get(sequence, 0) + 1)

    def forgive(self, work: Work, offers: int) -> None:
        """Take note of how many offers earlier runs have left to the next one."""
        _keep(self._left, work.delivery.sequence, offers)

    def is_deadly(self, work: Work) -> bool:
        """Whether a request was offered too often to runs that are not known to have been unharmed by it."""
        sequence = work.delivery.sequence
        return work.attempt - self._survived.get(sequence, 0) - self._left.get(sequence, 0) > OFFERS_MAX


def _keep(counts: OrderedDict[int, int], sequence: int, number: int) -> None:
    counts[sequence] = number
    counts.move_to_end(sequence)
    if len(counts) > KNOWN_MAX:
        counts.popitem(last=False)
