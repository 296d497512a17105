"""Holes between the members of one instance: who leads, who shows what, who has heard of it (P10-P13, P17).

Instances have two members here, m0 and m1, one rank each; their keys in a script are i1 and i1/1.
"""

# ruff: noqa: SLF001, ANN401 - what takes a rule out sits inside of what it spoils, and hands on what it does not use

from collections.abc import Sequence
from typing import Any

from kvbus.events import SettleDecided, SettleVoided, encode
from kvbus.ledger.agreement import Decision
from kvbus.ledger.council import Council
from kvbus.ledger.facts import Fact
from kvbus.ledger.shares import ShareBook, ShareStage
from kvbus.roles.council import InstanceCouncil
from kvbus.roles.decisions import body_of
from kvbus.roles.settle_log import SettleLog
from kvbus.testing.sim.holes.hole import Hole, Patch, taken_out
from kvbus.testing.sim.holes.script import Script

A, B = 1, 2
TWO = {"ranks": 2}
LOG_S, DAY_S = 10.0, 86_400.0
BOTH = ("i1", "i1/1")


async def ready(s: Script) -> None:
    """Have both members of i0 hold A, and m0 of i1 lead."""
    await s.up()
    for member in ("i0", "i0/1"):
        await s.cached(member, A)
    await s.until("m0 leads i1, and takes requests", lambda: bool(s.parts("i1").intake._requests))


def _stage(s: Script, member: str) -> ShareStage | None:
    """Return how far the one transfer got at a member."""
    council = s.parts(member).council
    share = next((share for share in council.book._shares.values()), None) if council is not None else None
    return share.stage if share is not None else None


def cut(s: Script, member: str, *, off: bool) -> None:
    """Let everything that a member sends or should hear vanish, or no more."""
    s.say(f"{s.member(member).process.name} {'can hear nobody' if off else 'hears again'}")
    s.member(member).bus.hole = off


# --------------------------------------------------------------------------------------------------------------- P10


async def _rank_lags(s: Script) -> None:
    await ready(s)
    settle = s.gate("settle", mode="drop", to="i1/1")
    request = s.ask("i1", "i0", A)
    await s.caught(settle)
    cut(s, "i1/1", off=True)
    await s.pause(4.0)
    s.require(not s.held("i1", A), "m0 shows A, and m1 has not applied its settle")
    cut(s, "i1/1", off=False)
    outcome = await s.outcome(request)
    s.staged(outcome.outcome == "settled", f"A should have come: {outcome.reason}")
    await s.until("both show A", lambda: all(s.held(one, A) == 8 for one in BOTH))
    await s.rest()


def _settled_is_shown() -> Sequence[Patch]:
    """Let names show once the settle stands in the log, whoever has applied it."""
    about = Council._about

    def hasty(self: Council, now: float, case: Any) -> Decision | None:
        if case.stage is ShareStage.SETTLED:
            return self._word("visible", case, self._shares_in(case))
        return about(self, now, case)

    return [(Council, "_about", hasty)]


# --------------------------------------------------------------------------------------------------------------- P11


async def _expires_after_its_promise(s: Script) -> None:
    await ready(s)
    word = s.gate("visible", mode="drop", to="i1/1")
    request = s.ask("i1", "i0", A, budget_s=2.0)
    await s.caught(word)
    cut(s, "i1/1", off=True)
    await s.outcome(request)
    await s.pause(8.5)
    s.say("the budget of m1 is spent, and it does not know that m0 shows A")
    cut(s, "i1/1", off=False)
    await s.until("m1 has applied the end", lambda: not s.parts("i1/1").council.book.live)  # type: ignore[union-attr]
    s.require(all(s.held(one, A) == 8 for one in BOTH), "m0 shows A, and m1 has given it up")
    await s.rest()


def _promises_expire() -> Sequence[Patch]:
    """Let a member give up by its own deadline what it has promised to keep."""
    return [(ShareBook, "may_give_up", lambda _self, _transfer: True)]


# --------------------------------------------------------------------------------------------------------------- P12


async def _nobody_told_the_others(s: Script) -> None:
    await ready(s)
    s.compute("i1/1", B)
    await s.pause(0.5)
    s.say("m1 has used tickets of its own for other things: the same numbers mean nothing at m0")
    outcome = await s.outcome(s.ask("i1", "i0", A, budget_s=5.0))
    s.require(outcome.outcome == "settled", f"m1 never began to bring its rank of A: {outcome.reason}")
    settled = next(event.body for event in s.decided("i1") if isinstance(event.body, SettleDecided))
    tickets = {member: ticket for member, _, _, ticket in settled.members}
    s.staged(tickets["m0"] != tickets["m1"], "the tickets should differ")
    await s.rest()


