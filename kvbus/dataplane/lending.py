"""The source's side of a read: what was lent to whom, and by which evidence that reader's access has ended.

The source cannot see a one-sided read, cannot revoke it, and has no connection whose end would prove anything. So a
lent lease ends only by the reader's own word (with the nonce of its grant), by the proven death of the reader's
process, or because the grant never left. No time, cancel or isolation ends one.

A reader that is isolated, and took its grant on the terms that it looks at generations after reading, may be fenced on
request (P5): its lease goes back, and it stays known here until it speaks or is proved dead.
"""

import hmac
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbus.dataplane.reader import ATTEMPTS_MAX, Isolation, Pair
from kvbus.events import ProcessIdentity, ReaderKey
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Delivered, Direction, Failed, Order, Result, SubmissionRejectedError

TOMBSTONES_MAX = 65_536
"""Closed keys remembered: a minute at 1,000 transfers a second, while a reader repeats its word only until the first
confirmation, seconds later. About 30 MB at the most."""
LENT_MAX = 4 * ATTEMPTS_MAX
"""Leases lent at once: four readers each with all the attempts that a reader may have."""


@dataclass(frozen=True, slots=True)
class Reader:
    """The hint of a lent lease's order: exactly one reader in one epoch, fixed before the grant leaves (P4).

    `nonce` is the grant's; only who had the grant can send it back. `checked` is the grant's word on its terms.
    With a `secret` the page server serves the lease to whoever proves to know it; `by_socket_only`: there is no other
    way to the pages, so that closing it there ends the access.
    """

    key: ReaderKey
    nonce: bytes
    identity: ProcessIdentity | None = None
    checked: bool = False
    secret: bytes = b""
    by_socket_only: bool = False


@dataclass(frozen=True, slots=True)
class LendingStatistics:
    """Counters of the source's side; a refused word named an unknown key or came with a wrong nonce."""

    lent: int
    tombstones: int
    acknowledged: int
    repeated: int
    refused: int
    died: int
    withdrawn: int
    fenced: int


@dataclass(frozen=True, slots=True)
class Lent:
    """One lease that is lent, and its reader."""

    pair: Pair
    reader: Reader
    rows: int


