"""Holes of the durable queue: an ack that comes late, a request forgotten or offered again (P20-P22)."""

# ruff: noqa: SLF001, ANN401 - what takes a rule out sits inside of what it spoils, and hands on what it does not use

from collections.abc import Sequence
from typing import Any

from kvbus.ledger.admission import AdmissionGate
from kvbus.roles.intake import Intake
from kvbus.testing.sim.holes.gates import ACK
from kvbus.testing.sim.holes.hole import Hole, Patch, taken_out
from kvbus.testing.sim.holes.script import Script

A, B, C = 1, 2, 3
OUTAGE_S = 12.5
"""Longer than the queue waits for a sign of life; over between two of those, which would come too late."""


def _transfers(s: Script, instance: str, request_hash: str) -> list[str]:
    """Return the transfers of a request that an instance runs now."""
    running = s.parts(instance).destination._running.values()
    return [one.transfer.transfer for one in running if one.request.request_hash == request_hash]


async def _stale_ack(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    await s.cached("i0", B)
    await s.cached("i0", C)
    gets = s.stall("i1", "_half")
    busy = [s.ask("i1", "i0", document, budget_s=30.0) for document in (B, C)]
    await s.until("both places are taken", lambda: s.parts("i1").reader.open == len(busy))
    ack = s.gate(ACK)
    request = s.ask("i1", "i0", A, queued=True, budget_s=30.0)
    await s.caught(ack)
    s.say(f"delivery 1 of {request.request_id} was skipped as busy; its ack is under way")
    gets.open()
    for one in busy:
        await s.outcome(one)
    gets = s.stall("i1", "_half")
    await s.until("delivery 2 runs", lambda: bool(gets.held))
    s.say("delivery 2 runs; now the ack of delivery 1 arrives and takes the request off the queue")
    ack.open()
    s.staged(not s.broker.queued, "the stale ack should have freed the subject")
    s.ask("i1", "i0", A, queued=True, budget_s=30.0, request_id="again")
    await s.until("the third one is answered", lambda: any(one.request_id == "again" for one in s.verdicts))
    runs = _transfers(s, "i1", request.request_hash)
    s.require(len(runs) == 1, f"one request runs {len(runs)} times: {', '.join(runs)}")
    gets.open()
    outcome = await s.outcome(request)
    s.require(outcome.outcome == "settled", f"delivery 2 should have ended well: {outcome.reason}")
    await s.rest()


def _the_queue_is_the_claim() -> Sequence[Patch]:
    """Let a hash run as often as the queue takes it, since the queue takes it only once."""

    def repeat(self: AdmissionGate, request_hash: str, *, request_id: str, source: str, now: float) -> Any:
        del request_hash, request_id, now
        refusal = self._source_refusal(source)
        return self.refuse(refusal) if refusal else None

    return [(AdmissionGate, "repeat", repeat), (AdmissionGate, "same_content", lambda _self, _hash, _name: None)]


async def _forgotten_by_the_queue(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    gets = s.stall("i1", "_half")
    request = s.ask("i1", "i0", A, queued=True, budget_s=30.0)
    await s.stalled(gets)
    await s.pause(5.0)
    (waiting,) = next(iter(s.broker._queue.values())).values()
    s.broker.remove(waiting)
    s.say("the queue forgets the running request, older than its max_age, and takes it again")
    s.ask("i1", "i0", A, queued=True, budget_s=30.0, request_id="again")
    await s.until("it is answered", lambda: any(one.request_id == "again" for one in s.verdicts))
    runs = _transfers(s, "i1", request.request_hash)
    s.require(len(runs) == 1, f"one request runs {len(runs)} times: {', '.join(runs)}")
    gets.open()
    outcome = await s.outcome(request)
    s.require(outcome.outcome == "settled", f"it should have ended well: {outcome.reason}")
    await s.rest()


def _claims_expire() -> Sequence[Patch]:
    """Forget a claim after its time, though its transfer still runs."""

    def forget(self: AdmissionGate, now: float) -> None:
        for request_hash, entry in list(self._entries.items()):
            if now - entry.accepted_at >= self._dedup_ttl_s:
                self._drop(request_hash)

    return [
        (AdmissionGate, "_forget_expired", forget),
        (AdmissionGate, "same_content", lambda _self, _hash, _name: None),
    ]


async def _redelivered_after_an_outage(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    gets = s.stall("i1", "_half")
    request = s.ask("i1", "i0", A, queued=True, budget_s=60.0)
    await s.stalled(gets)
    s.broker.stop(keep_store=True)
    await s.pause(OUTAGE_S)
    s.broker.start()
    before = len(s.verdicts)
    await s.until("it is delivered again and answered", lambda: len(s.verdicts) > before)
    runs = _transfers(s, "i1", request.request_hash)
    s.require(len(runs) == 1, f"request {request.request_id} runs {len(runs)} times: {', '.join(runs)}")
    gets.open()
    outcome = await s.outcome(request)
    s.require(outcome.outcome == "settled", f"it should have ended well: {outcome.reason}")
    await s.rest()


async def _sent_again_after_its_end(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    request = s.ask("i1", "i0", A, queued=True)
    outcome = await s.outcome(request)
    s.staged(outcome.outcome == "settled", f"it should have ended well: {outcome.reason}")
    await s.pause(2.0)
    fired = s.parts("i1").gate.statistics().fired
    s.broker.stop(keep_store=False)
    s.broker.start()
    await s.pause(4.0)  # until all are registered again
    s.say("the broker was killed and forgot the id of the request that was acked; its requester sends it once more")
    s.ask("i1", "i0", A, queued=True, request_id=request.request_id)
    await s.pause(3.0)
    again = s.parts("i1").gate.statistics().fired - fired
    s.require(again == 0, f"request {request.request_id} had ended, and ran once more")
    await s.rest()


def _each_delivery_is_new() -> Sequence[Patch]:
    """Know a request by its place in the queue, not by its requester's own id."""
    request_in = Intake._request_in
    numbers = iter(range(1_000))

    def under_another_id(self: Intake, event: Any) -> Any:
        request = request_in(self, event)
        return request.model_copy(update={"request_id": f"{request.request_id}-{next(numbers)}"})

    changes: list[Patch] = [(Intake, "_request_in", under_another_id)]
    return [*changes, *_the_queue_is_the_claim()]


def _ends_are_forgotten() -> Sequence[Patch]:
    """Remember of a request that ended nothing but its hash, for a while."""
    ended = AdmissionGate.ended

    def forgotten(self: AdmissionGate, request_hash: str, *, settled: bool) -> None:
        ended(self, request_hash, settled=settled)
        self._ended.clear()

    return [(AdmissionGate, "ended", forgotten)]


HOLES = (
    Hole(
        "P20",
        "a stale ack arrives while delivery 2 runs",
        "the claim refused what the queue took again: the request ran once",
        _stale_ack,
        taken_out(_the_queue_is_the_claim),
        "which asks for the same",
        settings={"inflight_max": 2},
    ),
    Hole(
        "P21",
        "the queue forgets a running request and takes it again",
        "the claim lasted as long as its transfer: the request ran once",
        _forgotten_by_the_queue,
        taken_out(_claims_expire),
        "which asks for the same",
    ),
    Hole(
        "P22",
        "a request is delivered again after the broker's outage",
        "the running transfer was adopted: the request ran once",
        _redelivered_after_an_outage,
        taken_out(_each_delivery_is_new),
        "which asks for the same",
    ),
    Hole(
        "P22",
        "a request is sent again after the broker forgot that it was acked",
        "the ended transfer was adopted: the request ran once",
        _sent_again_after_its_end,
        taken_out(_ends_are_forgotten),
        "was delivered again and runs a second time",
    ),
)