def _only_who_asked_begins() -> Sequence[Patch]:
    """Begin a transfer where it was admitted, and nowhere else."""

    def begin(self: InstanceCouncil, share: Any) -> None:
        opened = self._waiting.get(share.transfer)
        if opened is not None and not opened.done():
            opened.set_result("")

    return [(InstanceCouncil, "_begin", begin)]


# --------------------------------------------------------------------------------------------------------------- P13


async def _zombie_decides(s: Script) -> None:
    await ready(s)
    request = s.ask("i1", "i0", A, budget_s=60.0)

    def m0_would_show() -> bool:
        known = s.parts("i1").council._council._known.get("m1")  # type: ignore[union-attr]
        return known is not None and any(one.stage is ShareStage.SETTLED for one in known.shares.values())

    await s.until("m0 knows that m1 has promised", m0_would_show)
    s.staged(_stage(s, "i1") is ShareStage.SETTLED, "m0 should have promised, and shown nothing")
    cut(s, "i1", off=True)
    zombie = s.freeze("i1")
    await s.until("m1 leads i1, and has voided", lambda: isinstance(s.decided("i1")[-1].body, SettleVoided))
    s.say("m1 leads now, and has voided A; m0 wakes, and would show it")
    s.thaw(zombie)
    cut(s, "i1", off=False)
    await s.pause(3.0)
    s.require(not s.held("i1", A), "m0 shows A, which its successor has voided")
    await s.outcome(request)
    await s.rest()


def _no_fence() -> Sequence[Patch]:
    """Append without saying behind which message."""

    async def anywhere(self: SettleLog, decision: Decision) -> bool:
        body = body_of(decision)
        header = self._header(body.KIND)
        answer: Any = await self._bus.store(self._subject, encode(header, body), message_id=header.event_id)
        self.sequence = answer.sequence
        return True

    return [(SettleLog, "append", anywhere)]


# --------------------------------------------------------------------------------------------------------------- P17


async def _two_words_of_one_member(s: Script) -> None:
    await ready(s)
    request = s.ask("i1", "i0", A)

    def m1_has_all() -> bool:
        council = s.parts("i1/1").council
        return council is not None and any(share.complete for share in council.book._shares.values())

    await s.until("m1 has its rank of A", m1_has_all)
    s.staged(_stage(s, "i1/1") is ShareStage.OPEN, "nothing should have been decided yet")
    (ticket,) = s.parts("i1/1").rounds.holder.tickets()
    s.say("m1 has said that its rank of A arrived; now a fact says that it failed")
    s.parts("i1/1").council.note(ticket, int(Fact.FAILED), 0, 8)  # type: ignore[union-attr]
    await s.outcome(request)
    shown = any(s.held(one, A) for one in BOTH)
    s.require(not shown, "m1 said that its rank of A arrived and that it failed, and A is shown")
    await s.rest()


def _one_of_them_will_do() -> Sequence[Patch]:
    """Settle what was delivered, whatever else was said of it."""
    obstacle = Council._obstacle

    def none(self: Council, now: float, case: Any, shares: Any) -> str:
        text = obstacle(self, now, case, shares)
        return "" if text.endswith("two different results") else text

    return [(Council, "_obstacle", none)]


HOLES = (
    Hole(
        "P10",
        "rank 0 applies the settle, rank 1 lags",
        "nothing was shown before both had promised",
        _rank_lags,
        taken_out(_settled_is_shown),
        "is shown, and at i1/",
        settings=TWO,
    ),
    Hole(
        "P11",
        "a member's deadline passes between its promise and the word to show",
        "it kept what it had promised, and showed it when it heard the word",
        _expires_after_its_promise,
        taken_out(_promises_expire),
        "is shown, and was given up before",
        settings=TWO,
    ),
    Hole(
        "P12",
        "one member is asked, and the others have to begin",
        "the open in the log told each to begin, and each settled under its own ticket",
        _nobody_told_the_others,
        taken_out(_only_who_asked_begins),
        "m1 never began to bring its rank",
        settings=TWO,
    ),
    Hole(
        "P13",
        "a coordinator that was replaced wakes and decides",
        "the fence refused it, and it followed its successor",
        _zombie_decides,
        taken_out(_no_fence),
        "is shown, and at i1/",
        settings=TWO,
    ),
    Hole(
        "P17",
        "a member's facts say that its rank arrived and that it failed",
        "a contradiction is a failure: it was voided everywhere",
        _two_words_of_one_member,
        taken_out(_one_of_them_will_do),
        "and A is shown",
        settings=TWO,
    ),
)
