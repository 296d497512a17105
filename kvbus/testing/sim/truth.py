"""What is really so: which process lives, who really touches which page, what each page should hold.

Members know of each other what messages and pidfds tell. The simulator knows more, and here is where it keeps it: every
read and write under way, by process and page. Whoever takes a page back, or lends it anew, is held against that.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvbus.ledger.types import Direction, LeaseFailure
from kvbus.parts import ProcessIdentity
from kvbus.pool.lease import PoolLease
from kvbus.pool.lender import PoolLender
from kvbus.pool.memory import PoolMemory
from kvbus.pool.pins import PinSet
from kvbus.processes import ProcessWatch, identity
from kvbus.testing.sim.loop import Actor, SimLoop
from kvbus.testing.sim.trail import Trail

DEATH_SEEN_MAX_S = 0.2
DEATH_SEEN_LATE_MAX_S = 5.0
"""How late a pidfd's news may come, mostly and at times: the next epoch's readers may be there before."""
DEAD_KEPT_MAX = 8
"""Pools of dead processes that stay mapped by readers; older ones are closed."""


@dataclass(slots=True, eq=False)
class SimProcess:
    """One process, its pool if it has one, and who waits to hear of its death."""

    identity: ProcessIdentity
    name: str
    alive: bool = True
    memory: PoolMemory | None = None
    lender_fails: bool = False
    """Whether its lender fails at the next return."""
    lender_failed: bool = False
    failed_returns: set[int] = field(default_factory=set)
    """Leases whose return failed."""
    holds: Callable[[int], object] = lambda _ticket: False
    """Whether its holder holds that ticket."""
    readers: dict[int, int] = field(default_factory=dict)
    """By page, how many reads of it are under way."""
    writers: dict[int, int] = field(default_factory=dict)
    """By page, how many writes."""
    lease_readers: dict[int, int] = field(default_factory=dict)
    """By ticket, how many attempts read what it lends."""
    fenced: set[int] = field(default_factory=set)
    """Tickets that went back although their reader may still read: it delivers nothing (P5)."""
    fences: dict[int, dict[int, str]] = field(default_factory=dict)
    """By fenced lease, the pages that its reader may still read, and of which salt they were lent."""
    watchers: list[tuple[Actor, Callable[[], object]]] = field(default_factory=list)


class Truth:
    """The world as it is."""

    def __init__(self, loop: SimLoop, seed: str, trail: Trail) -> None:
        self.loop = loop
        self.trail = trail
        self._random = random.Random(f"{seed}:processes")
        self._processes: dict[int, SimProcess] = {}
        self._dead: list[SimProcess] = []
        self._host = identity()
        self._next_pid = self._ticks = 1_000

    # ----------------------------------------------------------------------------------------------------- processes

    def start(self, name: str, *, pid: int | None = None) -> SimProcess:
        """Start a process of this host, under a fresh pid unless one that was used before is given."""
        self._next_pid += pid is None
        self._ticks += 1
        pid = pid or self._next_pid
        who = self._host.model_copy(update={"pid": pid, "start_ticks": self._ticks})
        process = self._processes[pid] = SimProcess(who, name)
        return process

    def find(self, who: ProcessIdentity) -> SimProcess | None:
        """Return a process, dead ones included while their memory is kept."""
        process = self._processes.get(who.pid)
        return process if process is not None and process.identity.start_ticks == who.start_ticks else None

    def has_died(self, who: ProcessIdentity) -> bool:
        """Return whether a process of this host has ended, as anybody here can see."""
        process = self.find(who)
        return process is None or not process.alive

    def end(self, process: SimProcess) -> None:
        """Let a process end; whoever watches it hears of that a little later."""
        process.alive = False
        for actor, on_death in process.watchers:
            late = self._random.random() < 0.3
            delay_s = self._random.random() * (DEATH_SEEN_LATE_MAX_S if late else DEATH_SEEN_MAX_S)
            self.loop.post(actor, on_death, delay_s=delay_s)
        process.watchers.clear()
        self._dead.append(process)
        if len(self._dead) > DEAD_KEPT_MAX:
            oldest = self._dead.pop(0)
            if self._processes[oldest.identity.pid] is oldest:
                del self._processes[oldest.identity.pid]
            if oldest.memory is not None and not oldest.readers:
                oldest.memory.close()

    def take_place(self, before: SimProcess, after: SimProcess) -> None:
        """Let what was one process's memory be another's: a next run may lie under the same addresses."""
        known = self._processes[before.identity.pid]
        known.memory, known.alive, known.holds = after.memory, True, lambda _ticket: True

    def close(self) -> None:
        """Unmap every pool."""
        for process in (*self._processes.values(), *self._dead):
            if process.memory is not None:
                process.memory.close()


def begin_access(counts: dict[int, int], touched: Iterable[int]) -> None:
    """Somebody may touch these pages, or what these tickets lend, from now on."""
    for one in touched:
        counts[one] = counts.get(one, 0) + 1


def end_access(counts: dict[int, int], touched: Iterable[int]) -> None:
    """Somebody touches these no more; of what nobody touches no count is kept."""
    for one in touched:
        left = counts.pop(one) - 1
        if left:
            counts[one] = left


class SimWatch(ProcessWatch):
    """A process watch over simulated processes, on behalf of one actor."""

    def __init__(self, truth: Truth, actor: Actor) -> None:
        super().__init__(truth.loop)
        self._truth = truth
        self._actor = actor

    def watch(self, other: ProcessIdentity, on_death: Callable[[], object]) -> bool:
        """See `ProcessWatch`: False for a process that has ended already."""
        process = self._truth.find(other)
        if process is None or not process.alive:
            return False
        process.watchers.append((self._actor, on_death))
        return True


class WatchedLender(PoolLender):
    """The real lender, each of whose steps is held against the truth."""

    truth: Truth
    process: SimProcess

    def give_back(self, lease: PoolLease) -> None:
        """See `PoolLender`; nobody may be touching what comes back. It fails where it is told to."""
        if lease.lease_id in self.process.failed_returns:
            text = f"the return of lease {lease.lease_id} failed, and it is tried again"
            self.truth.trail.violate(self.process.name, text)
        if self.process.lender_fails and lease.pages:
            self.process.lender_fails, self.process.lender_failed = False, True
            self.process.failed_returns.add(lease.lease_id)
            self.truth.trail.note("world", f"the lender of {self.process.name} fails")
            raise OSError("the pool's table cannot be written")
        super().give_back(lease)
        if lease.direction is Direction.READ:
            if not lease.fenced:
                self._check_read(lease.pages)
        else:
            self._check_written(lease.pages, f"lease {lease.lease_id} was given back")

    def lend_write(
        self,
        names: Sequence[bytes] | None,
        ordinals: Sequence[int],
        *,
        pins: PinSet | None = None,
        prompt_blocks: int = 0,
        for_peer: bool = True,
        salt: str | None = None,
    ) -> PoolLease:
        """See `PoolLender`; nobody may be touching a page that is lent for writing."""
        lease = super().lend_write(
            names, ordinals, pins=pins, prompt_blocks=prompt_blocks, for_peer=for_peer, salt=salt
        )
        if readers := self.process.readers:
            for page in lease.pages:
                if reads := readers.get(page):
                    self._check_reused(page, reads, salt)
        self._check_written(lease.pages, "it is lent for writing")
        self._check_cap(lease)
        return lease

    def raise_fence(self, lease: PoolLease) -> LeaseFailure | None:
        """See `PoolLender`; what is lent to whom is remembered, since the reader may read on."""
        salts = {page: self._fences._salts.get(page, "") for page in lease.pages}  # noqa: SLF001 - nobody else asks
        failure = super().raise_fence(lease)
        if failure is None:
            self.process.fences[lease.lease_id] = salts
        return failure

    def lift(self, lease_id: int) -> bool:
        """See `PoolLender`."""
        self.process.fences.pop(lease_id, None)
        return super().lift(lease_id)

    def lend_read(
        self, names: Sequence[bytes], first_ordinal: int = 0, *, whole: bool = False, for_peer: bool = True
    ) -> PoolLease:
        """See `PoolLender`; what peers take up stays under the cap."""
        lease = super().lend_read(names, first_ordinal, whole=whole, for_peer=for_peer)
        self._check_cap(lease)
        return lease

    def _check_reused(self, page: int, reads: int, salt: str | None) -> None:
        """A page that is being read is lent for writing: by fenced readers only, and content of their salt (P5)."""
        salts = [fence[page] for fence in self.process.fences.values() if page in fence]
        text = ""
        if len(salts) < reads:
            text = f"page {page} is lent for writing while {reads} reads of it are under way"
        elif any(one != salt for one in salts):
            text = f"page {page} takes content of another salt, and a fenced reader may still read it"
        if text:
            self.truth.trail.violate(self.process.name, text, f"p{page}")

    def _check_cap(self, lease: PoolLease) -> None:
        """What is lent to peers leaves the engine its longest prompt (P26)."""
        claimed = self._allocator.claimed
        if claimed > self._lent_cap_pages and lease.for_peer and lease.pages:
            text = f"{claimed} pages are lent to peers, at most {self._lent_cap_pages} may be"
            self.truth.trail.violate(self.process.name, text)

    def _check_read(self, pages: Sequence[int]) -> None:
        readers = self.process.readers
        for page in pages if readers else ():
            if readers.get(page, 0) > self._allocator.pins(page):
                text = f"page {page} was given back with a read of it under way"
                self.truth.trail.violate(self.process.name, text, f"p{page}")

    def _check_written(self, pages: Sequence[int], why: str) -> None:
        writers = self.process.writers
        for page in pages if writers else ():
            if page in writers:
                self.truth.trail.violate(self.process.name, f"page {page} is being written while {why}", f"p{page}")
