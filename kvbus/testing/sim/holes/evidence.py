"""Holes of evidence: who may say that access has ended, and of what (P4, P5, P7, P8)."""

# ruff: noqa: SLF001, ANN401 - what takes a rule out sits inside of what it spoils, and hands on what it does not use

from collections.abc import Sequence
from typing import Any

from kvbus.dataplane.lending import LendingBackend
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Delivered, Failed
from kvbus.pool.fences import Fences
from kvbus.pool.memory import PoolMemory
from kvbus.testing.sim.assembly import Builder
from kvbus.testing.sim.holes.hole import Hole, Patch, taken_out
from kvbus.testing.sim.holes.script import Script

A, B = 1, 2
OTHERS = range(10, 15)
"""Five long prompts: as many pages as the pool has."""
SEEN_MAX = 12
"""Rounds after which the planted timer takes a lease back: seconds, as a busy member counts them."""


# ---------------------------------------------------------------------------------------------------------------- P4


async def _two_readers(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    gets = s.stall("i2", "_half")
    slow, quick = s.ask("i2", "i0", A), s.ask("i1", "i0", A)
    await s.stalled(gets)
    first = await s.outcome(quick)
    s.staged(first.outcome == "settled", f"i1 should have read all: {first.reason}")
    await s.until("i0 has the word of i1", lambda: s.lent("i0") < 2)
    s.say("i1 has said that its access has ended; i2 still reads the same pages")
    s.require(s.lent("i0") == 1, "the word of i1 ended the lease of i2")
    s.fill("i0", OTHERS)
    await s.pause(2.0)
    s.check()
    gets.open()
    second = await s.outcome(slow)
    s.require(second.outcome == "settled", f"i2 lost its pages: {second.reason}")
    await s.rest()


def _first_word_frees() -> Sequence[Patch]:
    """Let the first reader's word end everybody's leases."""
    acknowledge = LendingBackend.acknowledge

    def for_all(self: LendingBackend, key: Any, nonce: bytes) -> bool:
        known = acknowledge(self, key, nonce)
        for lent in list(self._lent.values()) if known else ():
            self._end(lent, Delivered((True,) * lent.rows, 0), Evidence.PEER_ACK)
        return known

    return [(LendingBackend, "acknowledge", for_all)]


async def _next_epoch_vouches(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    gets = s.stall("i1", "_half")
    s.ask("i1", "i0", A)
    await s.stalled(gets)
    before = s.freeze("i1")
    before.bus.cut = True
    await s.successor("i1")
    again = await s.outcome(s.ask("i1", "i0", A))
    s.staged(again.outcome == "settled", f"the successor should have read all: {again.reason}")
    await s.until("i0 has the word of the successor", lambda: s.lent("i0") < 2)
    s.say("the successor has said that its access has ended; its frozen predecessor may still read")
    s.require(s.lent("i0") == 1, "the word of the next epoch ended the lease of the one before")
    s.thaw(before)
    gets.open()
    await s.pause(1.0)
    before.kill()
    await s.rest()


def _any_epochs_word() -> Sequence[Patch]:
    """Let a member's word stand for every epoch of it."""
    acknowledge = LendingBackend.acknowledge

    def of_the_member(self: LendingBackend, key: Any, nonce: bytes) -> bool:
        known = acknowledge(self, key, nonce)
        for lent in list(self._lent.values()) if known else ():
            if lent.reader.key.instance == key.instance:
                self._end(lent, Delivered((True,) * lent.rows, 0), Evidence.PEER_ACK)
        return known

    return [(LendingBackend, "acknowledge", of_the_member)]


# ---------------------------------------------------------------------------------------------------------------- P5


async def _frozen_past_its_deadline(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    gets = s.stall("i1", "_half")
    request = s.ask("i1", "i0", A, budget_s=2.0)
    await s.stalled(gets)
    reader = s.freeze("i1")
    gets.open()
    await s.pause(40.0)
    s.say("the budget of 2 s was spent long ago")
    s.require(s.lent("i0") == 1, "the deadline freed what a frozen reader may still read")
    s.fill("i0", OTHERS)
    await s.pause(5.0)
    s.check()
    s.thaw(reader)
    await s.outcome(request)
    await s.rest()


def _lease_with_a_limit() -> Sequence[Patch]:
    """Take a lent lease back after a while, whatever its reader does."""
    changes = LendingBackend.changes
    seen: dict[Any, int] = {}

    def with_a_limit(self: LendingBackend) -> Any:
        for reader in self.readers():
            seen[reader.key] = seen.get(reader.key, 0) + 1
            if seen[reader.key] > SEEN_MAX:
                self.acknowledge(reader.key, reader.nonce)
        return changes(self)

    return [(LendingBackend, "changes", with_a_limit)]


async def _fenced_and_reused(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    gets = s.stall("i1", "_half")
    request = s.ask("i1", "i0", A, budget_s=60.0)
    await s.stalled(gets)
    reader, epoch = s.freeze("i1"), s.parts("i1").epoch
    fenced = s.parts("i0").source.fence("i1", "m0", epoch, "somebody says that its host has no power")
    s.staged(len(fenced.tickets) == 1 and not s.parts("i0").rounds.holder.tickets(), f"not fenced: {fenced.refused}")
    s.say("i0 has fenced the reader and taken its pages back; another tenant's prompts, then one of the same")
    s.fill("i0", OTHERS, salt="another tenant")
    await s.pause(2.0)
    s.compute("i0", B)
    await s.pause(2.0)
    s.staged(s.held("i0", B) > 0, "the pages should have taken content of the same salt")
    s.thaw(reader)
    gets.open()
    outcome = await s.outcome(request)
    s.require(outcome.pages_moved == 0, f"a fenced reader delivered {outcome.pages_moved} pages")
    await s.rest()


def _for_any_salt() -> Sequence[Patch]:
    """Let anything be written into what a fenced reader may still read."""
    return [(Fences, "barred", lambda _self, _salt: [])]


# ---------------------------------------------------------------------------------------------------------------- P7


async def _closed_over_mapped_memory(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    gets = s.stall("i1", "_half")
    request = s.ask("i1", "i0", A)
    await s.stalled(gets)
    source = s.member("i0")
    s.town.quit(source)
    await s.until("i0 has shut its lending", lambda: source.parts is None or source.parts.lending._is_shut)
    s.say("i0 has closed all that it has; i1 has its pool mapped, and reads on")
    s.check()
    gets.open()
    outcome = await s.outcome(request)
    s.require(outcome.outcome == "settled", f"what was read from the mapping does not count: {outcome.reason}")
    await s.restarted("i0")
    await s.rest()


def _closing_is_evidence() -> Sequence[Patch]:
    """Take the source's own close as the end of its readers' access."""
    shutdown = LendingBackend.shutdown

    def closed(self: LendingBackend, budget_s: float) -> Any:
        for lent in list(self._lent.values()):
            self._end(lent, Failed(FailureClass.SHUTDOWN, "closed"), Evidence.ENDPOINT_DESTROYED)
        return shutdown(self, budget_s)

    return [(LendingBackend, "shutdown", closed)]


# ---------------------------------------------------------------------------------------------------------------- P8


async def _successor_of_a_stopped_worker(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    await s.cached("i0", B)
    gets = s.stall("i1", "_half")
    s.ask("i1", "i0", A)
    await s.stalled(gets)
    before = s.freeze("i1")
    before.bus.cut = True
    await s.successor("i1")
    outcome = await s.outcome(s.ask("i1", "i0", B))
    s.staged(outcome.outcome == "settled", f"the successor should have read B: {outcome.reason}")
    s.thaw(before)
    gets.open()
    await s.until(
        "a get of the stopped worker lands", lambda: before.parts is None or before.parts.reader.pages_read > 0
    )
    s.say("a get of the stopped worker has landed")
    s.check()
    await s.pause(1.0)
    before.kill()
    await s.rest()


def _pool_is_adopted() -> Sequence[Patch]:
    """Give a successor the pool of the worker before it, whether that has ended or not."""
    build, create = Builder._pool, PoolMemory.create
    pools: dict[str, PoolMemory] = {}
    builds: list[str] = []

    def of_an_instance(self: Builder) -> Any:
        builds.append(self._place.instance)
        return build(self)

    def adopted(_class: type[PoolMemory], *args: Any) -> PoolMemory:
        if builds[-1] not in pools:
            pools[builds[-1]] = create(*args)
        return pools[builds[-1]]

    return [(Builder, "_pool", of_an_instance), (PoolMemory, "create", classmethod(adopted))]


HOLES = (
    Hole(
        "P4",
        "two members read, one has said that its access has ended",
        "each reader needed its own evidence: the slow one kept its pages",
        _two_readers,
        taken_out(_first_word_frees),
        "is said to have ended, and it is being read",
        instances=3,
    ),
    Hole(
        "P4",
        "a new epoch says that access has ended, the old one still reads",
        "the word of the new epoch ended only its own lease",
        _next_epoch_vouches,
        taken_out(_any_epochs_word),
        "is said to have ended, and it is being read",
    ),
    Hole(
        "P5",
        "the deadline passes while the reader is frozen",
        "nothing was freed by time: the pages stayed lent until the reader went on",
        _frozen_past_its_deadline,
        taken_out(_lease_with_a_limit),
        "is said to have ended, and it is being read",
    ),
    Hole(
        "P5",
        "a reader that was fenced by name reads on, and its pages are used again",
        "its pages took content of its own salt only, and it delivered nothing",
        _fenced_and_reused,
        taken_out(_for_any_salt),
        "takes content of another salt",
    ),
    Hole(
        "P7",
        "the source closes while a reader has its pool mapped",
        "closing proved nothing: the pages stayed lent, and what was read from the mapping counted",
        _closed_over_mapped_memory,
        taken_out(_closing_is_evidence),
        "was given back with a read of it under way",
    ),
    Hole(
        "P8",
        "a worker is stopped, its successor starts, the worker goes on",
        "the successor had a pool of its own: the old gets landed in the old one",
        _successor_of_a_stopped_worker,
        taken_out(_pool_is_adopted),
        "wrong bytes",
    ),
)
