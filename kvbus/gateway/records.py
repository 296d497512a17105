"""What a gateway knows of one transfer, by its request hash: for whoever asks where it is and why it failed."""

from dataclasses import dataclass, field
from typing import Literal

from kvbus.events import TransferOutcome

Status = Literal["asking", "queued", "running", "transferred", "failed", "cancelled"]
ENDED: frozenset[Status] = frozenset({"transferred", "failed", "cancelled"})


@dataclass(slots=True, eq=False)
class Record:
    """One request into one instance. Compared by identity: a later request of the same hash is another record."""

    request_hash: str
    source: str
    destination: str
    model: str
    accepted_at: float
    accepted_unix_s: float
    ours: bool = True
    """Whether this gateway fired it; what others fired is known from the facts, and counts nowhere."""
    status: Status = "asking"
    transfer: str = ""
    step: str = ""
    reason: str = ""
    repeats: int = 0
    outcome: TransferOutcome | None = None
    member: str = ""
    epoch: int = 0
    """Whose run took it on, for what others made: with that run its end may be lost."""
    forget_at_end: bool = field(default=False, repr=False)

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDED

    def document(self) -> dict[str, object]:
        """Return it as an answer shows it; times in seconds, counts of whole blocks."""
        outcome = self.outcome
        return {
            "request_hash": self.request_hash,
            "status": self.status,
            "transfer": self.transfer,
            "source": self.source,
            "destination": self.destination,
            "model": self.model,
            "accepted_unix_s": self.accepted_unix_s,
            "step": self.step,
            "reason": self.reason,
            "failure": outcome.failure if outcome else "",
            "repeats": self.repeats,
            "evidence": list(outcome.evidence) if outcome else [],
            "prompt_tokens": outcome.prompt_tokens if outcome else 0,
            "pages": {
                "wanted": outcome.pages_wanted if outcome else 0,
                "held": outcome.pages_held if outcome else 0,
                "moved": outcome.pages_moved if outcome else 0,
            },
            "bytes": outcome.length_bytes if outcome else 0,
            "timings": {
                "queue_s": outcome.queue_s if outcome else 0.0,
                "grant_s": outcome.grant_s if outcome else 0.0,
                "move_s": outcome.move_s if outcome else 0.0,
                "total_s": outcome.total_s if outcome else 0.0,
            },
        }
