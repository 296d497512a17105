"""The members' agreement, watched: the real council, each of whose decisions is held against what the others hold.

What is watched is what no member can see by itself: that nobody shows pages before all have promised to keep theirs
(P10), that one transfer ends one way everywhere (P11, P15), that a coordinator that was replaced decides nothing (P13).
"""

from dataclasses import dataclass, field

from kvbus.events import HeartbeatSeen
from kvbus.ledger.agreement import Decision
from kvbus.ledger.council import Council
from kvbus.ledger.facts import Fact
from kvbus.ledger.shares import Acts, Heard, ShareStage
from kvbus.roles.council import InstanceCouncil
from kvbus.testing.sim.bus import SimBus
from kvbus.testing.sim.trail import Trail
from kvbus.testing.sim.truth import SimProcess

Run = tuple[str, str, int]
"""Instance, member and epoch."""

_PROMISED = frozenset({ShareStage.SETTLED, ShareStage.VISIBLE})


def member_name(rank: int) -> str:
    """Return the name of the member that serves a rank."""
    return f"m{rank}"


@dataclass(slots=True)
class Councils:
    """Every run of every member so far."""

    runs: "dict[Run, WatchedCouncil]" = field(default_factory=dict)
    shown: dict[str, Run] = field(default_factory=dict)
    """Transfers of which somebody shows pages, and who did so first."""


class WatchedCouncil(InstanceCouncil):
    """The real council of one simulated member."""

    def watched_by(self, councils: Councils, process: SimProcess, bus: SimBus, trail: Trail) -> None:
        """Let this member's decisions be held against those of all others."""
        self._councils, self.process, self.own_bus, self._trail = councils, process, bus, trail
        councils.runs[self.place.instance, self.place.member, self.place.epoch] = self

    def load(self, heartbeat: HeartbeatSeen) -> HeartbeatSeen:
        """Return a heartbeat with this member's place in the log (P25)."""
        return heartbeat.model_copy(update={"settle_term": self.book.term, "settle_n": self.book.n})

    @property
    def open_transfers(self) -> int:
        """What this member, while it leads, waits for."""
        return self._council.open_transfers if self._council is not None else 0

    async def _append(self, council: Council, decision: Decision) -> bool:
        stands = await super()._append(council, decision)
        if stands and decision.kind == "void":
            self._check_void(decision)
        return stands

    def _hear(self, decision: Decision) -> Heard:
        heard = super()._hear(decision)
        if heard is Heard.APPLIED:
            name = self.process.name
            tickets = " ".join(f"{name}.T{party.ticket}" for party in decision.parties if self._is_mine(party))
            what = f"{decision.kind} {decision.transfer} {tickets} {decision.reason}"
            self._trail.note(name, f"applies {decision.decision_id}: {what}")
        return heard

    def _act(self, acts: Acts) -> None:
        if acts.show:
            self._check_show(acts)
        super()._act(acts)

    def _is_mine(self, party: object) -> bool:
        return (getattr(party, "member", ""), getattr(party, "epoch", 0)) == (self.place.member, self.place.epoch)

    def _check_show(self, acts: Acts) -> None:
        """Whoever shows pages does so after every party that lives has promised to keep its own (P10)."""
        share = acts.over
        if share is None:
            return
        self._councils.shown.setdefault(share.transfer, (self.place.instance, self.place.member, self.place.epoch))
        for ticket in acts.show:
            if self.holder.bits(ticket) & Fact.ABANDONED:
                self._violate(f"T{ticket} is shown, and was given up before", f"T{ticket}")
        if len(share.parties) != len(self.place.ranks):
            self._violate(f"{share.transfer} is shown with {len(share.parties)} of {len(self.place.ranks)} ranks")
        for party in share.parties:
            other = self._councils.runs.get((self.place.instance, party.member, party.epoch))
            if other is None or not other.process.alive or other is self:
                continue
            theirs = other.book.of(share.transfer)
            if theirs is None or theirs.stage not in _PROMISED:
                stage = theirs.stage.value if theirs else "unknown"
                self._violate(f"{share.transfer} is shown, and at {other.process.name} it is {stage}")

    def _check_void(self, decision: Decision) -> None:
        """Nothing is voided that a member shows, unless nobody has heard of that member for long (P15)."""
        for party in decision.parties:
            other = self._councils.runs.get((self.place.instance, party.member, party.epoch))
            if other is None or not other.process.alive or not other.own_bus.connected:
                continue
            theirs = other.book.of(decision.transfer)
            silent = self._attendance.is_silent(self.clock(), party.member)
            if theirs is not None and theirs.stage is ShareStage.VISIBLE and not silent:
                self._violate(f"{decision.transfer} is voided, and {other.process.name} shows its pages")

    def _violate(self, text: str, *subjects: str) -> None:
        if self.process.alive:
            self._trail.violate(self.process.name, text, *subjects)
