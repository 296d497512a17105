"""A row at work: what a fault has in hand, and the reckoning at the end."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.chaos_broker.follower import Follower, applied_twice
from bench.chaos_broker.load import Load
from bench.chaos_broker.notes import Notes, longest_pause
from bench.chaos_broker.stage import Stage
from bench.chaos_broker.table import Row
from kvbus.commands.audit import audit_log, lines
from kvbus.commands.auditing import Verdict, audit
from kvbus.handles import UNASKED
from kvbus.topics import Family
from tests.flow.town import REST_S, TOPICS
from tests.waiting import until

END_S = 90.0
"""A request's own budget is 30 s, and the queue offers it again after 10 s, three times at most."""
SERVED_S = 60.0
ASK_AGAIN_S = 1.0
"""What a destination runs at once takes about this long, so that there is room again."""
HEARD_S = 3.0
WAITED_S = 1.0
CAUGHT_UP_S = 30.0


class FaultError(Exception):
    """What a fault has brought about that no row can go on with."""


@dataclass(slots=True)
class Scene:
    """What a fault has in hand: the parts under load, and the row that it fills."""

    stage: Stage
    row: Row
    load: Load
    follower: Follower
    thrown_away_at: float = 0.0
    """When the broker's store was thrown away; 0: never."""
    verdicts: Sequence[Verdict] = (Verdict.CLEAN,)
    outage: bool = False
    """Whether the fault kept facts from being stored for a while."""
    injected: set[tuple[Family, int]] = field(default_factory=set)
    """Where in the logs the row itself has put what workers had said before."""

    async def served(self, count: int = 5) -> None:
        """Wait until so many more transfers have settled."""
        before = self.follower.settled

        def settled() -> bool:
            ended = [worker for worker in self.stage.workers.values() if not worker.alive]
            if ended:
                raise FaultError(f"worker {ended[0].name} ended: {ended[0].log.read_text()[-1_000:]}")
            return self.follower.settled >= before + count

        await until(settled, SERVED_S, what="transfers settle again")

    async def amid(self) -> None:
        """Return while long transfers are under way, so that the outage that follows meets them.

        A destination that catches up after the last outage may refuse them all; then they are asked for again.
        """
        self.outage, hashes = True, self.load.long()
        asked_at = time.monotonic()

        async def begun() -> bool:
            nonlocal asked_at
            if hashes & self.follower.begun:
                return True
            await self.load.hear(self.follower.ended)
            if self.load.all_refused(hashes) and time.monotonic() >= asked_at + ASK_AGAIN_S:
                hashes.update(self.load.long())
                asked_at = time.monotonic()
            return False

        await until(begun, SERVED_S, what="a long transfer has begun")

    async def repeat(self) -> None:
        """Ask again for what has settled: a broker that was killed has forgotten the ids of what left its queue."""
        again = await self.load.repeat(self.follower.ended)
        self.row.check(again, "no request could be sent again")

    async def reckon(self) -> None:
        """Wait until all is at rest, end the workers, and fill the row."""
        await self.load.stop()
        await self._until_ended()
        await self._at_rest()
        await self.stage.end_workers(self.row)
        await self._caught_up()
        self._count()
        await self._audit()

    async def _until_ended(self) -> None:
        """Wait until each request has an end; a refusal is told once, so that an outage may have swallowed it."""
        if await self._all_ended(HEARD_S):
            return
        if lost := self.load.missed(Notes.read(self.stage.notes).refused):
            self.row.notes.append(f"{lost} refusals did not reach their requester: they are told once")
        if unsure := await self.load.give_up_unsure(self.follower.begun):
            self.row.notes.append(f"{unsure} requesters were told that it is not known whether their request is queued")
        if not await self._all_ended(END_S):
            left = self.load.waiting(self.follower.ended)
            self.row.problems.append(f"{len(left)} requests were taken and never ended, as {left[:1]}")

    async def _all_ended(self, wait_s: float) -> bool:
        async def ended() -> bool:
            await self.load.hear(self.follower.ended)
            return not self.load.waiting(self.follower.ended)

        try:
            await until(ended, wait_s)
        except (AssertionError, TimeoutError):  # the latter where a look at it was under way
            return False
        return True

    async def _at_rest(self) -> None:
        """All pages must come back."""
        try:
            await self.stage.at_rest(deadline_s=2 * REST_S)
        except (AssertionError, TimeoutError) as error:
            self.row.problems.append(str(error) or "not at rest, and no counters were told")
            for name, worker in self.stage.workers.items():
                if worker.alive:
                    counters = await self.stage.counters(name)
                    out = counters["pages"] - counters["pages_free"] - counters["pages_cached"]
                    self.row.leaked_pages += max(out, counters["pages_lent"])

    async def _caught_up(self) -> None:
        """Give the follower the time to hear of the last event, and to find the gap where it did not."""
        said = Notes.read(self.stage.notes).said
        try:
            await until(lambda: said.keys() <= self.follower.seen.keys(), CAUGHT_UP_S)
        except AssertionError:
            return  # what is missing is counted

    def _count(self) -> None:
        self._count_requests()
        self._count_facts(Notes.read(self.stage.notes))
        self.row.problems += self.load.faults[:2]
        self.row.check(self.follower.alive, "the follower has ended")

    def _count_requests(self) -> None:
        row, outcomes = self.row, self.follower.outcomes
        settled = {body.request_hash for _, body in outcomes if body.outcome == "settled"}
        ended = self.follower.ended
        hashes = {one.request_hash: one for one in self.load.asked}
        row.requests = len(hashes)
        row.settled = len(settled & hashes.keys())
        row.refused = sum(one.refused for hash_, one in hashes.items() if hash_ not in ended)
        row.failed = row.requests - row.settled - row.refused
        why = Counter(f"{body.outcome} {body.failure}" for _, body in outcomes if body.outcome != "settled")
        row.notes += [f"{count} transfers {what}" for what, count in why.items()]
        why = Counter(one.why for one in hashes.values() if one.refused and one.why)
        row.notes += [f"{count} refused: {reason}" for reason, count in why.items()]
        if at_once := [one.answered_s for one in hashes.values() if one.why == UNASKED]:
            told = f"{statistics.median(at_once) * 1e3:.1f} ms, at most {max(at_once) * 1e3:.1f} ms"
            row.notes.append(f"without a connection a requester was told within {told}")

    def _count_facts(self, notes: Notes) -> None:
        row, seen, outcomes = self.row, self.follower.seen, self.follower.outcomes
        missing = [event_id for event_id in notes.said if event_id not in seen]
        if self.thrown_away_at:
            gone = [one for one in missing if notes.confirmed.get(one, float("inf")) < self.thrown_away_at]
            row.notes.append(f"{len(gone)} facts stood in the thrown-away store alone, and count as neither")
            missing = [one for one in missing if one not in set(gone)]
            row.facts_sent -= len(gone)
        row.facts_sent += len(notes.said)
        row.facts_seen = sum(event_id in seen for event_id in notes.said)
        row.facts_lost = len(missing)
        row.problems += [f"{missing[0]} was never seen"] if missing else []
        row.facts_twice = sum(self.follower.twice.values())
        again = applied_twice(seen.values())
        row.applied_twice = len(again)
        row.problems += again[:2]
        times = [
            notes.said[event_id] for event_id, body in outcomes if body.outcome == "settled" and event_id in notes.said
        ]
        row.pause_s = longest_pause(times, self.load.began, self.load.ended)
        waited = sum(notes.confirmed.get(one, at) - at > WAITED_S for one, at in notes.said.items())
        row.notes += [f"{waited} facts waited in outboxes for more than {WAITED_S:g} s"] if waited else []
        row.check(waited or not self.outage, "no fact had to wait for the broker: that proves nothing")
        unknown = [one for one in seen if one not in notes.said and one not in notes.tried]
        row.check(not unknown, f"{len(unknown)} events were seen that nobody said, as {unknown[:1]}")

    async def _audit(self) -> None:
        record, result = await audit_log(self.stage.bus, TOPICS)
        if self.injected:  # what is there once more is marked as a repeat: the record is that of the workers then
            at = self.injected
            marked = [replace(one, data=b"") if (one.family, one.sequence) in at else one for one in record.stored]
            record = replace(record, stored=marked)
            result = audit(record)
        ids = Counter(event.header.event_id for event in record.events())
        repeats = [one for one in record.stored if not one.data and (one.family, one.sequence) not in self.injected]
        stored_twice = len(repeats) + sum(count - 1 for count in ids.values())
        self.row.check(not stored_twice, f"{stored_twice} messages or events stand twice in the logs")
        self.row.facts_twice += stored_twice
        self.row.audit = result.verdict.value
        if result.verdict not in self.verdicts:
            self.row.problems.append(f"audit {result.verdict.value}: " + "; ".join(list(lines(result))[:3]))
