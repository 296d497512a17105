"""The staging lender: for engines that keep their cache to themselves, and copy blocks through slots of host memory.

    request's block ──copy_out──▶ slot ──lent for reading──▶ peers
    peers ──lent for writing──▶ slot ──copy_in──▶ request's block

There are fewer slots than blocks, so leases wait for them, first come, first served: whoever stands first is granted
first, whatever would fit behind it, so that no large lease starves. A lease without rows needs no slot and does not
wait. One that needs more slots than are left for good fails instead of standing in the way of all others.

When a request is freed, its blocks are somebody else's: leases that wait for it fail, reads go on since they read
slots, and what is written into slots is copied nowhere.

A copy that raises may still be under way: its slot is lost for the life of the lender, and counted. A lease whose
blocks cannot be copied out fails; where what arrived cannot be copied in, the release raises, so that nobody takes it
for content (contract 7). One thread owns a lender; copies are made in its calls, which cost what is copied.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import Direction, LeaseFailure, LeaseView
from kvbus.pool.lease import PoolLease
from kvbus.pool.memory import PoolMemory
from kvbus.pool.refusals import require_names, require_ordinals

WAITING_MAX: Final = 1_024
"""Leases in line: what 30 transfers a second ask for in a budget of 30 s; who stood behind them would wait in vain."""

SlotBytes = NDArray[np.uint8]
Copy = Callable[[str, int, SlotBytes], None]


class BlockCache(Protocol):
    """An engine's own cache. A copy has ended when its call returns; if that raises, it may be under way for ever."""

    def copy_out(self, request: str, ordinal: int, slot: SlotBytes) -> None:
        """Copy a block of a request into a slot."""

    def copy_in(self, request: str, ordinal: int, slot: SlotBytes) -> None:
        """Copy a slot into a block of a request."""


@dataclass(slots=True)
class _Request:
    name: str
    is_freed: bool = False
    is_written: bool = False


@dataclass(slots=True)
class _Staged:
    """One lease with what it asked for; `slots` once it is granted."""

    lease: PoolLease
    request: _Request
    names: tuple[bytes, ...]
    ordinals: tuple[int, ...]
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StagingStatistics:
    """Slots by what becomes of them, and leases; `unmarked` slots belong to writes that were released unmarked."""

    slots: int
    free: int
    lent: int
    unmarked: int
    lost: int
    waiting: int
    requests: int


