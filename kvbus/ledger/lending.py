"""The lender's book: which reader has been lent what, so that a repeated question never lends twice (P18).

A key (instance, member, epoch, transfer, attempt, rank) has one entry from the first question until the reader says
that its access has ended; after that a tombstone keeps a late repeat of the question from lending again.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

UNCLAIMED_S = 60.0
"""How long the book keeps a refusal that nobody comes back for: twice a transfer's default budget. It holds no page."""
TOMBSTONES_MAX = 65_536
"""At 1,000 transfers a second this remembers a minute; a question older than its own budget (30 s by default) is not
asked again, so a tombstone that falls out here is one that nobody will miss."""

Key = tuple[str, str, int, str, int, int]


class LendState(StrEnum):
    """Where a key stands."""

    COMPUTING = "computing"
    GRANTED = "granted"
    CLOSED = "closed"
    FENCED = "fenced"
    """Its lease went back although the reader has not said that its access has ended (P5)."""


@dataclass(slots=True)
class LendEntry:
    """One key's lease: its ticket at the holder, its number at the lender, and the sealed grant to repeat."""

    state: LendState
    nonce: bytes
    asked_at: float
    ticket: int = 0
    lease_id: int = 0
    grant: bytes = b""
    signature: bytes = b""
    refusal: tuple[str, str] | None = None


class LendBook:
    """Entries by reader key; bounded by `entries_max`, beyond which new readers are refused."""

    def __init__(self, *, entries_max: int) -> None:
        self._entries_max = entries_max
        self._entries: dict[Key, LendEntry] = {}
        self._closed: OrderedDict[Key, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key) -> LendEntry | None:
        """Return the open entry of a key."""
        return self._entries.get(key)

    def is_closed(self, key: Key, nonce: bytes) -> bool:
        """Return True where the reader, known by its nonce, has already said that its access has ended."""
        return self._closed.get(key) == nonce

    def sweep(self, now: float) -> None:
        """Forget refusals that nobody came back for; they hold no pages."""
        for key in [
            key for key, entry in self._entries.items() if entry.refusal and now - entry.asked_at > UNCLAIMED_S
        ]:
            del self._entries[key]

    def is_full(self) -> bool:
        """Return True where no further reader can be taken."""
        return len(self._entries) >= self._entries_max

    def open(self, key: Key, nonce: bytes, *, now: float) -> LendEntry:
        """Start the entry of a key that has none; ValueError where it has one, is closed, or the book is full."""
        if key in self._entries or self._closed.get(key) == nonce:
            raise ValueError(f"key {key} has been opened before")
        if self.is_full():
            raise ValueError(f"the book is full: {len(self._entries)} readers, ask `is_full` first")
        entry = LendEntry(LendState.COMPUTING, nonce, now)
        self._entries[key] = entry
        return entry

    def grant(self, key: Key, *, ticket: int, grant: bytes, signature: bytes, lease_id: int = 0) -> None:
        """Note what was lent; repeats of the question get exactly this."""
        entry = self._entries[key]
        entry.lease_id = lease_id
        entry.state, entry.ticket, entry.grant, entry.signature = LendState.GRANTED, ticket, grant, signature

    def fence(self, key: Key) -> None:
        """Note that a granted key's lease went back before its reader; the entry stays until that one is heard of."""
        self._entries[key].state = LendState.FENCED

    def forget(self, key: Key) -> None:
        """Drop an entry that came to nothing (refused): the same key may ask again."""
        self._entries.pop(key, None)

    def close(self, key: Key, nonce: bytes) -> LendEntry | None:
        """Close a key for good and return its entry, if it had one; repeats return None and change nothing.

        A key that was never opened is closed too: the word that access has ended may overtake the question (P18).
        """
        if key not in self._closed:
            self._closed[key] = nonce
            if len(self._closed) > TOMBSTONES_MAX:
                self._closed.popitem(last=False)
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.state = LendState.CLOSED
        return entry

    def keys_of(self, instance: str, member: str, epoch: int) -> list[Key]:
        """Return the open keys of one reader process."""
        return [key for key in self._entries if key[:3] == (instance, member, epoch)]
