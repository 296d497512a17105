"""What a broker in memory stores: messages by sequence, and the ids by which it knows a repeat."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbus.transport import Delivery

_IDS_MAX = 100_000  # the broker forgets message ids after minutes; a test does not live that long


def matches(subject_filter: str, subject: str) -> bool:
    """Whether a subject fits a filter: `*` is any one token, `>` at the end is any one or more."""
    wanted, given = subject_filter.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1] if len(given) >= len(wanted) else []
    return len(wanted) == len(given) and all(a in {"*", b} for a, b in zip(wanted, given, strict=True))


@dataclass(slots=True)
class Stream:
    """Messages by sequence, in order; `live_to` is where they are repeated, empty for the work queue."""

    subject_filter: str
    live_from: str = ""
    live_to: str = ""
    messages: OrderedDict[int, Delivery] = field(default_factory=OrderedDict)
    ids: OrderedDict[str, int] = field(default_factory=OrderedDict)
    head: int = 0
    _stored_at: OrderedDict[int, float] = field(default_factory=OrderedDict)

    def append(self, subject: str, data: bytes, message_id: str, now: float) -> Delivery:
        """Store a message under the next sequence."""
        self.head += 1
        message = self.messages[self.head] = Delivery(subject, data, self.head)
        self._stored_at[self.head] = now
        self.ids[message_id] = self.head
        if len(self.ids) > _IDS_MAX:
            self.ids.popitem(last=False)
        return message

    def last(self, subject: str) -> Delivery | None:
        """Return the newest message of a subject."""
        return next((one for one in reversed(self.messages.values()) if one.subject == subject), None)

    def select(self, subject_filter: str, after_sequence: int) -> Iterator[Delivery]:
        """Yield the messages of a filter from after a sequence, oldest first."""
        for sequence, message in self.messages.items():
            if sequence > after_sequence and matches(subject_filter, message.subject):
                yield message

    def trim(self, oldest: float) -> None:
        """Drop what was stored then or before; ids stay known, as in the broker."""
        while self._stored_at and next(iter(self._stored_at.values())) <= oldest:
            self.messages.pop(self._stored_at.popitem(last=False)[0], None)

    def age_s(self, sequence: int, now: float) -> float:
        """Return how long ago a message was stored."""
        return now - self._stored_at[sequence]