class StagingLender:
    """Lends blocks of open requests through the pages of `memory`, which are its slots."""

    def __init__(self, memory: PoolMemory, cache: BlockCache, *, name: str) -> None:
        self._memory = memory
        self._cache = cache
        self._name = name
        self._free = list(range(memory.page_count - 1, -1, -1))
        self._requests: dict[str, _Request] = {}
        self._line: deque[_Staged] = deque()
        self._out: dict[int, _Staged] = {}
        self._unmarked: dict[int, _Staged] = {}
        self._lost: set[int] = set()
        self._changed: dict[int, None] = {}
        self._last_id = 0

    def __repr__(self) -> str:
        return f"<StagingLender {self._name} free={len(self._free)} waiting={len(self._line)} lost={len(self._lost)}>"

    @property
    def name(self) -> str:
        """The lender's name, as facts carry it."""
        return self._name

    @property
    def rank(self) -> int:
        """The rank whose blocks these are."""
        return self._memory.layout.rank

    # --- requests ---

    def open_request(self, request: str) -> None:
        """Let blocks of a request be lent from now on; ValueError where it is open."""
        if request in self._requests:
            raise ValueError(f"request {request!r} is open already")
        self._requests[request] = _Request(request)

    def free_request(self, request: str) -> None:
        """The request's blocks are its own no more: what waits for it fails, and nothing is copied into it again."""
        known = self._requests.pop(request, None)
        if known is None:
            raise ValueError(f"request {request!r} is not open")
        known.is_freed = True
        for staged in [one for one in self._line if one.request is known]:
            self._line.remove(staged)
            self._refuse(staged, f"request {request!r} was freed while its lease waited")
        for staged in (*self._out.values(), *self._unmarked.values()):
            if staged.request is known:
                staged.lease.forget()  # what a write brings is nothing that anybody could resume from

    # --- lending ---

    def lend_read(self, request: str, names: Sequence[bytes], ordinals: Sequence[int]) -> PoolLease:
        """Lend these blocks of a request for reading, once there are slots for them."""
        return self._enter(Direction.READ, request, names, ordinals)

    def lend_write(self, request: str, names: Sequence[bytes], ordinals: Sequence[int]) -> PoolLease:
        """Lend slots to be filled with these blocks of a request; one such lease a request at a time (contract 23)."""
        return self._enter(Direction.WRITE, request, names, ordinals)

    def progress(self) -> Sequence[int]:
        """Grant those who stand first while there are slots, and name the leases that changed since the last call."""
        while self._line:
            staged = self._line[0]
            left = self._memory.page_count - len(self._lost)
            if len(staged.ordinals) > left:
                self._line.popleft()
                self._let_go(staged)
                self._refuse(staged, f"{len(staged.ordinals)} slots asked for, only {left} are left for good")
            elif len(staged.ordinals) <= len(self._free):
                self._line.popleft()
                self._grant(staged)
            else:
                break
        changed = tuple(self._changed)
        self._changed.clear()
        return changed

    # --- for leases ---

    def give_back(self, lease: PoolLease) -> None:
        """Take the slots of a lease that is being released; only `PoolLease.release` calls this."""
        self._changed.pop(lease.lease_id, None)
        staged = self._out.pop(lease.lease_id, None)
        if staged is None:
            for waiting in [one for one in self._line if one.lease is lease]:
                self._line.remove(waiting)
                self._let_go(waiting)
        elif lease.direction is Direction.READ or not lease.viewed or not staged.slots:
            self._let_go(staged)
        elif lease.arrived is None:
            self._unmarked[lease.lease_id] = staged
        else:
            self._commit(staged)

    def resolve(self, lease: PoolLease) -> None:
        """Take the slots of a lease that was marked after its release; only `mark_arrived` calls this."""
        if staged := self._unmarked.pop(lease.lease_id, None):
            self._commit(staged)

    def raise_fence(self, lease: PoolLease) -> LeaseFailure:
        """Refuse: slots are used again too soon to keep a frozen reader's salt apart."""
        text = f"lease {lease.lease_id} is on slots, which serve any salt next: they are not fenced"
        return LeaseFailure(FailureClass.LEASE_REFUSED, text)

    # --- seen from outside ---

    def statistics(self) -> StagingStatistics:
        """Return the counts of this moment; O(leases)."""
        return StagingStatistics(
            slots=self._memory.page_count,
            free=len(self._free),
            lent=sum(len(staged.slots) for staged in self._out.values()),
            unmarked=sum(len(staged.slots) for staged in self._unmarked.values()),
            lost=len(self._lost),
            waiting=len(self._line),
            requests=len(self._requests),
        )

    def check(self) -> None:
        """Raise LedgerContradictionError unless each slot is in exactly one place; O(slots)."""
        owned = [slot for one in (*self._out.values(), *self._unmarked.values()) for slot in one.slots]
        places = sorted([*self._free, *(slot for slot in owned if slot not in self._lost), *self._lost])
        if places != list(range(self._memory.page_count)):
            raise LedgerContradictionError("slots are lost, or in two places", places=places)
        self._memory.generations.check()

    # --- inside a step ---

    def _enter(self, direction: Direction, request: str, names: Sequence[bytes], ordinals: Sequence[int]) -> PoolLease:
        require_ordinals(ordinals)
        require_names(names)
        if len(names) != len(ordinals):
            raise ValueError(f"{len(names)} names for {len(ordinals)} ordinals: send one for each row")
        if len(ordinals) > self._memory.page_count:
            raise ValueError(f"{len(ordinals)} rows asked for, there are {self._memory.page_count} slots")
        known = self._requests.get(request)
        self._last_id += 1
        first = ordinals[0] if ordinals else 0
        lease = PoolLease(self, self._last_id, direction, None, first_ordinal=first)
        staged = _Staged(lease, known or _Request(request, is_freed=True), tuple(names), tuple(ordinals))
        if refusal := self._refusal(direction, known):
            self._refuse(staged, refusal)
            return lease
        staged.request.is_written |= direction is Direction.WRITE
        if ordinals:
            self._line.append(staged)
        else:
            self._grant(staged)
        return lease

    def _refusal(self, direction: Direction, request: _Request | None) -> str:
        if request is None:
            return "the request is not open"
        if direction is Direction.WRITE and request.is_written:
            return f"request {request.name!r} is being written already: wait until that lease has come back"
        return f"{WAITING_MAX} leases wait already" if len(self._line) >= WAITING_MAX else ""

    def _grant(self, staged: _Staged) -> None:
        lease, memory = staged.lease, self._memory
        slots = staged.slots = tuple(self._free.pop() for _ in staged.ordinals)
        counters = memory.generations.raise_pages(slots)
        self._out[lease.lease_id] = staged
        if lease.direction is Direction.READ:
            if error := self._copy(self._cache.copy_out, staged, slots):
                self._refuse(staged, f"its blocks could not be copied out: {error!r}")
                del self._out[lease.lease_id]
                self._let_go(staged)
                return
            counters = memory.generations.seal_pages(slots)
        view = LeaseView(memory.fingerprint, self.rank, memory.epoch, staged.ordinals, staged.names, slots, counters)
        lease.decide(view)
        self._changed[lease.lease_id] = None

    def _commit(self, staged: _Staged) -> None:
        """Copy what arrived to where it belongs, unless that belongs to somebody else by now (contract 17, 21)."""
        arrived = staged.lease.arrived or ()
        whole = tuple(slot for slot, is_whole in zip(staged.slots, arrived, strict=True) if is_whole)
        error = None if staged.request.is_freed else self._copy(self._cache.copy_in, staged, whole)
        self._let_go(staged)
        if error is not None:
            raise error

    def _copy(self, copy: Copy, staged: _Staged, slots: Sequence[int]) -> Exception | None:
        """Copy block by block up to the first that raises: its slot is lost, and its error is returned."""
        place = dict(zip(staged.slots, staged.ordinals, strict=True))
        for slot in slots:
            try:
                copy(staged.request.name, place[slot], self._memory.page_bytes(slot))
            except Exception as error:  # noqa: BLE001 - the engine's code: it may touch the slot still
                self._lost.add(slot)
                return error
        return None

    def _let_go(self, staged: _Staged) -> None:
        self._free.extend(slot for slot in reversed(staged.slots) if slot not in self._lost)
        staged.slots = ()
        if staged.lease.direction is Direction.WRITE:
            staged.request.is_written = False

    def _refuse(self, staged: _Staged, text: str) -> None:
        staged.lease.decide(LeaseFailure(FailureClass.LEASE_REFUSED, text))
        self._changed[staged.lease.lease_id] = None
