"""The members of one instance, as one of them sees them: it follows the log, tells what it holds, and leads if it must.

An instance with one member needs none of this. With several, each member runs one `InstanceCouncil`: decisions reach it
by the settle log alone, also those that it made itself, and what it holds goes to the coordinator as a state that is
repeated while anything waits. Whoever leads has its term in the log; a member that finds nobody leading writes its own.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvbus.errors import BusError, PeerError
from kvbus.events import HeartbeatSeen, SharesReported, decode
from kvbus.ledger.agreement import Decision
from kvbus.ledger.attendance import Attendance
from kvbus.ledger.council import Council, Report
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.shares import ENDED, Acts, Heard, Share, ShareBook
from kvbus.roles.decisions import row_of, share_of
from kvbus.roles.recorder import Recorder
from kvbus.roles.settle_log import SettleLog
from kvbus.topics import Topics
from kvbus.transport import Bus, Delivery, Subscription

REPEAT_S = 1.0
"""What a member holds is told again this often while it waits for a decision: a lost report costs a second."""
REPEATS = 3
"""And so often after the last change, when it waits for nothing: its coordinator waits to hear of it."""
REFRESH_S = 600.0
"""The term's record is written again so often: the log keeps an hour, so six tries before it is forgotten (P14)."""
TURN_S = 0.25
"""A turn at least this often while something waits, else with the heartbeat."""
IDLE_TURN_S = 1.0
DECISIONS_MAX = 64
"""Decisions in one turn; others get their turn in between."""

log = logging.getLogger(__name__)


class Carrier(Protocol):
    """Who carries out this member's share of a transfer: the destination."""

    def begin_share(self, share: Share, coordinator: str) -> None:
        """Take part in a transfer that another member opened."""

    def stop_share(self, share: Share, reason: str) -> None:
        """Stop bringing pages of a transfer; what arrived whole counts."""

    def share_over(self, share: Share, reason: str) -> None:
        """The instance has decided how a transfer ends, and this member has applied it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which member of which instance this is. `ranks` names all members, in the order in which they would lead."""

    instance: str
    member: str
    epoch: int
    ranks: dict[str, int]


@dataclass(slots=True)
class CouncilStatistics:
    """What this member saw of its instance's agreement."""

    terms_led: int = 0
    decisions: int = 0
    refused: int = 0
    """Decisions of a lower term that stood in the log."""
    reports: int = 0
    malformed: int = 0
    """Messages that could not be read, or do not belong where they came."""


