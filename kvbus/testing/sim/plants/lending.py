"""Faults of the source, and of how readers tell it that their access has ended."""

# ruff: noqa: SLF001, ANN401 - a fault sits inside of what it spoils, and hands on what it does not look at

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvbus import processes
from kvbus.dataplane import lending as lending_module
from kvbus.dataplane.lending import LendingBackend
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.lending import LendBook, LendState
from kvbus.ledger.transfer import CloseKey, Transfer
from kvbus.ledger.types import Delivered, Failed
from kvbus.roles import source as source_module
from kvbus.roles.asking import Asker
from kvbus.roles.source import Source
from kvbus.testing.sim.plants.plant import Change, plant
from kvbus.topics import Command


def _end_all(backend: LendingBackend, evidence: Evidence, found: Sequence[Any]) -> None:
    for lent in found:
        backend._end(lent, Failed(FailureClass.PEER_LOST, "a planted fault"), evidence)


@plant("the source is told at the stop", "P4, contract 40")
def close_key_at_stop() -> Sequence[Change]:
    """Tell the source that access has ended when the stop is asked for, not when access has ended."""
    stop = Transfer._stop

    def too_early(self: Transfer, *args: Any) -> Any:
        actions = stop(self, *args)
        if self.asked and self.granted_once:  # type: ignore[attr-defined]
            actions.append(CloseKey())
        return actions

    return [(Transfer, "_stop", too_early), (Transfer, "granted_once", property(lambda self: self.blocks_granted > 0))]


@plant("lent leases have a time limit", "P5, contract 40")
def lend_on_a_timer() -> Sequence[Change]:
    """Take lent leases back after a while, whatever their readers do."""
    changes = LendingBackend.changes
    seen: dict[Any, int] = {}

    def with_a_limit(self: LendingBackend) -> Any:
        for reader in self.readers():
            seen[reader.key] = seen.get(reader.key, 0) + 1
            if seen[reader.key] > 60:
                self.acknowledge(reader.key, reader.nonce)
        return changes(self)

    return [(LendingBackend, "changes", with_a_limit)]


@plant("a deadline fences lent pages", "P5")
def fence_by_deadline() -> Sequence[Change]:
    """End leases that are older than a second, and raise their pages' generations first, so that no reader delivers."""
    refusal = Source._refusal

    def and_fence(self: Source, asked: Any) -> Any:
        for entry in list(self._book._entries.values()):
            view = self._rounds.holder.view(entry.ticket) if entry.state is LendState.GRANTED else None
            if view is not None and self._clock() - entry.asked_at > 1.0:
                alone = [page for page in view.pages if self._pool.allocator.pins(page) == 1]
                found = [lent for lent in self._lending._lent.values() if lent.pair[0] == entry.ticket]
                _end_all(self._lending, Evidence.ENDPOINT_DESTROYED, found)
                self._rounds.run()
                self._pool.memory.generations.raise_pages(alone)
                self._pool.memory.generations.seal_pages(alone)
        return refusal(self, asked)

    return [(Source, "_refusal", and_fence)]


@plant("the first acknowledgement frees for all readers", "P4")
def first_acknowledgement() -> Sequence[Change]:
    """Take one reader's word for everybody to whom something is lent."""
    acknowledge = LendingBackend.acknowledge

    def for_all(self: LendingBackend, key: Any, nonce: bytes) -> bool:
        known = acknowledge(self, key, nonce)
        if known:
            _end_all(self, Evidence.PEER_ACK, list(self._lent.values()))
        return known

    return [(LendingBackend, "acknowledge", for_all)]


@plant("a new epoch vouches for an old one", "P4, P16", weathers=("lingering",))
def new_epoch_vouches() -> Sequence[Change]:
    """Take a question of a reader's next run as proof that the last one reads nothing any more."""
    submit = LendingBackend.submit

    def and_end_older(self: LendingBackend, order: Any) -> None:
        key = order.hint.key
        who = (key.instance, key.member)
        older = [
            lent
            for other, lent in self._lent.items()
            if (other.instance, other.member) == who and other.epoch != key.epoch
        ]
        _end_all(self, Evidence.PROCESS_DEAD, older)
        submit(self, order)

    return [(LendingBackend, "submit", and_end_older)]


@plant("an old epoch's death ends a new one's leases", "P4, P16", weathers=("frail", "lingering"))
def death_of_an_old_epoch() -> Sequence[Change]:
    """Let the death of one process end the leases of the one that followed it."""
    died = LendingBackend.reader_died

    def any_epoch(self: LendingBackend, instance: str, member: str, epoch: int) -> int:
        epochs = {reader.key.epoch for reader in self.readers() if reader.key.instance == instance} | {epoch}
        return sum(died(self, instance, member, one) for one in epochs)

    return [(LendingBackend, "reader_died", any_epoch)]


