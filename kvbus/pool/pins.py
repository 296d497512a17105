"""Pin sets: pages kept from eviction between leases, for as long as one transfer or one engine request needs them.

A hit is pinned from planning on (P10), and pages that a prefill computed for a peer come back pinned (P9): without
that, room made for another prompt could take them before the read lease is asked for.
"""

from collections.abc import Sequence
from typing import Protocol

from kvbus.errors import LedgerContradictionError


class PinKeeper(Protocol):
    """What a pin set needs from its lender."""

    def pages_held(self, names: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest prefix of the names that is held."""

    def add_pins(self, pages: Sequence[int], *, for_peer: bool) -> None:
        """Add one pin to each page."""

    def drop_pins(self, pins: "PinSet") -> None:
        """Take back every pin of a set, and forget the set."""


class PinSet:
    """Pages that one purpose keeps from eviction; each at most once. Made by `PoolLender.pin_set`, ended by `drop`.

    A set made for a peer counts toward the lender's cap (P26), but is itself never refused: ask before you pin, as
    `PoolSide.kept` does, or before the work whose result it will pin (`PoolLender.refusal`).
    """

    def __init__(self, keeper: PinKeeper, set_id: int, *, for_peer: bool) -> None:
        self._keeper = keeper
        self._set_id = set_id
        self._for_peer = for_peer
        self._pages: dict[int, None] = {}
        self._dropped = False

    def __repr__(self) -> str:
        return f"<PinSet {self._set_id} pages={len(self._pages)}{' dropped' if self._dropped else ''}>"

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def set_id(self) -> int:
        """A number unique within its lender."""
        return self._set_id

    @property
    def for_peer(self) -> bool:
        """Whether the pins count toward the lender's cap."""
        return self._for_peer

    @property
    def dropped(self) -> bool:
        """Whether `drop` was called: the set pins nothing any more."""
        return self._dropped

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages that the set pins, in the order in which they came."""
        return tuple(self._pages)

    def pin(self, names: Sequence[bytes]) -> int:
        """Pin the longest prefix of the names that is held, and return its length in pages."""
        if self._dropped:
            raise LedgerContradictionError("a dropped pin set is used again", pins=self._set_id)
        pages = self._keeper.pages_held(names)
        self.add(pages)
        return len(pages)

    def add(self, pages: Sequence[int]) -> None:
        """Pin cached pages, each once; does nothing after `drop`: a lease may be returned after its purpose went."""
        if self._dropped:
            return
        fresh = [page for page in pages if page not in self._pages]
        self._keeper.add_pins(fresh, for_peer=self._for_peer)
        self._pages.update(dict.fromkeys(fresh))

    def drop(self) -> None:
        """Unpin all pages; a second call does nothing."""
        if self._dropped:
            return
        self._dropped = True
        self._keeper.drop_pins(self)
        self._pages.clear()
