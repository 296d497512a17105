"""How the lender says no: argument faults raise before anything changes, refusals are values with numbers."""

from collections.abc import Sequence
from operator import lt
from typing import Final

import numpy as np

from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import LeaseFailure
from kvbus.names import NAME_LENGTH_BYTES
from kvbus.pool.allocator import PageStatistics

ORDINAL_MAX: Final = (1 << 32) - 1
"""Bounds travel as u32."""

_BOOL: Final = {bool}
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
    if set(map(type, names)) <= _BYTES and set(map(len, names)) <= _LENGTH and len(set(names)) == len(names):
        return  # the slow words below say what is wrong with others
    for kind in set(map(type, names)) - {bytes}:
        raise TypeError(f"a page name is a {kind.__name__}, expected bytes")
    for length in set(map(len, names)) - {NAME_LENGTH_BYTES}:
        raise ValueError(f"a page name has {length} bytes, expected {NAME_LENGTH_BYTES}")
    if len(set(names)) != len(names):
        raise ValueError("a page name stands twice in one lease: send each block once")


def require_ordinals(ordinals: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless these are block positions in ascending order."""
    ascends = set(map(type, ordinals)) <= {int} and all(map(lt, ordinals, ordinals[1:]))
    if ascends and (not ordinals or 0 <= ordinals[0] <= ordinals[-1] <= ORDINAL_MAX):
        return  # the slow words below say what is wrong with others
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
    if type(arrived) is tuple and set(map(type, arrived)) <= _BOOL and len(arrived) == rows:
        return arrived  # the slow words below take other kinds, and say what is wrong
    if isinstance(arrived, np.ndarray):
        if arrived.dtype != np.bool_ or arrived.ndim != 1:
            raise TypeError(f"the mask is a {arrived.ndim}-dimensional array of {arrived.dtype}, expected bool")
    elif isinstance(arrived, str | bytes) or not isinstance(arrived, Sequence):
        raise TypeError(f"the mask is a {type(arrived).__name__}, expected a sequence of bool")
    elif not set(map(type, arrived)) <= {bool, np.bool_}:
        raise TypeError("the mask holds something else than bool: send one bool for each row")
    if len(arrived) != rows:
        raise ValueError(f"the mask has {len(arrived)} rows, the lease {rows}: send one bool for each")
    return tuple(map(bool, arrived))
