"""Holes of agreement, as far as one member goes: what becomes visible when, and who said what (P10-P12, P15-P17).

What lies between several members of an instance has its place in the catalog.
"""

# ruff: noqa: SLF001, ANN401 - what takes a rule out sits inside of what it spoils, and hands on what it does not use

from collections.abc import Sequence
from typing import Any

from kvbus.errors import BusError
from kvbus.events import SettleDecided, SettleVoided, TransferOpened
from kvbus.ledger.facts import RESULT_BITS, Evidence, FailureClass
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Change, Delivered, Failed
from kvbus.names import epoch_counter
from kvbus.roles import registry
from kvbus.roles.poolside import PoolSide
from kvbus.roles.recorder import Recorder
from kvbus.roles.rounds import Rounds
from kvbus.testing.sim import member as members
from kvbus.testing.sim.holes.hole import Hole, Patch, taken_out
from kvbus.testing.sim.holes.script import Script

A, B = 1, 2
OTHERS = range(10, 15)
"""Five long prompts: as many pages as the pool has."""


# --------------------------------------------------------------------------------------------------------------- P10


async def _hit_evicted_while_planned(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    await s.cached("i1", A, tokens=16)
    question = s.gate("lend_requested", "i1")
    request = s.ask("i1", "i0", A)
    await s.caught(question)
    s.say("i1 has planned: four blocks of A are here, four are to come; now its engine wants the whole pool")
    s.fill("i1", OTHERS)
    await s.pause(0.5)
    await s.idle("i1")
    question.open()
    outcome = await s.outcome(request)
    held = s.held("i1", A)
    s.staged(outcome.pages_moved == 4, f"the missing half should have come: {outcome.reason}")
    s.require(held == 8, f"A is told to be whole at i1, and {held} of its 8 leading blocks are there")
    await s.rest()


def _hits_are_not_pinned() -> Sequence[Patch]:
    """Plan with pages that are here, and do not keep them."""
    return [(PoolSide, "kept", lambda self, _pages: self.lender.pin_set())]


# --------------------------------------------------------------------------------------------------------------- P11


async def _late_result_of_the_abandoned(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    gets = s.stall("i1", "_half", "_closed")
    outcome = await s.outcome(s.ask("i1", "i0", A, budget_s=1.0))
    s.staged(outcome.outcome == "failed", f"it should have been given up: {outcome.reason}")
    s.say("i1 has told that A failed; now the rest of it arrives whole")
    gets.open()
    await s.until("the lease of A has ended", lambda: not s.parts("i1").rounds.holder.tickets())
    held = s.held("i1", A)
    s.require(held == 0, f"i1 told that A failed, and {held} blocks of it became content after that")
    await s.until("the decision is stored", lambda: len(s.decided("i1")) >= 2)
    s.require(isinstance(s.decided("i1")[-1].body, SettleVoided), "what was abandoned was settled")
    await s.rest()


def _waits_on_quietly() -> Sequence[Patch]:
    """Stop waiting without saying so: what comes later counts as if nothing had been given up."""

    def only_cancel(self: LeaseHolder, ticket: int, failure: FailureClass, text: str) -> None:
        del failure
        self.cancel(ticket, text)

    return [(LeaseHolder, "abandon", only_cancel)]


# --------------------------------------------------------------------------------------------------------------- P12


async def _question_before_open(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    question = s.gate("lend_requested", "i1")
    request = s.ask("i1", "i0", A)
    await s.caught(question)
    await s.pause(1.0)
    opens = [event.body for event in s.decided("i1") if isinstance(event.body, TransferOpened)]
    ticket = max(s.parts("i1").rounds.holder.tickets())
    named = any(ticket in party for body in opens for party in body.members)
    s.require(named, f"the question for A left i1, and no open of its log names the transfer's ticket T{ticket}")
    question.open()
    await s.outcome(request)
    await s.until("the decision is stored", lambda: len(s.decided("i1")) >= 2)
    settled = s.decided("i1")[-1].body
    s.require(
        isinstance(settled, SettleDecided) and settled.members == opens[-1].members,
        "the settle names other parties than the open",
    )
    await s.rest()


def _nothing_is_opened() -> Sequence[Patch]:
    """Lease and ask, and fix nowhere who takes part with which ticket."""
    return [(Rounds, "decide", lambda _self, _make: None)]


# --------------------------------------------------------------------------------------------------------------- P15


async def _decided_during_an_outage(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    await s.cached("i0", B)
    gets = s.stall("i1", "_half")
    s.ask("i1", "i0", A)
    await s.stalled(gets)
    await s.until("the open is stored", lambda: len(s.decided("i1")) == 1)
    s.broker.stop(keep_store=True)
    gets.open()
    await s.until("A is settled at i1", lambda: s.held("i1", A) == 8)
    await s.pause(1.0)
    s.broker.start()
    await s.pause(3.0)
    second = await s.outcome(s.ask("i1", "i0", B))
    s.staged(second.outcome == "settled", f"B should have come: {second.reason}")
    await s.until("the settle of B is stored", lambda: isinstance(s.decided("i1")[-1].body, SettleDecided))
    before = ""
    for event in s.decided("i1"):
        body = event.body
        if isinstance(body, TransferOpened | SettleDecided | SettleVoided):
            ends = before or "nowhere"
            s.require(body.previous == before, f"decision {body.n} follows {body.previous}, and the log ends {ends}")
            before = f"{body.term}.{body.n}"
    await s.rest()


def _said_into_the_outage() -> Sequence[Patch]:
    """Try to store each event once."""

    async def once(self: Recorder, lane: Any, data: bytes, sequence: int) -> None:
        try:
            await self._bus.store(lane.subject, data, message_id=f"{self._name}.{sequence}")
        except BusError:
            return

    return [(Recorder, "_store", once)]


# --------------------------------------------------------------------------------------------------------------- P16


async def _epoch_counted_again(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    first = s.parts("i0").epoch
    grant = s.gate("lend_answered", "i0")
    request = s.ask("i1", "i0", A)
    await s.caught(grant)
    s.broker.stop(keep_store=False)
    s.broker.start()
    s.broker.life -= 1  # the connection outlived that: the held answer may still come
    before = s.kill("i0")
    after = await s.restarted("i0")
    again = s.parts("i0").epoch
    s.staged(epoch_counter(first) == epoch_counter(again), "the counter should have come twice")
    await s.cached("i0", B)
    s.truth.take_place(before.process, after.process)
    s.say("i0's epochs were forgotten, so it counts the same one again; B stands where A stood; the old grant arrives")
    grant.open()
    outcome = await s.outcome(request)
    s.require(not s.held("i1", A), "pages of A at i1 were read under a grant of i0's last run")
    s.staged(outcome.failure == "page_changed", f"the reads should have found other pages, not {outcome.reason}")
    await s.rest()


def _counters_alone() -> Sequence[Patch]:
    """Make epochs of a counter and nothing else."""
    take = registry.next_epoch

    async def without_nonce(*args: Any, **more: Any) -> int:
        return await take(*args, **{**more, "nonce": lambda _bits: 0})

    return [(members, "next_epoch", without_nonce)]


# --------------------------------------------------------------------------------------------------------------- P17


async def _two_results(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    gets = s.stall("i1", "_land")
    request = s.ask("i1", "i0", A)
    await s.stalled(gets)
    (ticket,) = s.parts("i1").rounds.holder.tickets()
    outbox = s.parts("i1").reader._outbox
    s.say("half of A has arrived; the transport says that it failed, and then that all of it arrived")
    outbox.report(Change(ticket, 1, Failed(FailureClass.TRANSPORT, "the link broke")))
    await s.pause(0.1)
    outbox.report(Change(ticket, 1, Delivered((True,) * 8, 256), Evidence.COMPLETED))
    await s.pause(0.1)
    s.require(s.held("i1", A) == 0, "half-written pages became content by a result after the result")
    s.require(bool(s.parts("i1").rounds.holder.tickets()), "evidence of a transport that contradicts itself counted")
    await s.outcome(request)
    gets.open()
    await s.pause(1.0)
    s.check()
    s.kill("i1")
    await s.restarted("i1")
    await s.rest()


def _the_last_word_counts() -> Sequence[Patch]:
    """Let a later result take the place of an earlier one."""

    def believe(self: LeaseHolder, _binding: Any, change: Change) -> None:
        held = self._held.get(change.ticket)
        if held is None:
            return
        if change.result is not None:
            held.bits &= ~RESULT_BITS
            held.closed = False
            held.said = change.result
            self._take_result(held, change.result, change.text)
        if change.evidence is not None and held.attempt_open:
            held.binding.open_attempts -= 1
            held.end_attempt(change.evidence)
        self._touch(held)

    return [(LeaseHolder, "_observe", believe)]


HOLES = (
    Hole(
        "P10",
        "a hit is evicted between planning and the arrival of the rest",
        "hits were pinned from planning on: the prompt was whole when that was told",
        _hit_evicted_while_planned,
        taken_out(_hits_are_not_pinned),
        "A is told to be whole at i1, and 0 of its 8",
    ),
    Hole(
        "P11",
        "a result comes after its transfer was abandoned",
        "the late result was voided: nothing of it became content",
        _late_result_of_the_abandoned,
        taken_out(_waits_on_quietly),
        "i1 told that A failed, and",
    ),
    Hole(
        "P12",
        "a source is asked before anybody knows who takes part",
        "the log named parties and tickets before the question left, and settled the same",
        _question_before_open,
        taken_out(_nothing_is_opened),
        "no open of its log names the transfer's ticket",
    ),
    Hole(
        "P15",
        "a decision falls into the broker's outage",
        "it was stored after the outage, before the next one: each names the one before",
        _decided_during_an_outage,
        taken_out(_said_into_the_outage),
        "decision 3 follows",
    ),
    Hole(
        "P16",
        "the store is rolled back and an epoch counted again",
        "the nonce made it another epoch: the old grant read nothing that counts",
        _epoch_counted_again,
        taken_out(_counters_alone),
        "wrong bytes",
    ),
    Hole(
        "P17",
        "a transport reports two results for one attempt",
        "the first result stood, its evidence counted no more, and the lease was kept",
        _two_results,
        taken_out(_the_last_word_counts),
        "lost the bits",
    ),
)
