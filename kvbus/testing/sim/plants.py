"""Planted faults: small changes to the real roles, ledger and pool, one at a time, that the simulator has to catch.

Each is a mistake that somebody could make with a line or two. `planted(name)` makes it for as long as its block runs.
"""

# ruff: noqa: SLF001, ANN401 - a fault sits inside of what it spoils, and hands on what it does not look at

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvbus.dataplane.lending import LendingBackend
from kvbus.dataplane.reader import Outbox
from kvbus.ledger.admission import AdmissionGate
from kvbus.ledger.agreement import Agreement
from kvbus.ledger.facts import RESULT_BITS, Evidence, Fact
from kvbus.ledger.held import Held
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.lending import LendBook
from kvbus.ledger.transfer import CloseKey, Transfer
from kvbus.pool.allocator import PageAllocator
from kvbus.pool.generations import Generations
from kvbus.pool.lease import PoolLease
from kvbus.roles.asking import Asker
from kvbus.roles.destination import Destination

Change = tuple[type, str, Any]
"""A class, the name of one of its attributes, and what stands there instead."""

Plant = Callable[[], Sequence[Change]]


def _result_is_access_end() -> Sequence[Change]:
    """Take a fixed result as proof that nobody touches the memory any more."""

    def end_access_if_proved(self: Held) -> None:
        if self.closed:
            self.bits |= int(Fact.ACCESS_ENDED | Fact.EVIDENCE_COMPLETED)

    return [(Held, "end_access_if_proved", end_access_if_proved)]


def _free_when_abandoned() -> Sequence[Change]:
    """Give an abandoned lease back at once: free on deadline."""
    abandon = LeaseHolder.abandon

    def at_once(self: LeaseHolder, ticket: int, failure: Any, text: str) -> None:
        abandon(self, ticket, failure, text)
        held = self._held[ticket]
        if held.attempt_open:
            held.binding.open_attempts -= 1
            held.end_attempt(Evidence.COMPLETED)

    return [(LeaseHolder, "abandon", at_once)]


def _settle_is_enough() -> Sequence[Change]:
    """Return a write as soon as it is settled, without access end."""
    settled = int(Fact.SETTLED)

    def without_evidence(self: Agreement, transfer: str, opened: Any) -> Any:
        if not all(report.bits & RESULT_BITS for report in opened.reports.values()):
            return None
        self._close(transfer)
        return self._decision("settle", transfer, opened.parties)

    returnable = property(lambda self: bool(self.bits & (settled | int(Fact.ACCESS_ENDED))))
    return [(Agreement, "_settle_if_complete", without_evidence), (Held, "returnable", returnable)]


def _close_key_at_stop() -> Sequence[Change]:
    """Tell the source that access has ended when the stop is asked for, not when access has ended."""
    stop = Transfer._stop

    def too_early(self: Transfer, *args: Any) -> Any:
        actions = stop(self, *args)
        if self.asked and self.granted_once:  # type: ignore[attr-defined]
            actions.append(CloseKey())
        return actions

    return [(Transfer, "_stop", too_early), (Transfer, "granted_once", property(lambda self: self.blocks_granted > 0))]


def _lend_on_a_timer() -> Sequence[Change]:
    """Take lent leases back after a while, whatever their readers do: a lease with a time limit."""
    changes = LendingBackend.changes
    seen: dict[Any, int] = {}

    def with_a_limit(self: LendingBackend) -> Any:
        for reader in self.readers():
            seen[reader.key] = seen.get(reader.key, 0) + 1
            if seen[reader.key] > 60:
                self.acknowledge(reader.key, reader.nonce)
        return changes(self)

    return [(LendingBackend, "changes", with_a_limit)]


def _count_stopped_rows() -> Sequence[Change]:
    """Mark every row of a stopped lease as arrived."""
    mark = PoolLease.mark_arrived

    def mark_all(self: PoolLease, arrived: Sequence[bool]) -> None:
        mark(self, (True,) * len(arrived) if any(arrived) else arrived)

    return [(PoolLease, "mark_arrived", mark_all)]


def _forget_release_retries() -> Sequence[Change]:
    """Say once that access has ended, and never again."""

    async def once(self: Asker, key: Any, nonce: bytes, source: Any) -> None:
        from kvbus.events import LeaseReleased  # noqa: PLC0415 - the fault's own
        from kvbus.topics import Command  # noqa: PLC0415

        subject = self._topics.command(source.instance, Command.LEASE)
        await self._bus.request(subject, self._encoded(LeaseReleased(key=key, nonce=nonce)), wait_s=1.0)

    return [(Asker, "_release", once)]


def _death_of_an_old_epoch() -> Sequence[Change]:
    """Let the death of one process end the leases of the one that followed it."""
    died = LendingBackend.reader_died

    def any_epoch(self: LendingBackend, instance: str, member: str, epoch: int) -> int:
        epochs = {reader.key.epoch for reader in self.readers() if reader.key.instance == instance} | {epoch}
        return sum(died(self, instance, member, one) for one in epochs)

    return [(LendingBackend, "reader_died", any_epoch)]