@plant("a pid that was used again proves a death", "P6", check="deaths")
def believe_a_pid() -> Sequence[Change]:
    """Watch whatever process has that pid now."""

    def of_anybody(other: Any) -> int | None:
        try:
            return os.pidfd_open(other.pid)
        except (ProcessLookupError, ValueError):
            return None

    return [(processes, "open_pidfd", of_anybody)]


@plant("a process that cannot be watched counts as dead", "P6", check="deaths")
def unwatchable_is_dead() -> Sequence[Change]:
    """Call back at once where no pidfd can be had."""
    watch = processes.ProcessWatch.watch

    def or_dead(self: processes.ProcessWatch, other: Any, on_death: Any) -> bool:
        if not watch(self, other, on_death):
            on_death()
        return True

    return [(processes.ProcessWatch, "watch", or_dead)]


@plant("a source that does not answer counts as dead", "P6, P18", weathers=("garbled", "usual"))
def silence_is_death() -> Sequence[Change]:
    """Stop telling a source of the end of access when it has not answered once."""

    async def at_once(self: Asker, source: Any, release: Any = None) -> bool:
        del self, source, release
        return True

    return [(Asker, "_has_ended", at_once)]


@plant("isolating a reader ends its leases", "P7", check="lending backend")
def isolation_is_evidence() -> Sequence[Change]:
    """Take the end of the source's own endpoint as proof, where the reader needs none."""
    isolate = LendingBackend.isolate

    def and_end(self: LendingBackend, peer: str) -> None:
        isolate(self, peer)
        found = [lent for lent in self._lent.values() if lent.reader.key.instance == peer]
        _end_all(self, Evidence.ENDPOINT_DESTROYED, found)

    return [(LendingBackend, "isolate", and_end)]


@plant("closed keys are forgotten", "P18", weathers=("garbled", "frail"))
def forget_tombstones() -> Sequence[Change]:
    """Keep nothing of a key that was closed: a late question lends again."""
    end = LendingBackend._end

    def without_tombstone(self: LendingBackend, *args: Any) -> None:
        end(self, *args)
        self._tombstones.clear()

    def close(self: LendBook, key: Any, nonce: bytes) -> Any:
        del nonce
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.state = LendState.CLOSED
        return entry

    return [(LendingBackend, "_end", without_tombstone), (LendBook, "close", close)]


@plant("a repeated question is lent to again", "P18", weathers=("garbled", "usual"))
def lend_twice() -> Sequence[Change]:
    """Take each repeat of a question as a new one, and forget the lease of the first."""
    lend = Source._lend

    async def afresh(self: Source, asked: Any) -> Any:
        key = source_module.key_of(asked.key)
        entry = self._book.find(key)
        if entry is not None and entry.state is LendState.GRANTED:
            self._book.forget(key)
            self._lending._lent.pop(asked.key, None)
        return await lend(self, asked)

    return [(Source, "_lend", afresh)]


@plant("a release is said once", "P18", weathers=("garbled", "usual"))
def forget_release_retries() -> Sequence[Change]:
    """Say once that access has ended, and never again."""

    async def once(self: Asker, release: Any) -> None:
        subject = self._topics.command(release.source.instance, Command.LEASE, release.source.member)
        await self._bus.request(subject, self._recorder.encoded(release.body), wait_s=1.0)

    return [(Asker, "_release", once)]


@plant("any nonce ends a lease", "P18, P4", weathers=("forged",))
def any_nonce() -> Sequence[Change]:
    """Take anybody's word for the reader's."""
    anything = SimpleNamespace(compare_digest=lambda _one, _other: True)
    return [(lending_module, "hmac", anything), (source_module, "hmac", anything)]


@plant("transfers are forgotten before their source knows", "P18, contract 8", weathers=("stalled", "usual"))
def forget_ended_transfers() -> Sequence[Change]:
    """Forget a transfer when it ends, before its source heard that access has ended."""
    return [(Transfer, "finished", property(lambda self: self.phase.value == "ended"))]


@plant("a reader's death ends what is lent to all", "P4, P6")
def death_of_all() -> Sequence[Change]:
    """Let one process's death end every lease."""
    died = LendingBackend.reader_died

    def everybody(self: LendingBackend, instance: str, member: str, epoch: int) -> int:
        count = died(self, instance, member, epoch)
        for lent in list(self._lent.values()):
            self._end(lent, Delivered((True,) * lent.rows, 0), Evidence.PROCESS_DEAD)
        return count

    return [(LendingBackend, "reader_died", everybody)]
