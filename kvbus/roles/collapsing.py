"""Collapsing: makes queued facts smaller by leaving out what later ones of the same leases contain.

Fact bits only turn on, and each line says all of a lease that is known by then, so the newest line of a ticket is worth
all before it. Nothing moves: what is left keeps its place, its number and its time.
"""

from collections.abc import Sequence

from kvbus.columns import column, from_column
from kvbus.events import FactsSeen, decode, encode


def newest_lines(events: Sequence[bytes]) -> list[bytes | None]:
    """Return these `facts` events with the newest line of each ticket only; None for one of which nothing is left.

    Failures beside the columns are kept, all of them: each is said once.
    """
    seen: set[int] = set()
    left: list[bytes | None] = []
    for data in reversed(events):
        event = decode(data)
        body = event.body
        if not isinstance(body, FactsSeen):
            raise TypeError(f"{event.header.k} is no event of facts")
        tickets = from_column(body.ticket, 8)
        last = {ticket: place for place, ticket in enumerate(tickets) if ticket not in seen}
        seen.update(last)
        places = sorted(last.values())
        if len(places) == len(tickets):
            left.append(data)
        elif places or body.details:
            left.append(encode(event.header, _of_lines(body, places)))
        else:
            left.append(None)
    return left[::-1]


def _of_lines(body: FactsSeen, places: Sequence[int]) -> FactsSeen:
    def some(values: Sequence[int]) -> list[int]:
        return [values[place] for place in places]

    columns = {
        "ticket": column(some(from_column(body.ticket, 8)), 8),
        "rank": column(some(from_column(body.rank, 2)), 2),
        "bits": column(some(from_column(body.bits, 4)), 4),
        "lo": column(some(from_column(body.lo, 4)), 4),
        "hi": column(some(from_column(body.hi, 4)), 4),
    }
    return body.model_copy(update={"n": len(places), **columns})
