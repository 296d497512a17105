"""Which pages of which pools are lent, and the last generation counter of each, as `lease_granted` events tell.

A pool is known by the run of its member and by its lender's name; another epoch has another pool.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbus.commands.leases import LeaseKey, LeaseLife
from kvbus.events import Event


@dataclass(frozen=True, slots=True)
class Clash:
    """What is wrong with a page of a grant; `lent`: it is lent already, by `other`."""

    text: str
    lent: bool
    other: LeaseKey | None = None
    other_event: Event | None = None


@dataclass(slots=True)
class _Page:
    """One page: who has it now (True: for writing), and who had it last, with which counter."""

    lent: dict[LeaseKey, bool] = field(default_factory=dict)
    counter: int = 0
    last: LeaseKey | None = None


_PageKey = tuple[str, str, int, str, int]


class PageBook:
    """Takes grants and returns; `lend` tells what a grant contradicts."""

    def __init__(self) -> None:
        self._pages: dict[_PageKey, _Page] = {}
        self._leases: dict[LeaseKey, tuple[Event, list[_Page]]] = {}

    def lend(self, event: Event, life: LeaseLife) -> list[Clash]:
        """Take a grant in; return the first page that is lent already, and the first with a wrong counter, if any."""
        grant = life.granted
        if grant is None or life.key in self._leases:
            return []
        key, writes = life.key, grant.direction == "write"
        numbers, counters = life.pages, life.counters
        pages = [
            self._pages.setdefault((key.instance, key.member, key.epoch, grant.lender, number), _Page())
            for number in numbers
        ]
        self._leases[key] = event, pages
        found: dict[bool, Clash] = {}
        if len(numbers) != len(counters):
            text = f"{key} has {len(numbers)} pages and {len(counters)} counters"
            found[False] = Clash(text, lent=False)
        for number, page, counter in zip(numbers, pages, counters, strict=False):
            for clash in self._clashes(key, number, page, counter, writes=writes):
                found.setdefault(clash.lent, clash)
            page.lent[key] = writes
            page.counter, page.last = max(page.counter, counter), key
        return list(found.values())

    def give_back(self, key: LeaseKey) -> None:
        """Take a return in; the pages of a lease that was never granted are nobody's."""
        _, pages = self._leases.get(key, (None, []))
        for page in pages:
            page.lent.pop(key, None)

    def _clashes(self, key: LeaseKey, number: int, page: _Page, counter: int, *, writes: bool) -> Iterator[Clash]:
        word = "writing" if writes else "reading"
        for other, is_written in page.lent.items():
            if writes or is_written:
                what = "writing" if is_written else "reading"
                event = self._leases[other][0]
                since = event.header.event_id
                text = f"{key} gets page {number} for {word}, which {other} has for {what} since event {since}"
                yield Clash(text, lent=True, other=other, other_event=event)
        if counter % 2 != writes or not counter:
            yield Clash(f"{key} gets page {number} for {word} in generation {counter}", lent=False)
        last = page.last
        fresh = counter > page.counter or (counter == page.counter and not writes)
        if last is not None and not fresh:
            event = self._leases[last][0]
            text = f"{key} gets page {number} for {word} in generation {counter}, "
            text += f"after {last} had it in generation {page.counter} (event {event.header.event_id})"
            yield Clash(text, lent=False, other=last, other_event=event)
