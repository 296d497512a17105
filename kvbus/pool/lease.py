"""A lease on pages: granted or refused once and for all, ended only by `release` (contract 12–19).

The lease keeps what was said about it; the pages change hands in `kvbus.pool.lender`, in one step each.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.types import Direction, LeaseFailure, LeaseView, Lender
from kvbus.pool.pins import PinSet
from kvbus.pool.refusals import require_mask, require_names


class LeaseKeeper(Lender, Protocol):
    """What a lease needs from its lender."""

    @property
    def rank(self) -> int:
        """The rank whose pages the lender owns."""

    def give_back(self, lease: "PoolLease") -> None:
        """Take the pages of a lease that is being released."""

    def resolve(self, lease: "PoolLease") -> None:
        """Take the pages of a lease that was released unmarked, now that its rows are known."""

    def raise_fence(self, lease: "PoolLease") -> LeaseFailure | None:
        """Raise the generations of a read lease's pages, or say why that cannot be."""


class PoolLease:
    """One lent range of pages in place; its lender owns it and every reference to it may be dropped (contract 9).

    Bounds are in blocks of the prompt. Blocks before the first ordinal, between the lease's ordinals, and after the
    last one up to `prompt_blocks` are assumed to be held: the caller leases exactly what is missing, and keeps what it
    holds pinned (`PinSet`) until it has used it.
    """

    def __init__(
        self,
        keeper: LeaseKeeper,
        lease_id: int,
        direction: Direction,
        granted: LeaseView | LeaseFailure | None,
        *,
        first_ordinal: int = 0,
        prompt_blocks: int = 0,
        pins: PinSet | None = None,
        for_peer: bool = True,
    ) -> None:
        self.lease_id: Final = lease_id
        """A number unique within its lender."""
        self.direction: Final = direction
        """Whether the pages are lent out for reading, or lent for writing."""
        self.pins: Final = pins
        """The set that pins the content which this lease brings."""
        self.for_peer: Final = for_peer
        """Whether the lease counts toward the lender's cap (P26)."""
        self.failure: LeaseFailure | None = None
        """Why nothing was lent; final, and such a lease changed nothing (contract 13)."""
        self.pages: tuple[int, ...] = ()
        """The pages lent, row by row; none for a failed lease."""
        self.names: tuple[bytes, ...] = ()
        """The rows' names; empty bytes for rows that are not named yet."""
        self.viewed = False
        """Whether `poll` gave the pages out: from then on they may be accessed."""
        self.released = False
        """Whether `release` was called."""
        self.arrived: tuple[bool, ...] | None = None
        """What `mark_arrived` said, or None before."""
        self.fenced = False
        """Whether the reader may still read although the lease goes back (P5)."""
        self.forgotten = False
        """Whether all names were forgotten while the lease was out: what a write brings is no content then."""
        self.lender: Final[Lender] = keeper
        """Who lent the pages, and takes them back."""
        self._keeper = keeper
        self._first_ordinal = first_ordinal
        self._prompt_blocks = prompt_blocks
        self._view: LeaseView | None = None
        if granted is not None:
            self.decide(granted)

    def __repr__(self) -> str:
        state = "failed" if self.failure else "released" if self.released else "lent" if self._view else "waiting"
        return f"<PoolLease {self.lease_id} {self.direction.name} pages={len(self.pages)} {state}>"

    @property
    def rank(self) -> int:
        """The rank whose pages these are."""
        return self._keeper.rank

    @property
    def counters(self) -> tuple[int, ...]:
        """The generation counters at hand-over, row by row."""
        return self._view.counters if self._view else ()

    def poll(self) -> LeaseView | None:
        """Return the same view each time; None while waiting, and for ever once failed; a contradiction if released."""
        if self.released:
            raise LedgerContradictionError("a released lease is polled", lease=self.lease_id)
        if self._view is not None:
            self.viewed = True
        return self._view

    def decide(self, granted: LeaseView | LeaseFailure) -> None:
        """Grant or refuse a lease that was made waiting; once, and only its lender calls this."""
        if self._view is not None or self.failure is not None or self.released:
            raise LedgerContradictionError("a lease is decided twice, or after its release", lease=self.lease_id)
        if isinstance(granted, LeaseView):
            self._view, self.pages, self.names = granted, granted.pages, granted.names
        else:
            self.failure = granted

    def name_rows(self, names: Sequence[bytes]) -> None:
        """Name the rows of a write lease that was lent unnamed; once, before it is marked.

        An engine that generates knows a block's name only when the block is full. The view is unchanged.
        """
        if any(self.names) or self.arrived is not None or not self.pages:
            raise LedgerContradictionError("only an unnamed, unmarked lease can be named", lease=self.lease_id)
        require_names(names)
        if len(names) != len(self.pages):
            raise ValueError(f"{len(names)} names for {len(self.pages)} rows: name each row")
        self.names = tuple(names)

    def mark_arrived(self, arrived: Sequence[bool]) -> None:
        """Say which rows hold whole content: write leases only, once, after the view was seen.

        Also the only way out of quarantine for a lease that was released unmarked: mark it when access has ended. A
        wrong mask raises TypeError or ValueError and records nothing; a mark out of turn is a contradiction.
        """
        problem = self._mark_problem()
        if problem:
            raise LedgerContradictionError(problem, lease=self.lease_id)
        self.arrived = require_mask(arrived, len(self.pages))
        if self.released:
            self._keeper.resolve(self)

    def bounds(self, arrived: Sequence[bool]) -> tuple[int, int]:
        """Return (restart floor, usable until) in blocks if exactly these rows arrive; changes nothing.

        The floor is the first ordinal: what lies before it was there before this lease, and no resume goes behind it
        (contract 27). Usable is every block before the first row that did not arrive (contract 28: full attention needs
        each block), or the whole prompt as far as it is held.
        """
        mask = require_mask(arrived, len(self.pages))
        if self.forgotten:
            mask = (False,) * len(mask)
        if self._view is None:
            return self._first_ordinal, self._first_ordinal
        ordinals = self._view.ordinals
        if not ordinals:
            return self._prompt_blocks, self._prompt_blocks
        for ordinal, whole in zip(ordinals, mask, strict=True):
            if not whole:
                return ordinals[0], ordinal
        return ordinals[0], max(self._prompt_blocks, ordinals[-1] + 1)

    def forget(self) -> None:
        """Note that all names were forgotten; only the lender calls this (contract 24)."""
        self.forgotten = True

    def fence(self) -> LeaseFailure | None:
        """Keep the reader of a read lease from delivering what it reads from now on, or say why that cannot be (P5).

        The caller has isolated that reader, and releases the lease next; `PoolLender.lift` ends the fence.
        """
        failure = self._keeper.raise_fence(self)
        self.fenced = failure is None
        return failure

    def release(self) -> None:
        """Give the pages back; legal in every state, and only the first call does anything (contract 15).

        Read: the pins go. Write: rows marked as arrived become content, other rows free pages. If the view was seen and
        no mark was made, nobody knows what the pages hold or who still writes them: they stay in quarantine (contract
        18) until `mark_arrived`. If the view was never seen, all pages become free (contract 19).
        """
        if self.released:
            return
        self.released = True
        self._keeper.give_back(self)

    def _mark_problem(self) -> str | None:
        if self.direction is not Direction.WRITE:
            return "a read lease is marked"
        if not self.viewed:
            return "a lease is marked whose view nobody saw"
        if self.arrived is not None:
            return "a lease is marked twice"
        return None
