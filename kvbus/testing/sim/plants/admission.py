"""Faults of admission, of the queue's end, and of what a transfer hears of its own leases."""

# ruff: noqa: SLF001, ANN401 - a fault sits inside of what it spoils, and hands on what it does not look at

from collections.abc import Sequence
from typing import Any

from kvbus.errors import PeerError
from kvbus.ledger.admission import Admission, AdmissionGate
from kvbus.roles.admitting import Offer
from kvbus.roles.destination import Destination
from kvbus.roles.intake import Intake
from kvbus.testing.sim.plants.plant import Change, plant


@plant("failures are not counted", "R24")
def lose_a_failure() -> Sequence[Change]:
    """Forget to count a transfer that did not settle."""
    ended = AdmissionGate.ended

    def uncounted(self: AdmissionGate, request_hash: str, *, settled: bool) -> None:
        ended(self, request_hash, settled=settled)
        if not settled:
            self._counts["failed"] -= 1

    return [(AdmissionGate, "ended", uncounted)]


@plant("facts of half of the tickets are dropped", "contract 45")
def drop_facts() -> Sequence[Change]:
    """Drop the facts of half of the tickets on their way to the transfers."""
    on_line = Destination.on_line

    def half(self: Destination, ticket: int, *args: Any) -> None:
        if ticket % 2:
            on_line(self, ticket, *args)

    return [(Destination, "on_line", half)]


@plant("a request is acked before its transfer has ended", "P20")
def ack_early() -> Sequence[Change]:
    """Take a request off the queue as soon as it has its verdict."""

    async def at_once(self: Intake, claim: Any) -> None:
        try:
            event, request = self._work_in(claim.work)
        except PeerError:
            await self._finish(claim)
            return
        verdict, _ = await self._destination.request(request, Offer(event.header.t / 1e9))
        await self._destination.results.tell_verdict(request, verdict)
        await self._finish(claim)

    return [(Intake, "_work", at_once)]


@plant("whoever hears a running request again acks it", "P20, P22", weathers=("stalled", "usual"))
def ack_for_another() -> Sequence[Change]:
    """Let a second delivery, which joins the first one's transfer, take the request off the queue."""
    work_ = Intake._work

    async def unless_first(self: Intake, claim: Any) -> None:
        if claim.work.attempt == 1:
            await work_(self, claim)
        else:
            await self._finish(claim)

    return [(Intake, "_work", unless_first)]


@plant("a claim ends with the dedup time", "P21")
def claim_expires() -> Sequence[Change]:
    """Forget a request after its time, although it still runs."""

    def whatever_runs(self: AdmissionGate, now: float) -> None:
        old = [key for key, entry in self._entries.items() if now - entry.accepted_at >= self._dedup_ttl_s]
        for request_hash in old:
            self._drop(request_hash)

    return [(AdmissionGate, "_forget_expired", whatever_runs)]


@plant("a redelivery starts the transfer again", "P22")
def redelivery_runs_again() -> Sequence[Change]:
    """Know a request by its hash only: what failed runs anew when the queue offers it again."""
    repeat = AdmissionGate.repeat

    def forgetful(self: AdmissionGate, request_hash: str, **options: Any) -> Admission | None:
        self._ended.clear()
        return repeat(self, request_hash, **options)

    return [(AdmissionGate, "repeat", forgetful)]
