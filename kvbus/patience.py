"""Patience: asking again for what a restart, a drain or a moment's load has refused, until it is there or time is up.

Asking again is harmless: a destination joins a repeat to what runs, and says so of what has settled. What cannot pass
by itself (a source that is not allowed, a prompt that fits nothing) is not asked again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvbus.events import TransferOutcome
from kvbus.handles import TransferHandle, Verdict

PASSING_REASONS = ("draining:", "bus_unavailable:", "not_leading:", "waited:", "no instance ")
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


async def staged(ask: Callable[[], Awaitable[TransferHandle]], *, budget_s: float, patience_s: float) -> Staged:
    """Ask until it is settled, cannot help, or `patience_s` is spent; BusError where the broker refuses a request."""
    loop = asyncio.get_running_loop()
    ends_at, pause_s, tries = loop.time() + patience_s, PAUSE_S, 0
    while True:
        tries += 1
        handle = await ask()
        wait_s = min(max(0.0, ends_at - loop.time()), budget_s + ANSWER_SLACK_S)
        outcome = await handle.outcome(wait_s)
        verdict = await handle.verdict(0.0)
        last = Staged(verdict, outcome, tries)
        if last.settled or not may_pass(verdict, outcome) or loop.time() + pause_s >= ends_at:
            return last
        await asyncio.sleep(pause_s)
        pause_s = min(PAUSE_MAX_S, 2 * pause_s)
