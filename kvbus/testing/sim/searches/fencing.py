"""The pool's lender, the holder and the source's backend while readers are fenced: who may be, and what follows (P5).

The simulated world fences nobody, since it would take a person. Here somebody asks for it all the time: of readers that
are isolated or not, that look at generations or not, and of two tenants whose content waits for the same pages.
"""

import random
from dataclasses import dataclass

from kvbus.dataplane.lending import LendingBackend, Reader
from kvbus.errors import KvbusError
from kvbus.events import ReaderKey
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Fact
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Direction, SubmitMode
from kvbus.pool.layout import PageLayout
from kvbus.pool.lease import PoolLease
from kvbus.pool.lender import lender_over
from kvbus.pool.memory import PoolMemory
from kvbus.testing.sim.searches.found import BrokenPromiseError, Found, broken, require

STEPS = 300
PAGES, ROWS = 10, 3
READERS_MAX = 6
SALTS = ("one", "two")
NONCE = bytes(16)
SERVE = SubmitMode("lending", Direction.READ)
LAYOUT = PageLayout("toy", 1, 1, 4, 16, "uint8", 0, 1, "ab")


@dataclass(slots=True)
class _Lent:
    """One reader: what it was lent, on which terms, and what became of that."""

    key: ReaderKey
    salt: str
    lease: PoolLease
    pages: tuple[int, ...]
    looks: bool
    isolated: bool = False
    fenced: bool = False


class _Search:
    def __init__(self, seed: int) -> None:
        self.step = 0
        self.memory = PoolMemory.create(LAYOUT, PAGES, 1 << 32 | 5)
        self._random = random.Random(f"{seed}:fencing")
        self._lender = lender_over(self.memory, name="pool", engine_reserve_pages=0)
        self._backend = LendingBackend(wake=lambda: None)
        self._holder = LeaseHolder(bindings=[Binding("lending", self._backend, Direction.READ)], lenders=[self._lender])
        self._readers: dict[int, _Lent] = {}
        self._written: dict[str, list[tuple[bytes, ...]]] = {salt: [] for salt in SALTS}
        self._number = 0

    def run(self) -> None:
        moves = (self._write, self._write, self._lend, self._lend, self._isolate, self._fence, self._fence, self._end)
        for self.step in range(1, STEPS + 1):
            self._random.choice(moves)()
            self._round()
            self._lender.check()
            self._holder.check()

    def _round(self) -> None:
        self._holder.collect()
        self._holder.advance()
        self._holder.finish()

    def _write(self) -> None:
        """Bring new content of one tenant in; no reader of the other may be left that could fetch it."""
        salt = self._random.choice(SALTS)
        self._number += 1
        names = tuple((self._number * 10 + row).to_bytes(16, "little") for row in range(ROWS))
        lease = self._lender.lend_write(names, range(ROWS), for_peer=False, salt=salt)
        for page in lease.pages:
            self._check_readers(page, salt)
        if lease.poll() is not None:
            lease.mark_arrived((True,) * ROWS)
            self._written[salt].append(names)
        lease.release()

    def _check_readers(self, page: int, salt: str) -> None:
        for ticket, lent in self._readers.items():
            if page in lent.pages and not lent.fenced:
                broken(f"page {page} is written, and T{ticket} lends it to a reader")
            if page in lent.pages and lent.salt != salt:
                broken(f"page {page} takes content of {salt!r}, and a fenced reader of {lent.salt!r} may read it")

    def _lend(self) -> None:
        salt = self._random.choice(SALTS)
        if not self._written[salt] or len(self._readers) >= READERS_MAX:
            return
        lease = self._lender.lend_read(self._random.choice(self._written[salt][-4:]))
        if not lease.pages:
            lease.release()
            return
        self._number += 1
        key = ReaderKey(instance="b", member="m0", epoch=self._number, transfer="t", attempt=1, rank=0)
        looks = self._random.random() < 0.7
        ticket = self._holder.take(lease, SERVE, Reader(key, NONCE, checked=looks), now=0.0, peer="b")
        self._readers[ticket] = _Lent(key, salt, lease, lease.pages, looks)

    def _any(self) -> int | None:
        return self._random.choice(sorted(self._readers)) if self._readers else None

    def _isolate(self) -> None:
        if (ticket := self._any()) is not None:
            lent = self._readers[ticket]
            lent.isolated = True
            self._backend.isolate_epoch(lent.key.instance, lent.key.epoch)

    def _fence(self) -> None:
        ticket = self._any()
        if ticket is None or self._readers[ticket].fenced or self._holder.fence(ticket, "it stays silent"):
            return
        lent = self._readers[ticket]
        require(lent.isolated, f"T{ticket} was fenced, and its reader was not isolated")
        require(lent.looks, f"T{ticket} was fenced, and its reader does not look at generations")
        require(
            not self._holder.bits(ticket) & Fact.ACCESS_ENDED, f"T{ticket} was fenced: access is said to have ended"
        )
        lent.fenced = True

    def _end(self) -> None:
        """Hear the last word of a reader, also of one that was fenced."""
        if (ticket := self._any()) is not None:
            lent = self._readers.pop(ticket)
            require(self._backend.acknowledge(lent.key, NONCE), f"the word of the reader of T{ticket} is not taken")
            if lent.fenced:
                self._lender.lift(lent.lease.lease_id)


def search(seed: int) -> Found | None:
    """Take some hundred steps from a seed; return the first that was wrong."""
    one = _Search(seed)
    try:
        one.run()
    except (BrokenPromiseError, KvbusError) as error:
        return Found(str(error), one.step)
    finally:
        one.memory.close()
    return None
