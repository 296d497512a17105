"""Holes of the settle log: too old to be kept, lost with the broker's power, not heard by everybody (P14, P15, P25)."""

# ruff: noqa: SLF001 - what takes a rule out sits inside of what it spoils

from collections.abc import Sequence

from kvbus.ledger.council import Council
from kvbus.ledger.shares import ShareBook
from kvbus.roles import council as councils
from kvbus.roles.council import InstanceCouncil
from kvbus.testing.sim.councils import WatchedCouncil
from kvbus.testing.sim.holes.hole import Hole, Patch, patched, taken_out
from kvbus.testing.sim.holes.script import Script
from kvbus.testing.sim.holes.several import TWO, cut, ready

A = 1
LOG_S, HOUR_S = 10.0, 3_600.0


# --------------------------------------------------------------------------------------------------------------- P14


async def _term_is_trimmed(s: Script) -> None:
    s.broker.log_age_max_s = LOG_S
    with patched([(councils, "REFRESH_S", LOG_S * councils.REFRESH_S / HOUR_S)]):
        await ready(s)
        s.say(f"the log keeps {LOG_S:g} seconds here, for an hour, and minutes are as short")
        await s.pause(2.5 * LOG_S)
        newest = s.broker.last(s.broker.topics.settle("i1"))
        s.say(f"the log holds {'the term' if newest is not None else 'nothing any more'}; m0 leads, and is asked")
        outcome = await s.outcome(s.ask("i1", "i0", A))
        s.require(outcome.outcome == "settled", f"who leads was refused by its own log: {outcome.reason}")
        await s.rest()


def _written_once() -> Sequence[Patch]:
    """Write the record of a term once."""
    decide = InstanceCouncil._decide

    async def never_again(self: InstanceCouncil, council: Council) -> None:
        self._refresh_at = float("inf")
        await decide(self, council)

    return [(InstanceCouncil, "_decide", never_again)]


# --------------------------------------------------------------------------------------------------------------- P15


async def _half_applied_and_dropped(s: Script) -> None:
    await ready(s)
    word = s.gate("visible", mode="drop", to="i1/1")
    request = s.ask("i1", "i0", A)
    await s.caught(word)
    cut(s, "i1/1", off=True)
    await s.outcome(request)
    s.staged(s.held("i1", A) == 8 and not s.held("i1/1", A), "m0 should show A, and m1 not have heard of it")
    s.broker.forget_last("i1")
    s.say("m0 shows A; the broker lost the decision with its power, and m1 never heard it")
    cut(s, "i1/1", off=False)
    await s.until("m1 has applied an end", lambda: not s.parts("i1/1").council.book.live)  # type: ignore[union-attr]
    s.require(s.held("i1/1", A) == 8, "m0 shows A, and m1 was told to give it up")
    await s.rest()


def _ends_are_not_kept() -> Sequence[Patch]:
    """Tell a new coordinator what is under way, and nothing of what was ended."""
    return [(ShareBook, "rows", lambda self: list(self._shares.values()))]


# --------------------------------------------------------------------------------------------------------------- P25


async def _last_word_is_lost(s: Script) -> None:
    await ready(s)
    word = s.gate("visible", mode="drop", to="i1/1")
    request = s.ask("i1", "i0", A)
    await s.caught(word)
    await s.outcome(request)
    await s.pause(5.0)
    s.require(s.held("i1/1", A) == 8, "m0 shows A, and m1 never hears that it may")
    await s.rest()


def _no_head_in_heartbeats() -> Sequence[Patch]:
    """Say nothing of the log in heartbeats."""
    return [(WatchedCouncil, "load", lambda _self, heartbeat: heartbeat)]


HOLES = (
    Hole(
        "P14",
        "the term's record grows older than the log keeps",
        "it was written again well before, and the log still named who leads",
        _term_is_trimmed,
        taken_out(_written_once),
        "was refused by its own log",
        settings=TWO,
    ),
    Hole(
        "P15",
        "a half-applied decision is lost with the broker's power",
        "whoever had applied it told so, and it was decided again in the same words",
        _half_applied_and_dropped,
        taken_out(_ends_are_not_kept),
        "m1 was told to give it up",
        settings=TWO,
    ),
    Hole(
        "P25",
        "the last live decision is lost",
        "the next heartbeat named the log's head, and the member read it",
        _last_word_is_lost,
        taken_out(_no_head_in_heartbeats),
        "m1 never hears that it may",
        settings=TWO,
    ),
)