class LendingBackend:
    """Waits for evidence that readers have let go; a `Backend` that moves nothing and starts no thread.

    All methods belong to one thread. `wake` is raised after a change was listed.
    """

    def __init__(self, *, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lent: dict[ReaderKey, Lent] = {}
        self._fenced: dict[ReaderKey, Lent] = {}
        self._tombstones: OrderedDict[ReaderKey, bytes] = OrderedDict()
        self._changes: list[Change] = []
        self._isolation = Isolation()
        self._is_shut = False
        self._acknowledged = self._repeated = self._refused = self._died = self._withdrawn = 0

    def __repr__(self) -> str:
        return f"<LendingBackend lent={len(self._lent)} tombstones={len(self._tombstones)}>"

    @property
    def name(self) -> str:
        """The binding's name; what carries the bytes is the reader's choice."""
        return "lending"

    def submit(self, order: Order) -> None:
        """Mark the lease as possibly accessed, before its address can leave; SubmissionRejectedError otherwise.

        A key serves one lease once: after its reader has let go, nothing is lent under it again (P18).
        """
        reader = order.hint
        if not isinstance(reader, Reader) or order.direction is not Direction.READ:
            text = f"expected a read lease with a Reader as hint, got {order.direction.name}, {type(reader).__name__}"
            raise SubmissionRejectedError(FailureClass.GRANT_REFUSED, text)
        if self._is_shut:
            raise SubmissionRejectedError(FailureClass.SHUTDOWN, "lending is shut down")
        if self._isolation.refuses(order.peer, reader.key.epoch):
            raise SubmissionRejectedError(FailureClass.PEER_LOST, f"{order.peer} is isolated in this epoch")
        if reader.key in self._lent or reader.key in self._fenced or reader.key in self._tombstones:
            text = f"attempt {reader.key.attempt} of transfer {reader.key.transfer} was lent to before; use a new one"
            raise SubmissionRejectedError(FailureClass.LEASE_REFUSED, text)
        if len(self._lent) + len(self._fenced) >= LENT_MAX:
            raise SubmissionRejectedError(
                FailureClass.LEASE_REFUSED, f"{LENT_MAX} leases are lent; wait for one to end"
            )
        self._lent[reader.key] = Lent((order.ticket, order.attempt), reader, len(order.view.pages))

    def acknowledge(self, key: ReaderKey, nonce: bytes) -> bool:
        """Take a reader's word that its access has ended; True for its repeats too, False if it proves nothing.

        A word of another epoch is another key: it never speaks for an earlier process of that reader (P4).
        """
        lent = self._lent.get(key) or self._fenced.get(key)
        expected = lent.reader.nonce if lent else self._tombstones.get(key)
        if expected is None or not hmac.compare_digest(expected, nonce):
            self._refused += 1
            return False
        if lent is None:
            self._repeated += 1
            return True
        self._acknowledged += 1
        if self._fenced.pop(key, None):  # its lease went back before
            self._remember(lent)
            return True
        # What the reader made of the bytes is its own to say; lent were all rows, and the source saw none of them go.
        self._end(lent, Delivered((True,) * lent.rows, 0), Evidence.PEER_ACK)
        return True

    def withdraw(self, ticket: int) -> bool:
        """End a lease whose grant never left this process; False if it is not lent. The caller vouches for that."""
        found = [lent for lent in self._lent.values() if lent.pair[0] == ticket]
        for lent in found:
            self._withdrawn += 1
            self._end(lent, Failed(FailureClass.CANCELLED, "the grant never left"), Evidence.NEVER_SUBMITTED)
        return bool(found)

    def reader_died(self, instance: str, member: str, epoch: int) -> int:
        """End all leases of a process that is proved dead; return how many. Its other epochs are other processes."""
        who = (instance, member, epoch)
        found = [lent for key, lent in self._lent.items() if (key.instance, key.member, key.epoch) == who]
        for lent in found:
            self._died += 1
            text = f"{instance}/{member} has died"
            self._end(lent, Failed(FailureClass.PEER_LOST, text), Evidence.PROCESS_DEAD)
        for key in [key for key in self._fenced if (key.instance, key.member, key.epoch) == who]:
            self._died += 1
            self._remember(self._fenced.pop(key))
        return len(found)

    def isolate_epoch(self, peer: str, epoch: int) -> None:
        """Lend nothing more to one process of a peer; what it holds stays lent."""
        self._isolation.isolate_epoch(peer, epoch)

    def fence_refusal(self, ticket: int, attempt: int) -> str:
        """Return why the reader of an attempt must not be fenced, or "": it has to be isolated, and to look (P5)."""
        lent = self._find(ticket, attempt)
        if lent is None:
            return "nothing is lent under it"
        key = lent.reader.key
        if not lent.reader.checked:
            return f"{key.instance}/{key.member} did not take its grant on the terms that it looks after reading"
        if not self._isolation.refuses(key.instance, key.epoch):
            return f"{key.instance}/{key.member} is not isolated in epoch {key.epoch}"
        return ""

    def fenced(self, ticket: int, attempt: int) -> None:
        """Note that an attempt was fenced; its reader's last word, or death, is still taken note of."""
        if lent := self._find(ticket, attempt):
            self._fenced[lent.reader.key] = self._lent.pop(lent.reader.key)

    def readers(self) -> Sequence[Reader]:
        """Return who may be reading now."""
        return tuple(lent.reader for lent in self._lent.values())

    def changes(self) -> Sequence[Change]:
        """Return and forget what changed since the last call, oldest first."""
        changes, self._changes = self._changes, []
        return changes

    def cancel(self, ticket: int, attempt: int) -> None:
        """Do nothing: only the reader can stop reading, and the caller asks it over the bus."""

    def isolate(self, peer: str) -> None:
        """Lend nothing more to that peer in the epochs seen so far; what it holds stays lent."""
        self._isolation.isolate(peer)

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:  # noqa: ARG002 - waiting ends nothing here
        """Lend nothing more; return what may still be read, fenced readers included. May be called again, never waits.

        A fenced reader delivers nothing, but its reads need memory that is mapped.
        """
        self._is_shut = True
        return tuple(lent.pair for lent in (*self._lent.values(), *self._fenced.values()))

    def release_hold(self) -> None:
        """Do nothing: the memory is the pool's."""

    def statistics(self) -> LendingStatistics:
        """Return the counters as they stand."""
        return LendingStatistics(
            lent=len(self._lent),
            tombstones=len(self._tombstones),
            acknowledged=self._acknowledged,
            repeated=self._repeated,
            refused=self._refused,
            died=self._died,
            withdrawn=self._withdrawn,
            fenced=len(self._fenced),
        )

    def _find(self, ticket: int, attempt: int) -> Lent | None:
        return next((lent for lent in self._lent.values() if lent.pair == (ticket, attempt)), None)

    def _remember(self, lent: Lent) -> None:
        self._tombstones[lent.reader.key] = lent.reader.nonce
        if len(self._tombstones) > TOMBSTONES_MAX:
            self._tombstones.popitem(last=False)

    def _end(self, lent: Lent, result: Result, evidence: Evidence) -> None:
        del self._lent[lent.reader.key]
        self._remember(lent)
        ticket, attempt = lent.pair
        self._changes.append(Change(ticket, attempt, result, evidence))
        self._wake()