def _forget_tombstones() -> Sequence[Change]:
    """Keep nothing of a key that was closed: a late question lends again."""
    end = LendingBackend._end

    def without_tombstone(self: LendingBackend, *args: Any) -> None:
        end(self, *args)
        self._tombstones.clear()

    def close(self: LendBook, key: Any, nonce: bytes) -> Any:
        del nonce
        return self._entries.pop(key, None)

    return [(LendingBackend, "_end", without_tombstone), (LendBook, "close", close)]


def _evict_lent_pages() -> Sequence[Change]:
    """Leave pinned pages in the list from which room is made."""
    pin = PageAllocator.pin

    def still_idle(self: PageAllocator, pages: Sequence[int], *, for_peer: bool) -> None:
        pin(self, pages, for_peer=for_peer)
        for page in pages:
            self._idle[page] = None

    return [(PageAllocator, "pin", still_idle)]


def _skip_generation() -> Sequence[Change]:
    """Lend a page for writing under the generation that it had."""
    raise_pages = Generations.raise_pages

    def unraised(self: Generations, pages: Sequence[int]) -> tuple[int, ...]:
        before = {page: self._counters[page] for page in pages}
        raised = raise_pages(self, pages)
        self._counters.__setitem__(slice(None), [before.get(at, now) for at, now in enumerate(self._counters)])
        return raised

    return [(Generations, "raise_pages", unraised)]


def _drop_late_completions() -> Sequence[Change]:
    """Ignore what a backend says of an attempt that was cancelled."""
    report = Outbox.report

    def unless_cancelled(self: Outbox, change: Any) -> None:
        if not self._open.get((change.ticket, change.attempt)):
            report(self, change)

    return [(Outbox, "report", unless_cancelled)]


def _keep_one_in_five() -> Sequence[Change]:
    """Forget to look at every fifth ticket."""
    touch = LeaseHolder._touch

    def sometimes(self: LeaseHolder, held: Held) -> None:
        touch(self, held)
        if held.ticket % 5 == 0:
            self._to_check.pop(held.ticket, None)

    return [(LeaseHolder, "_touch", sometimes)]


def _success_after_failure() -> Sequence[Change]:
    """Let a late success overwrite a failure."""

    def fix(self: LeaseHolder, held: Held, result: Any, failure: Any, text: str) -> None:
        held.failure, held.text = failure, text
        held.fix(result)
        self._touch(held)

    return [(LeaseHolder, "_fix", fix)]


def _lose_a_failure() -> Sequence[Change]:
    """Forget to count a transfer that did not settle."""
    ended = AdmissionGate.ended

    def uncounted(self: AdmissionGate, request_hash: str, *, settled: bool) -> None:
        ended(self, request_hash, settled=settled)
        if not settled:
            self._counts["failed"] -= 1

    return [(AdmissionGate, "ended", uncounted)]


def _return_twice() -> Sequence[Change]:
    """Give some leases back a second time."""
    give_back = LeaseHolder._give_back

    def again(self: LeaseHolder, held: Held) -> None:
        give_back(self, held)
        if held.ticket % 7 == 0:
            held.lease._keeper.give_back(held.lease)  # type: ignore[attr-defined]

    return [(LeaseHolder, "_give_back", again)]


def _forget_ended_transfers() -> Sequence[Change]:
    """Forget a transfer when it ends, before its source heard that access has ended."""
    finished = property(lambda self: self.phase.value == "ended")
    return [(Transfer, "finished", finished)]


def _keep_pins() -> Sequence[Change]:
    """Keep the pins of a transfer that ended."""
    from kvbus.roles.running import Running  # noqa: PLC0415 - the fault's own

    return [(Running, "_report", lambda self: self.on_ended(self))]


def _drop_facts() -> Sequence[Change]:
    """Drop the facts of half of the tickets on their way to the transfers."""
    on_line = Destination.on_line

    def half(self: Destination, ticket: int, *args: Any) -> None:
        if ticket % 2:
            on_line(self, ticket, *args)

    return [(Destination, "on_line", half)]


PLANTS: dict[str, Plant] = {
    "access end is taken from the result": _result_is_access_end,
    "an abandoned lease is freed at once": _free_when_abandoned,
    "a settle returns without access end": _settle_is_enough,
    "the source is told at the stop": _close_key_at_stop,
    "lent leases have a time limit": _lend_on_a_timer,
    "rows that did not arrive are committed": _count_stopped_rows,
    "a release is said once": _forget_release_retries,
    "an old epoch's death ends a new one's leases": _death_of_an_old_epoch,
    "closed keys are forgotten": _forget_tombstones,
    "lent pages are evicted": _evict_lent_pages,
    "a generation is not raised": _skip_generation,
    "late completions are dropped": _drop_late_completions,
    "one ticket in five is kept": _keep_one_in_five,
    "success overwrites failure": _success_after_failure,
    "failures are not counted": _lose_a_failure,
    "leases are returned twice": _return_twice,
    "transfers are forgotten before their source knows": _forget_ended_transfers,
    "pins are kept": _keep_pins,
    "facts of half of the tickets are dropped": _drop_facts,
}
"""Every planted fault, by what it does."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Make one fault, and take it out again."""
    before: list[Change] = []
    for owner, attribute, value in PLANTS[name]():
        before.append((owner, attribute, owner.__dict__.get(attribute, _ABSENT)))
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in reversed(before):
            if value is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, value)


_ABSENT = object()