@dataclass(slots=True)
class InstanceCouncil:
    """One member's part in its instance's agreement. `run` does everything; nothing here blocks the rounds."""

    place: Place
    bus: Bus
    topics: Topics
    recorder: Recorder
    holder: LeaseHolder
    run_rounds: Callable[[], None]
    clock: Callable[[], float]
    statistics: CouncilStatistics = field(default_factory=CouncilStatistics)
    carrier: Carrier | None = None
    book: ShareBook = field(init=False)
    _attendance: Attendance = field(init=False)
    _log: SettleLog = field(init=False)
    _council: Council | None = None
    _waiting: "dict[str, asyncio.Future[str]]" = field(default_factory=dict)
    _term_since: float = 0.0
    _report_at: float = 0.0
    _repeats: int = 0
    _refresh_at: float = 0.0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    leading: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while this member leads: only then it takes requests."""
    _subscriptions: list[Subscription] = field(default_factory=list)

    def __post_init__(self) -> None:
        place = self.place
        self.book = ShareBook(place.member, place.epoch)
        members = tuple(place.ranks)
        self._attendance = Attendance(members=members, me=place.member, began_at=self.clock())
        self._log = SettleLog(
            bus=self.bus,
            topics=self.topics,
            instance=place.instance,
            header=self.recorder.header,
            hear=lambda decision: self._hear(decision),  # noqa: PLW0108 - who watches may put a check before it
            place=lambda: self.book.place,
            join=self.book.join,
        )

    @property
    def leads(self) -> bool:
        """Whether this member takes requests for the instance now."""
        return self.leading.is_set()

    # ------------------------------------------------------------------------------------- what the transfers ask of it

    async def open(self, transfer: str, give_up_at: float, *, wait_s: float) -> str:
        """Open a transfer over all members; return "" once this member's share has begun, or why it does not."""
        council = self._council
        if council is None or not council.leads:
            return f"{self.place.member} does not lead {self.place.instance} now"
        if not council.propose(transfer, give_up_at):
            return f"{council.open_transfers} transfers are not over at every member of {self.place.instance}"
        opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[transfer] = opened
        self._wake.set()
        try:
            async with asyncio.timeout(wait_s):
                return await opened
        except TimeoutError:
            away = ", ".join(council.away(self.clock()))
            return f"not opened in time{f': {away} is not there' if away else ''}"
        finally:
            self._waiting.pop(transfer, None)

    def cancel(self, transfer: str, text: str) -> bool:
        """Have every member stop its share of a transfer; False where this member does not lead, or it is over."""
        if self._council is None or not self._council.cancel(transfer, text):
            return False
        self._wake.set()
        return True

    def leased(self, transfer: str, ticket: int) -> None:
        """The pages that are missing here are leased."""
        self.book.leased(transfer, ticket)

    def nothing_missing(self, transfer: str, blocks: int) -> None:
        """Every block is here already."""
        self.book.nothing_missing(transfer, blocks)
        self._wake.set()

    def explain(self, transfer: str, reason: str) -> None:
        """Say why this member gives its share up, for whoever asked."""
        self.book.explain(transfer, reason)

    def refuse(self, transfer: str, reason: str) -> None:
        """Nothing of the transfer can be brought here."""
        self.book.explain(transfer, reason)
        self.book.refuse(transfer)
        self._wake.set()

    def is_open(self, transfer: str) -> bool:
        """Whether a share in a transfer lives here: no decision has ended it."""
        share = self.book.of(transfer)
        return share is not None and share.stage not in ENDED

    def may_give_up(self, transfer: str) -> bool:
        """Whether this member may abandon its lease by itself; not once it has promised to keep it (P11)."""
        return self.book.may_give_up(transfer)

    def note(self, ticket: int, bits: int, lo: int, hi: int) -> bool:
        """Take note of a line of facts; True where its lease waits for the instance's decision."""
        if not self.book.note(ticket, bits, lo, hi):
            return False
        self._wake.set()
        return True

    # ---------------------------------------------------------------------------------------------------------- running

    async def listen(self) -> None:
        """Hear the log, the members' reports and their heartbeats."""
        instance, subscribe = self.place.instance, self.bus.subscribe
        self._subscriptions += [
            await subscribe(self.topics.live_settle(instance), self._on_decision),
            await subscribe(self.topics.shares(instance), self._on_report),
            await subscribe(self.topics.heartbeat(instance), self._on_heartbeat),
        ]

    async def run(self) -> None:
        """Take turns until cancelled; a broker that is away stops decisions, and frees nothing."""
        while True:
            starting = self._council is not None and not self._council.leads
            busy = self.book.live or self.book.gathering or starting
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_S if busy else IDLE_TURN_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._turn()
            except BusError as error:
                self._log.behind = True
                log.info("the members of %s cannot agree now: %s", self.place.instance, error)

    async def close(self) -> None:
        """Stop hearing."""
        for subscription in self._subscriptions:
            await subscription.close()

    async def _turn(self) -> None:
        self._attendance.heard(self.clock(), self.place.member, self.place.epoch)
        await self._log.catch_up(self.clock())
        council = self._council
        if council is None:
            me, coordinator = (self.place.member, self.place.epoch), self.book.coordinator
            known = None if coordinator == me else coordinator
            if self._attendance.should_lead(self.clock(), known, term_since=self._term_since):
                await self._lead(self.book.term + 1)
        elif council.outranked_by:
            await self._lead(council.outranked_by + 1)  # only a higher term will be heard
        else:
            await self._decide(council)
        waits = self.book.live or self.book.gathering or self._repeats
        if self.book.changed or (waits and self.clock() >= self._report_at):
            await self._tell()

    # ---------------------------------------------------------------------------------------------------------- the log

    def _hear(self, decision: Decision) -> Heard:
        before, acts = self.book.term, self.book.hear(decision)
        if acts.heard is Heard.REFUSED:
            self.statistics.refused += 1
            log.info("%s of term %d is refused: term %d holds", decision.kind, decision.term, self.book.term)
        if acts.heard is not Heard.APPLIED:
            return acts.heard
        if decision.kind == "term" and decision.term > before:
            self._term_since = self.clock()
        if decision.kind == "term" and self.book.coordinator != (self.place.member, self.place.epoch):
            self._step_down()
        self._act(acts)
        self._wake.set()
        return acts.heard

    def _act(self, acts: Acts) -> None:
        if acts.begin is not None:
            self._begin(acts.begin)
        if acts.show or acts.give_up:
            for ticket in acts.give_up:
                if self.holder.bits(ticket):
                    self.holder.abandon(ticket, FailureClass.CONTRADICTION, acts.reason)
            self.holder.settle((*acts.show, *acts.give_up))
            self.run_rounds()
        if acts.stop is not None and self.carrier is not None:
            self.carrier.stop_share(acts.stop, acts.reason)
        if acts.over is not None and self.carrier is not None:
            self.carrier.share_over(acts.over, acts.reason)

    def _begin(self, share: Share) -> None:
        opened = self._waiting.get(share.transfer)
        if opened is not None and not opened.done():
            opened.set_result("")
        elif self.book.coordinator is None or self.book.coordinator[0] == self.place.member or self.carrier is None:
            self.book.refuse(share.transfer)  # opened for a transfer that is not run here any more
        else:
            self.carrier.begin_share(share, self.book.coordinator[0])

    # --------------------------------------------------------------------------------------------------------- leading

    async def _lead(self, least: int) -> None:
        """Write a term's record; whoever writes first leads, and the others read it.

        Each member has terms of its own, by its place: no two of them ever name two decisions alike, also where the log
        of the first was lost.
        """
        self._step_down()
        place, book = self.place, self.book
        members, least = list(place.ranks), max(least, self._log.told_term + 1)
        term = least + (members.index(place.member) - least) % len(members)
        council = Council(
            self._attendance,
            me=(place.member, place.epoch),
            ranks=place.ranks,
            term=term,
            n=book.n,
            previous=book.head_id,
        )
        if not await self._append(council, council.term_record()):
            return
        self._council = council
        self._refresh_at = self.clock() + REFRESH_S
        self.statistics.terms_led += 1
        log.info("%s leads %s in term %d", place.member, place.instance, term)

    async def _decide(self, council: Council) -> None:
        """Append what is due, one decision at a time, as long as nobody else has written."""
        if self.clock() >= self._refresh_at or council.is_unheard(self.clock()):
            self._refresh_at = self.clock() + REFRESH_S
            if not await self._append(council, council.term_record()):
                return
        for _ in range(DECISIONS_MAX):
            self._report_to(council)
            decision = council.next(self.clock())
            if council.leads and not self.leading.is_set():
                self.leading.set()
            if decision is None:
                return
            if not await self._append(council, decision):
                return
            self.statistics.decisions += 1
        self._wake.set()

    async def _append(self, council: Council, decision: Decision) -> bool:
        if not await self._log.append(decision):
            self._step_down()
            self._wake.set()
            return False
        council.appended(decision)
        self._hear(decision)
        return True

    def _step_down(self) -> None:
        """Lead no more; what was proposed and does not stand in the log was never opened."""
        self._council = None
        self.leading.clear()
        for opened in self._waiting.values():
            if not opened.done():
                opened.set_result("another member leads now")

    def _report_to(self, council: Council) -> None:
        rows, book = self.book.rows(), self.book
        shares = tuple(replace(share) for share in rows)
        sequence = self.recorder.header(SharesReported.KIND).s
        council.report(self.clock(), Report(self.place.member, self.place.epoch, sequence, book.term, book.n, shares))

    # --------------------------------------------------------------------------------------------------------- telling

    async def _tell(self) -> None:
        """Tell the coordinator what this member holds; it is told again while something waits."""
        self._repeats = REPEATS if self.book.changed else max(0, self._repeats - 1)
        self.book.changed = False
        self._report_at = self.clock() + REPEAT_S
        if self._council is not None:
            return  # it knows
        body = SharesReported(term=self.book.term, head=self.book.n, shares=tuple(map(row_of, self.book.rows())))
        await self.bus.publish(self.topics.shares(self.place.instance), self.recorder.encoded(body))
        self.statistics.reports += 1

    async def _on_decision(self, delivery: Delivery) -> None:
        self._log.repeated(delivery)
        self._wake.set()

    async def _on_report(self, delivery: Delivery) -> None:
        try:
            event = decode(delivery.data)
        except PeerError as error:
            self.statistics.malformed += 1
            log.warning("a report of shares is unreadable: %s", error)
            return
        header, body = event.header, event.body
        if not isinstance(body, SharesReported) or header.i != self.place.instance:
            self.statistics.malformed += 1
            return
        if header.m == self.place.member:
            return
        self._attendance.heard(self.clock(), header.m, header.e)
        if self._council is not None:
            shares = tuple(map(share_of, body.shares))
            self._council.report(self.clock(), Report(header.m, header.e, header.s, body.term, body.head, shares))
            self._wake.set()

    async def _on_heartbeat(self, delivery: Delivery) -> None:
        try:
            event = decode(delivery.data)
        except PeerError:
            self.statistics.malformed += 1
            return
        header, body = event.header, event.body
        if not isinstance(body, HeartbeatSeen):
            self.statistics.malformed += 1
            return
        if header.m == self.place.member:
            return
        lives = self._attendance.heard(self.clock(), header.m, header.e)
        if lives and self._log.told_of(body.settle_term, body.settle_n):  # a live repeat was lost (P25)
            self._wake.set()
