"""Asking a source to lend, and telling it that access has ended: both repeat until they are answered.

A question is idempotent: its key (epoch, transfer, attempt, rank) gets the same lease each time. A release is repeated
until the source confirms it, since one lost message must not pin pages for ever (P18); it stops otherwise only when the
source's process, and so its pool, is no more: seen on this host, or by its member's other epoch in the registry.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbus.errors import BusError, PeerError
from kvbus.events import (
    LeaseReleased,
    LendAnswered,
    LendRequested,
    PrefixAnswered,
    PrefixAsked,
    ReaderKey,
    ReleaseConfirmed,
    decode,
)
from kvbus.grants import Expected, Grant, refusal, unseal
from kvbus.ledger.facts import FailureClass
from kvbus.parts import PagesFound, ProcessIdentity
from kvbus.processes import same_host, start_ticks
from kvbus.roles.moments import Moment
from kvbus.roles.owed import OwedRelease, SourceProcess
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Registered, lookup
from kvbus.roles.tasks import started
from kvbus.topics import Command, Topics
from kvbus.transport import Bus, NoAnswer

ANSWER_SLACK_S = 3.0
"""What an answer may take beyond the source's own wait: a busy loop, and a broker that reconnects."""
NOBODY_MAX_S = 3.0
"""A source that nobody hears for may have lost its connection with the broker's restart: it is back within two seconds
(`kvbus.bus_link`). After this long its heart has missed three beats, and it counts as gone."""
RELEASES_MAX = 4_096
"""Releases still unconfirmed: as many leases as a source lends at once; beyond that new transfers are refused."""
RELEASE_PAUSE_MAX_S = 10.0
ABSENT_S = 60.0
"""A source whose record is missing for so long, six times what the registry remembers, may be gone for good: it is told
still, for as long as this member lives, but keeps it from leaving no more."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Granted:
    """A grant that was checked against everything that was asked for, and the source that gave it."""

    grant: Grant
    expected: Expected
    source: Registered


@dataclass(frozen=True, slots=True)
class NotGranted:
    """Why there is no grant: a value, since misses and refusals are ordinary."""

    failure: FailureClass
    text: str


class _Process(NamedTuple):
    """One process of a source: where it is told, and how its end is noticed."""

    instance: str
    member: str
    epoch: int
    process: ProcessIdentity


@dataclass(slots=True, eq=False)
class _Release:
    """One word that access has ended, for as long as its source has not confirmed it."""

    body: LeaseReleased
    source: _Process
    absent_since: float | None = None
    """Since when the registry knows nobody who could confirm it."""
    task: asyncio.Task[None] = field(init=False)

    def owed(self) -> OwedRelease:
        """Return it for the next run to bring."""
        source = SourceProcess.model_validate(self.source._asdict())
        return OwedRelease(key=self.body.key, nonce=self.body.nonce, source=source)


class Asker:
    """Speaks to sources on behalf of this member's transfers."""

    def __init__(
        self,
        *,
        bus: Bus,
        topics: Topics,
        recorder: Recorder,
        pause_s: float,
        clock: Callable[[], float],
        has_died: Callable[[ProcessIdentity], bool] | None = None,
    ) -> None:
        self._bus = bus
        self._topics = topics
        self._recorder = recorder
        self._pause_s = pause_s
        self._clock = clock
        self._has_died = has_died or _has_died
        self._releases: dict[ReaderKey, _Release] = {}
        self._again = Moment()

    @property
    def is_full(self) -> bool:
        """True while so many releases are unconfirmed that no new lease should be asked for."""
        return len(self._releases) >= RELEASES_MAX

    @property
    def unconfirmed(self) -> int:
        """Releases that no source has confirmed yet."""
        return len(self._releases)

    @property
    def awaited(self) -> int:
        """Those of them whose sources may still be there."""
        now = self._clock()
        absent = [one.absent_since for one in self._releases.values()]
        return sum(since is None or now - since < ABSENT_S for since in absent)

    async def ask(
        self,
        asked: LendRequested,
        source: Registered,
        *,
        page_bytes: int,
        deadline: float,
        on_computing: Callable[[], None],
    ) -> Granted | NotGranted:
        """Ask until the source grants, refuses, or the deadline passes; then check the grant before anything moves."""
        subject = self._topics.command(source.instance, Command.LEASE, source.member)
        nobody_since: float | None = None
        while (left_s := deadline - self._clock()) > 0:
            asked_at = self._clock()
            answer = await self._request(subject, asked, left_s=left_s)
            if isinstance(answer, NoAnswer):
                if answer.reason == "nobody_listens":
                    nobody_since = asked_at if nobody_since is None else nobody_since
                    if self._clock() - nobody_since >= NOBODY_MAX_S or await self._is_gone(source):
                        whom = f"{source.instance}/{source.member}"
                        return NotGranted(FailureClass.PEER_LOST, f"nobody answers for {whom}: it has gone")
                    await asyncio.sleep(min(self._pause_s, left_s))
                else:
                    nobody_since = None
                continue
            if answer.status == "granted":
                return self._checked(answer, asked, source, page_bytes)
            if answer.status == "refused":
                return NotGranted(failure_named(answer.failure), answer.reason)
            on_computing()
            if self._clock() - asked_at < self._pause_s:  # it could not wait for us; we do
                await asyncio.sleep(self._pause_s)
        return NotGranted(FailureClass.DEADLINE, f"{source.instance} did not grant within the budget")

    async def names_of(self, asked: PrefixAsked, source: Registered, *, wait_s: float) -> PrefixAnswered | str:
        """Ask a source for the names of a prefix; return why there is no answer where it gives none."""
        subject = self._topics.command(source.instance, Command.LEASE, source.member)
        try:
            question = self._recorder.encoded(asked)
            data = await self._bus.request(subject, question, wait_s=min(wait_s, ANSWER_SLACK_S))
            body = None if isinstance(data, NoAnswer) else decode(data).body
        except (BusError, PeerError) as error:
            return f"{source.instance} was not asked for the prefix: {error}"
        if isinstance(body, PrefixAnswered):
            return body
        return f"{source.instance} does not say which pages the prefix has: is it away, or of an earlier version?"

    def release(self, key: ReaderKey, nonce: bytes, source: Registered, found: PagesFound | None = None) -> None:
        """Tell the source, until it confirms, that access under this key has ended; returns at once.

        `found` is what there is to say of its pages: a word in band says only the first, so the bus says both.
        """
        if key not in self._releases:
            self._repeat(key, nonce, _process_of(source), found)

    def bring(self, owed: Sequence[OwedRelease]) -> None:
        """Tell what an earlier run of this member could not: its own word, in its own name (P4)."""
        for one in owed[:RELEASES_MAX]:
            if one.key not in self._releases:
                was = one.source
                self._repeat(one.key, one.nonce, _Process(was.instance, was.member, was.epoch, was.process), None)

    def _repeat(self, key: ReaderKey, nonce: bytes, source: _Process, found: PagesFound | None) -> None:
        release = self._releases[key] = _Release(LeaseReleased(key=key, nonce=nonce, found=found), source)
        release.task = started(self._release(release), name="release", on_end=lambda: self._releases.pop(key, None))

    async def flush(self, wait_s: float) -> int:
        """Repeat outstanding releases at once and wait for them, bounded; return how many are still unconfirmed."""
        if self._releases:
            self._again.come()
            await asyncio.wait([one.task for one in self._releases.values()], timeout=wait_s)
        return len(self._releases)

    async def close(self) -> tuple[OwedRelease, ...]:
        """Stop repeating; return what no source has confirmed, for the next run to bring."""
        open_now = tuple(self._releases.values())
        for one in open_now:
            whom, transfer = f"{one.source.instance}/{one.source.member}", one.body.key.transfer
            text = "%s has not confirmed that access for %s has ended; the next run tells it again"
            log.warning(text, whom, transfer, extra={"transfer": transfer})
            one.task.cancel()
        await asyncio.gather(*(one.task for one in open_now), return_exceptions=True)
        return tuple(one.owed() for one in open_now)

    # ------------------------------------------------------------------------------------------------------- inside

    async def _request(self, subject: str, asked: LendRequested, *, left_s: float) -> LendAnswered | NoAnswer:
        budget_s, wait_s = max(0.001, left_s), min(asked.wait_s, left_s)
        question = self._recorder.encoded(asked, budget_s=budget_s, wait_s=wait_s)
        try:
            data = await self._bus.request(subject, question, wait_s=min(left_s, asked.wait_s + ANSWER_SLACK_S))
            if isinstance(data, NoAnswer):
                return data
            event = decode(data)
        except BusError as error:
            await asyncio.sleep(self._pause_s)
            return NoAnswer(str(error))
        except PeerError as error:
            log.warning("answer on %s is unreadable: %s", subject, error)
            await asyncio.sleep(self._pause_s)
            return NoAnswer("unreadable")
        if isinstance(event.body, LendAnswered):
            return event.body
        return LendAnswered(status="refused", failure="grant_refused", reason=f"answered with {event.header.k}")

    def _checked(
        self, answer: LendAnswered, asked: LendRequested, source: Registered, page_bytes: int
    ) -> Granted | NotGranted:
        try:
            grant = unseal(answer.grant, answer.signature, source.record.verify_key)
        except PeerError as error:
            return NotGranted(FailureClass.GRANT_REFUSED, str(error))
        expected = Expected(
            reader=asked.key,
            lender_instance=source.instance,
            lender_epoch=source.epoch,
            fingerprint=asked.fingerprint,
            page_bytes=page_bytes,
            names_asked=len(asked.names) // 16,
        )
        reason = refusal(grant, expected)
        if reason is None and grant.nonce != asked.nonce:
            reason = "the grant carries another nonce than the question"
        if reason is not None:
            return NotGranted(FailureClass.GRANT_REFUSED, reason)
        return Granted(grant, expected, source)

    async def _release(self, release: _Release) -> None:
        body, source = release.body, release.source
        subject = self._topics.command(source.instance, Command.LEASE, source.member)
        pause_s = self._pause_s
        while True:
            try:
                data = await self._bus.request(subject, self._recorder.encoded(body), wait_s=ANSWER_SLACK_S)
                if not isinstance(data, NoAnswer) and isinstance(decode(data).body, ReleaseConfirmed):
                    return  # known or not: it holds nothing for this key any more
                if isinstance(data, NoAnswer) and await self._has_ended(source, release):
                    return
            except (BusError, PeerError) as error:
                transfer = body.key.transfer
                log.info("release of %s not confirmed: %s", transfer, error, extra={"transfer": transfer})
            await self._pause(pause_s)
            pause_s = min(RELEASE_PAUSE_MAX_S, 2 * pause_s)

    async def _pause(self, pause_s: float) -> None:
        """Wait before a release is repeated; not for long once somebody waits for all of them."""
        if self._again.has_come:
            await asyncio.sleep(min(pause_s, self._pause_s))
        else:
            await self._again.within(pause_s)

    async def _is_gone(self, source: Registered) -> bool:
        try:
            return await self._has_ended(_process_of(source))
        except BusError:
            return False

    async def _has_ended(self, source: _Process, release: _Release | None = None) -> bool:
        """Return True where the process that lent is no more: gone from this host, or started again.

        A record that is missing proves nothing: the registry forgets within seconds, and a broker may have restarted.
        """
        if self._has_died(source.process):
            return True
        epochs = {one.epoch for one in await lookup(self._bus, source.instance) if one.member == source.member}
        if release is not None and epochs:
            release.absent_since = None
        elif release is not None and release.absent_since is None:
            release.absent_since = self._clock()
        return bool(epochs - {source.epoch})


def _process_of(source: Registered) -> _Process:
    return _Process(source.instance, source.member, source.epoch, source.record.process)


def _has_died(process: ProcessIdentity) -> bool:
    """Return True where a source was a process of this host that is gone, all of its threads: nothing waits there."""
    return same_host(process) and start_ticks(process.pid) != process.start_ticks


def failure_named(name: str) -> FailureClass:
    """Return the failure class that a peer named; a name that this version does not know is a refusal."""
    try:
        return FailureClass[name.upper()]
    except KeyError:
        return FailureClass.GRANT_REFUSED
