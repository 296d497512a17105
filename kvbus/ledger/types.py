"""What the holder needs from lenders and backends: two narrow protocols that never block and never read a clock.

The protocols live with their consumer; pools, transports and third parties implement them. What is made for every
lease is a named tuple: nobody can change it, and it costs a third of a frozen dataclass to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvbus.ledger.facts import Evidence, FailureClass


class Direction(IntEnum):
    """What a lease allows: READ lends content out, WRITE lets content in."""

    READ = 1
    WRITE = 2


class Urgency(IntEnum):
    """Whether somebody waits for the lease (URGENT) or it only makes room (RECLAIM)."""

    URGENT = 1
    RECLAIM = 2


class Containment(IntEnum):
    """What an uncertain submission stops: the whole binding, or only the peer that it concerned (R14)."""

    STOP_BINDING = 1
    ISOLATE_PEER = 2


class LeaseView(NamedTuple):
    """The pages of a ready lease, one column per field, row by row; handed to a backend unchanged (R3).

    `ordinals` are block positions in the prompt, `pages` page indexes in the pool `pool` (its fingerprint), `counters`
    the page generations' counters at hand-over (even for READ: sealed; odd for WRITE: being written), `epoch` the
    lending member's. All tuples have equal length.
    """

    pool: str
    rank: int
    epoch: int
    ordinals: tuple[int, ...]
    names: tuple[bytes, ...]
    pages: tuple[int, ...]
    counters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeaseFailure:
    """Why a lender cannot grant a lease: a value, since refusals are ordinary."""

    failure: FailureClass
    text: str


class Lease(Protocol):
    """One lent range of pages. Failure is final; release is legal in every state, once is enough (contract 12–15)."""

    @property
    def lease_id(self) -> int:
        """A number unique within its lender."""

    @property
    def direction(self) -> Direction:
        """What the lease allows."""

    @property
    def rank(self) -> int:
        """Which rank's pages it lends."""

    @property
    def lender(self) -> "Lender":
        """Who lent it, and takes it back."""

    @property
    def failure(self) -> LeaseFailure | None:
        """Why it cannot be granted, once that is known."""

    def poll(self) -> LeaseView | None:
        """Return the same view each time once granted; None while waiting and for ever after failure."""

    def mark_arrived(self, arrived: Sequence[bool]) -> None:
        """Say which rows hold whole content; write leases only, once, after the view was seen, before release."""

    def bounds(self, arrived: Sequence[bool]) -> tuple[int, int]:
        """Return (restart floor, usable until) in blocks if exactly these rows arrive; changes nothing."""

    def release(self) -> None:
        """Give the pages back: arrived rows become content, other marked rows free pages.

        A write lease whose view was seen and that was not marked keeps its pages out of use until it is (contract 18).
        """


class Lender(Protocol):
    """Owns pages and grants leases on them. Only the holder's `advance` calls `progress`."""

    @property
    def name(self) -> str:
        """A name for facts and texts."""

    def progress(self) -> Sequence[int]:
        """Grant or fail what can be granted or failed now; return the ids of the leases that changed.

        Asked after anything changed here, and at each tick of the worker.
        """


class Delivered(NamedTuple):
    """The attempt ended: rows with True hold whole, verified content; `failure` says why others are missing."""

    arrived: tuple[bool, ...]
    length_bytes: int
    failure: FailureClass = FailureClass.NONE


class Failed(NamedTuple):
    """The attempt ended without any row that counts."""

    failure: FailureClass
    text: str


class Cancelled(NamedTuple):
    """The attempt was stopped on request; rows with True arrived whole before that."""

    arrived: tuple[bool, ...]
    length_bytes: int


Result = Delivered | Failed | Cancelled


class Order(NamedTuple):
    """What a backend is asked to do: the lease's view, unchanged, and a hint that only the backend understands."""

    ticket: int
    attempt: int
    view: LeaseView
    direction: Direction
    hint: object
    peer: str
    timeout_s: float | None


class Change(NamedTuple):
    """What a backend reports of an attempt: a result, access-end evidence, or both. Each names ticket and attempt.

    A result says nothing about memory; only `evidence` does. The last two are for the pages' lender to know, and decide
    nothing here: `differing` are rows that came with other bytes than their digests, `changed` counts those that were
    rewritten while they were read.
    """

    ticket: int
    attempt: int
    result: Result | None = None
    evidence: Evidence | None = None
    text: str = ""
    differing: tuple[int, ...] = ()
    changed: int = 0


class SubmissionRejectedError(Exception):
    """Raised by `Backend.submit` only if nothing escaped: no message, no address, no memory access (contract 32)."""

    def __init__(self, failure: FailureClass, text: str) -> None:
        super().__init__(text)
        self.failure = failure
        self.text = text


class Backend(Protocol):
    """Moves bytes for leases. It has one wake signal, given at assembly, raised after it listed what changed (R9)."""

    @property
    def name(self) -> str:
        """A name for facts and texts."""

    def submit(self, order: Order) -> None:
        """Start an attempt without blocking; once anything escaped, failure comes through `changes`."""

    def changes(self) -> Sequence[Change]:
        """Return and forget what changed since the last call, oldest first."""

    def cancel(self, ticket: int, attempt: int) -> None:
        """Ask an attempt to stop; a request, never evidence (contract 39)."""

    def isolate(self, peer: str) -> None:
        """End what runs with a peer, and refuse new work for it; evidence follows through `changes`."""

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """Stop taking work and end what can be ended; return the (ticket, attempt) pairs still without evidence."""

    def release_hold(self) -> None:
        """Deregister and let the memory go; called once, after nothing is retained (contract 55)."""


@dataclass(frozen=True, slots=True)
class SubmitMode:
    """How one kind of lease is submitted; built once per kind and shared by all of them (R3)."""

    binding: str
    direction: Direction
    urgency: Urgency = Urgency.URGENT
    reuse: bool = True
