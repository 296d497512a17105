"""Faults of fencing: who may be fenced, what that proves, and what is written where a fenced reader may read."""

from collections.abc import Sequence

from kvbus.dataplane.lending import LendingBackend
from kvbus.ledger.facts import Fact
from kvbus.ledger.held import Held
from kvbus.pool.fences import Fences
from kvbus.testing.sim.plants.plant import Change, plant


@plant("a reader is fenced without isolation", "P5", check="fencing")
def fence_without_isolation() -> Sequence[Change]:
    """Fence whoever is asked for, though new leases may go there at once."""
    refuses = LendingBackend.fence_refusal

    def whoever(self: LendingBackend, ticket: int, attempt: int) -> str:
        refusal = refuses(self, ticket, attempt)
        return "" if "not isolated" in refusal else refusal

    return [(LendingBackend, "fence_refusal", whoever)]


@plant("a reader that does not look is fenced", "P5", check="fencing")
def fence_who_does_not_look() -> Sequence[Change]:
    """Fence an isolated reader that delivers what it has read without another look at generations."""

    def whoever_is_isolated(self: LendingBackend, ticket: int, attempt: int) -> str:
        lent = self._find(ticket, attempt)
        if lent is None or not self._isolation.refuses(lent.reader.key.instance, lent.reader.key.epoch):
            return "it is not isolated"
        return ""

    return [(LendingBackend, "fence_refusal", whoever_is_isolated)]


@plant("a fence is taken for the end of access", "P5, contract 41", check="fencing")
def fence_is_access_end() -> Sequence[Change]:
    """Report of a fenced lease that nobody touches it any more."""
    fence = Held.fence

    def and_end(self: Held) -> None:
        fence(self)
        self.bits |= int(Fact.ACCESS_ENDED | Fact.EVIDENCE_PEER_ACK)

    return [(Held, "fence", and_end)]


@plant("a fenced reader's pages take another tenant's content", "P5", check="fencing")
def fence_across_tenants() -> Sequence[Change]:
    """Write whatever comes next into pages that a fenced reader may read."""
    return [(Fences, "barred", lambda _self, _salt: [])]
