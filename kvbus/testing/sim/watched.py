"""Watched parts: admission held against what was admitted before, and rounds after which the world looks."""

from collections.abc import Collection
from dataclasses import dataclass, field

from kvbus.ledger.admission import Admission, AdmissionGate, Verdict
from kvbus.roles.rounds import Rounds
from kvbus.testing.sim.loop import SimLoop
from kvbus.testing.sim.trail import Trail


@dataclass(slots=True)
class Claims:
    """What one member has admitted: request ids for good, and the hashes that run now with the request that runs."""

    ids: set[str] = field(default_factory=set)
    running: dict[str, str] = field(default_factory=dict)

    def admitted(self, request_hash: str, request_id: str) -> str:
        """Note that a request runs from now on; return what is wrong with that, or nothing."""
        problem = ""
        if request_id in self.ids:
            problem = f"{request_id} was delivered again and runs a second time"
        elif request_hash in self.running:
            problem = f"{request_id} runs beside {self.running[request_hash]}, which asks for the same"
        self.ids.add(request_id)
        self.running[request_hash] = request_id
        return problem


class WatchedGate(AdmissionGate):
    """The real gate: a request id runs once, and of one hash only one request at a time (P21, P22)."""

    def __init__(
        self,
        trail: Trail,
        who: str,
        *,
        instance: str,
        source_allow: Collection[str],
        inflight_max: int,
        dedup_ttl_s: float,
        entries_max: int,
    ) -> None:
        super().__init__(
            instance=instance,
            source_allow=source_allow,
            inflight_max=inflight_max,
            dedup_ttl_s=dedup_ttl_s,
            entries_max=entries_max,
        )
        self.claims = Claims()
        self._trail = trail
        self._who = who

    def admit(self, request_hash: str, *, request_id: str, source: str, transfer: str, now: float) -> Admission:
        """See `AdmissionGate`."""
        admission = super().admit(request_hash, request_id=request_id, source=source, transfer=transfer, now=now)
        if admission.verdict is Verdict.ACCEPTED and (problem := self.claims.admitted(request_hash, request_id)):
            self._trail.violate(self._who, problem)
        return admission

    def ended(self, request_hash: str, *, settled: bool) -> None:
        """See `AdmissionGate`."""
        super().ended(request_hash, settled=settled)
        self.claims.running.pop(request_hash, None)

    def taken_off(self, request_hash: str, request_id: str) -> None:
        """The queue forgets a request: only what does not run any more, for a crash would lose it (P20)."""
        if self.claims.running.get(request_hash) == request_id:
            self._trail.violate(self._who, f"{request_id} was taken off the queue while its transfer runs")


class WatchedRounds(Rounds):
    """The real rounds: what one has moved is checked after the step that ran it."""

    loop: SimLoop

    def run(self) -> None:
        """See `Rounds`."""
        self.loop.look_step = 0
        super().run()
