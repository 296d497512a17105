"""Who of an instance's members is there, in which epoch, and whose turn it is to become its coordinator.

Silence decides only whom nobody waits for and who tries to lead; the log's fence decides who does (P13). Nothing is
freed, returned or shown because somebody was silent.
"""

from collections import deque
from dataclasses import dataclass, field

GONE_S = 10.0
"""A member that was not heard of for so long is not waited for: ten heartbeats."""
TURN_S = 1.5
"""How much longer each further member waits before it tries to lead: more than one heartbeat, so that one that is
there mostly wins without a race."""
EPOCHS_MAX = 16
"""Replaced epochs of one member that are remembered, so that a late message of one does not bring it back."""


@dataclass(slots=True)
class _Seen:
    epoch: int = 0
    at: float = 0.0
    replaced: deque[int] = field(default_factory=lambda: deque(maxlen=EPOCHS_MAX))


class Attendance:
    """What one member has heard of the others; `members` are all names of the instance, in the order of their turns."""

    def __init__(self, *, members: tuple[str, ...], me: str, began_at: float) -> None:
        self._me = me
        self._members = members
        self._began_at = began_at
        self._seen = {name: _Seen() for name in members}

    def heard(self, now: float, member: str, epoch: int) -> bool:
        """A member lives, in this epoch; False where that is no word of its present run.

        Epochs are compared for equality (P16): one that was replaced is another run, whatever its number. Only where
        the run that replaced it has long been silent was that a late word of a dead one, and the first one counts.
        """
        seen = self._seen.get(member)
        if seen is None:
            return False
        if epoch in seen.replaced:
            if now - seen.at <= GONE_S:
                return False
            seen.replaced.remove(epoch)
        if seen.epoch != epoch:
            if seen.epoch:
                seen.replaced.append(seen.epoch)
            seen.epoch = epoch
        seen.at = now
        return True

    def epoch_of(self, member: str) -> int:
        """Return the epoch in which a member was heard last; 0 before that, and for a name that is none."""
        seen = self._seen.get(member)
        return seen.epoch if seen else 0

    def is_silent(self, now: float, member: str) -> bool:
        """Whether a member was not heard of for so long that nobody waits for it; all are given that long at first."""
        seen = self._seen.get(member)
        return seen is None or now - max(seen.at, self._began_at) > GONE_S

    def absent(self, now: float) -> tuple[str, ...]:
        """Return the members that are not there: never heard of, or silent."""
        return tuple(name for name, seen in self._seen.items() if not seen.epoch or self.is_silent(now, name))

    def is_replaced(self, member: str, epoch: int) -> bool:
        """Whether this run of a member is over: it was heard of under another epoch, or is no member."""
        seen = self._seen.get(member)
        return seen is None or bool(seen.epoch and seen.epoch != epoch)

    def should_lead(self, now: float, coordinator: tuple[str, int] | None, *, term_since: float = 0.0) -> bool:
        """Whether it is this member's turn to try to lead: nobody does, and nobody before it in order is there.

        Where somebody before it is there, it waits a little longer for each of them; and in any case after the present
        term began, at `term_since`: two members that know of each other's earlier runs would else take turns for ever.
        """
        began_at = max(self._began_at, term_since)
        waited_s = now - began_at
        if coordinator is not None:
            member, epoch = coordinator
            if member in self._seen and not self.is_replaced(member, epoch):
                if not self.is_silent(now, member):
                    return False
                waited_s = now - max(self._seen[member].at, began_at) - GONE_S
        before = self._members[: self._members.index(self._me)]
        present = sum(1 for name in before if self._seen[name].epoch and not self.is_silent(now, name))
        return waited_s >= TURN_S * (1 + present)
