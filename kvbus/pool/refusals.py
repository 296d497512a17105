"""How the lender says no: argument faults raise before anything changes, refusals are values with numbers."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import LeaseFailure
from kvbus.names import NAME_LENGTH_BYTES
from kvbus.pool.allocator import PageStatistics

ORDINAL_MAX: Final = (1 << 32) - 1
"""Bounds travel as u32."""

_BOOLS: Final = {bool, np.bool_}
_BYTES: Final = {bytes}
_LENGTH: Final = {NAME_LENGTH_BYTES}


def over_cap(pages: int, lent_cap_pages: int, state: PageStatistics) -> LeaseFailure:
    """Return the refusal of a lease that would take pages which the engine's longest prompt needs (P26)."""
    return LeaseFailure(
        FailureClass.LEASE_REFUSED,
        f"{pages} more pages asked for, but {state.claimed} of at most {lent_cap_pages} are lent, retained, "
        f"quarantined ({state.quarantined}) or bound by fences ({state.bound}): the rest of the pool's {state.pages} "
        "is the engine's",
    )


def no_room(pages: int, room: int, state: PageStatistics) -> LeaseFailure:
    """Return the refusal of a lease for which the pool has too few pages that may be taken."""
    text = (
        f"{pages} pages asked for, {room} can be had: of {state.pages}, {state.free} are free, "
        f"{state.idle} may be evicted, {state.writing} are being written, {state.pinned} pinned, "
        f"{state.quarantined} quarantined"
    )
    if state.bound:
        text += f"; {state.bound} may only take content of the salt that a fenced reader was lent"
    return LeaseFailure(FailureClass.LEASE_REFUSED, text)


def not_whole(asked: int, held: int) -> LeaseFailure:
    """Return the refusal of a read that wanted all pages or none."""
    return LeaseFailure(
        FailureClass.LEASE_REFUSED, f"{asked} pages asked for as a whole, only the first {held} are held"
    )


def require_names(names: Sequence[bytes]) -> None:
    """Raise TypeError or ValueError unless these are page names, each once."""
    if others := set(map(type, names)) - _BYTES:
        raise TypeError(f"a page name is a {others.pop().__name__}, expected bytes")
    if lengths := set(map(len, names)) - _LENGTH:
        raise ValueError(f"a page name has {lengths.pop()} bytes, expected {NAME_LENGTH_BYTES}")
    if len(set(names)) != len(names):
        raise ValueError("a page name stands twice in one lease: send each block once")


def require_ordinals(ordinals: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless these are block positions in ascending order."""
    before = -1
    for ordinal in ordinals:
        if type(ordinal) is not int:
            raise TypeError(f"an ordinal is a {type(ordinal).__name__}, expected int")
        if not before < ordinal <= ORDINAL_MAX:
            raise ValueError(f"ordinal {ordinal} after {before}, expected ascending numbers in 0…{ORDINAL_MAX}")
        before = ordinal


def require_pages(pages: Sequence[int], page_count: int) -> None:
    """Raise ValueError unless these are indexes of pages in the pool."""
    for page in pages:
        if type(page) is not int or not 0 <= page < page_count:
            raise ValueError(f"page {page!r} is outside the pool of {page_count} pages")


def require_mask(arrived: object, rows: int) -> tuple[bool, ...]:
    """Return the mask as plain bools; TypeError or ValueError unless it holds one bool for each row (contract 14)."""
    mask = arrived if type(arrived) is tuple else _rows_of(arrived)
    if not set(map(type, mask)) <= _BOOLS:
        raise TypeError("the mask holds something else than bool: send one bool for each row")
    if len(mask) != rows:
        raise ValueError(f"the mask has {len(mask)} rows, the lease {rows}: send one bool for each")
    return tuple(map(bool, mask))


def _rows_of(arrived: object) -> Sequence[object]:
    """Return the rows of a mask that is no tuple; TypeError for what is no mask at all."""
    if isinstance(arrived, np.ndarray):
        if arrived.dtype != np.bool_ or arrived.ndim != 1:
            raise TypeError(f"the mask is a {arrived.ndim}-dimensional array of {arrived.dtype}, expected bool")
        rows: list[object] = arrived.tolist()
        return rows
    if isinstance(arrived, str | bytes) or not isinstance(arrived, Sequence):
        raise TypeError(f"the mask is a {type(arrived).__name__}, expected a sequence of bool")
    return arrived
