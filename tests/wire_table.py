"""What was really sent, by channel and kind, to be held against `kvbus.channels`."""

from dataclasses import dataclass, field

from kvbus.bus_assets import Assets
from kvbus.channels import CHANNELS, Channel, Party, channel_of
from kvbus.errors import PeerError
from kvbus.events import EventsBatch, Header, decode, split
from kvbus.topics import Topics
from kvbus.transport import BUCKET_INSTANCES

TOPICS = Topics()

SENT = {(channel.name, one.body.KIND) for channel in CHANNELS for one in channel.carries}
"""Channel and kind of everything that the table says is sent."""

ANSWERED = {
    (channel.name, one.body.KIND, one.answer.KIND) for channel in CHANNELS for one in channel.carries if one.answer
}
"""Channel, kind of the question and kind of the answer."""

BUCKET = f"$KV.{Assets(TOPICS).bucket(BUCKET_INSTANCES)}."
_INSTANCES = next(channel for channel in CHANNELS if channel.family is None)


@dataclass(slots=True)
class Overheard:
    """What a tap heard; `strangers` are subjects, bytes and speakers for which the table has no place."""

    sent: set[tuple[str, str]] = field(default_factory=set)
    answered: set[tuple[str, str, str]] = field(default_factory=set)
    strangers: list[str] = field(default_factory=list)

    def hear(self, subject: str, data: bytes) -> tuple[str, str] | None:
        """Take one message to a subject of kvbus, and what it holds; return its channel and kind."""
        try:
            channel, header = _channel(subject), decode(data).header
            for inner in split(data) if header.k == EventsBatch.KIND else ():
                self.hear(subject, inner)
        except PeerError as error:
            self.strangers.append(f"{subject}: {error}")
            return None
        if channel is None or _misfits(channel, subject, header):
            self.strangers.append(f"{subject}: {header.k} of {header.i}/{header.m}")
            return None
        self.sent.add((channel.name, header.k))
        return channel.name, header.k

    def hear_answer(self, asked: tuple[str, str], data: bytes) -> None:
        """Take one answer to a question that was heard."""
        self.answered.add((*asked, decode(data).header.k))


def is_ours(subject: str) -> bool:
    """Whether a subject is one of kvbus: neither the broker's own, nor an inbox."""
    return subject.startswith((f"{TOPICS.prefix}.", BUCKET))


def _misfits(channel: Channel, subject: str, header: Header) -> bool:
    """Whether the speaker is another than the table names: no member at all, or a member of another instance."""
    sender = next((one.sender for one in channel.carries if header.k == one.body.KIND), None)
    if sender in {Party.REQUESTER, Party.FOLLOWER, Party.OPERATOR}:
        return header.m != ""
    of_that_instance = channel.family is None or header.i == TOPICS.parse(subject).name
    return not header.m or (sender in {Party.MEMBER, Party.COORDINATOR, Party.BROKER} and not of_that_instance)


def _channel(subject: str) -> Channel | None:
    return _INSTANCES if subject.startswith(BUCKET) else channel_of(TOPICS.parse(subject))
