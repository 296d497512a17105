"""Patience: asking again for what a restart, a drain or a moment's load has refused, until it is there or time is up.

Asking again is harmless: a destination joins a repeat to what runs, and says so of what has settled. What cannot pass
by itself (a source that is not allowed, a prompt that fits nothing) is not asked again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvbus.bus_access import DeniedError
from kvbus.errors import BusError
from kvbus.events import TransferOutcome
from kvbus.handles import LOST, UNASKED, TransferHandle, Verdict

ELECTION_REASONS = ("bus_unavailable:", "not_leading:")
"""How a destination's refusals begin that an election explains, of brokers or of its own members: seconds, mostly. So
does that of one whose facts or releases wait for a broker that is away."""
PASSING_REASONS = (*ELECTION_REASONS, "draining:", "waited:", "no instance ")
"""How the refusals begin that pass: an instance that leaves, is away for a moment, or chooses who takes its requests;
and a queue that was too long."""
PASSING_FAILURES = frozenset(
    {
        "shutdown",
        "peer_lost",
        "engine_lost",
        "binding_stopped",
        "transport",
        "lease_refused",
        "page_changed",
        "deadline",
        "contradiction",
    }
)
"""Ends of transfers whose source, or whose destination, was told to stop or has gone; those that load explains; and
those that the members of an instance have voided, as they do when one of them leaves: no page of them is used."""
PAUSE_S, PAUSE_MAX_S = 0.1, 2.0
"""Between two tries, doubled: a worker of the toy engine is back within a second, one with a model within many."""
ASK_PAUSE_S = 0.5
"""Between two tries to reach the bus: each waits some seconds itself for one that is silent, and less for one that
refuses."""
NO_SUCH_STREAM = 10059
"""JetStream's own number for a stream that does not exist; buckets are streams."""
ANSWER_SLACK_S = 5.0
"""Beyond a transfer's budget, until it counts as unheard: results are sent once, and may be lost with a connection."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What came of a request and its repeats: the last verdict, the outcome if there is one, how often it was asked."""

    verdict: Verdict
    outcome: TransferOutcome | None
    tries: int

    @property
    def settled(self) -> bool:
        """Whether the destination has the prompt, or the prefix that the source had."""
        return self.outcome is not None and self.outcome.outcome in {"settled", "partial"}


def may_pass(verdict: Verdict, outcome: TransferOutcome | None) -> bool:
    """Whether asking again may help; an outcome that was not heard may be heard by a repeat."""
    if outcome is not None:
        return outcome.failure in PASSING_FAILURES
    if verdict.verdict == "refused":
        return verdict.reason.startswith(PASSING_REASONS)
    return True


def _is_electing(verdict: Verdict) -> bool:
    """Whether a destination has refused because of an election; of what was lost on its way it said nothing."""
    lost = verdict.reason in {UNASKED, LOST}
    return verdict.verdict == "refused" and verdict.reason.startswith(ELECTION_REASONS) and not lost


def _is_final(error: BusError) -> bool:
    """Whether another try would say the same: there are no rights, or no streams."""
    return isinstance(error, DeniedError) or error.details.get("code") == NO_SUCH_STREAM


def _unsaid(_why: str) -> None:
    """Nobody looks."""


async def ask_until(
    ask: Callable[[], Awaitable[TransferHandle]], wait_s: float, say: Callable[[str], None] = _unsaid
) -> TransferHandle:
    """Put a request to the bus, again while a cluster elects a leader or the connection is lost, as long as the wait.

    It is the same prompt each time, so a request that got through unheard is joined by the next one. BusError is the
    last one's; at once where another try would say the same. `say` hears why it is put again.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + wait_s
    while True:
        try:
            handle = await ask()
            verdict = await handle.verdict(0.0)
            is_unasked = verdict.verdict == "refused" and verdict.reason == UNASKED
            if not is_unasked or loop.time() + ASK_PAUSE_S >= ends_at:
                return handle
            problem = verdict.reason
        except BusError as error:
            if _is_final(error) or loop.time() + ASK_PAUSE_S >= ends_at:
                raise
            problem = str(error)
        say(problem)
        await asyncio.sleep(ASK_PAUSE_S)


async def ended(
    ask: Callable[[], Awaitable[TransferHandle]],
    handle: TransferHandle,
    *,
    wait_s: float,
    outcome_s: float,
    say: Callable[[str], None] = _unsaid,
) -> tuple[TransferHandle, Verdict, TransferOutcome | None]:
    """Return how a request ends that was put, with the handle of the last try and its verdict.

    It is put again while its destination refuses because of an election, until `wait_s` is over. Any other refusal ends
    it, and so does that nobody can say whether it is queued. A try's outcome is waited for for `outcome_s`, also where
    it was put at the end of `wait_s`. `say` hears why it is put again; BusError as of `ask_until`.
    """
    loop = asyncio.get_running_loop()
    ends_at, pause_s = loop.time() + wait_s, PAUSE_S
    while True:
        verdict = await handle.verdict()
        outcome = await handle.outcome(outcome_s) if verdict.hopeful else None
        verdict = await handle.verdict(0.0)  # a refusal may have come late
        if not _is_electing(verdict) or loop.time() + pause_s >= ends_at:
            return handle, verdict, outcome
        say(f"{verdict.verdict}: {verdict.reason}")
        await asyncio.sleep(pause_s)
        pause_s = min(PAUSE_MAX_S, 2 * pause_s)
        handle = await ask_until(ask, ends_at - loop.time(), say)


async def staged(ask: Callable[[], Awaitable[TransferHandle]], *, budget_s: float, patience_s: float) -> Staged:
    """Ask until it is settled, cannot help, or `patience_s` is spent.

    A broker that takes no request now is asked again for as long; BusError where it says no more than that to the end.
    """
    loop = asyncio.get_running_loop()
    ends_at, pause_s, tries = loop.time() + patience_s, PAUSE_S, 0
    while True:
        tries += 1
        handle = await ask_until(ask, ends_at - loop.time())
        wait_s = min(max(0.0, ends_at - loop.time()), budget_s + ANSWER_SLACK_S)
        outcome = await handle.outcome(wait_s)
        verdict = await handle.verdict(0.0)
        last = Staged(verdict, outcome, tries)
        if last.settled or not may_pass(verdict, outcome) or loop.time() + pause_s >= ends_at:
            return last
        await asyncio.sleep(pause_s)
        pause_s = min(PAUSE_MAX_S, 2 * pause_s)
