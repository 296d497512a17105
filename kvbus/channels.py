"""Which kind of event travels on which subject: who sends it, who hears it, what answers it, and what keeps it.

docs/asyncapi.yaml and docs/wire.md are made from this table, and tests hold it against what workers really send.
`topics.py` says how a subject is written; here stands what may be on it.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvbus import events
from kvbus.parts import Body
from kvbus.topics import Command, Family, Query, Subject


class Party(StrEnum):
    """Who speaks or listens; the words of GLOSSARY.md, as far as they stand there."""

    REQUESTER = "requester"
    SOURCE = "source"
    DESTINATION = "destination"
    MEMBER = "member"
    COORDINATOR = "coordinator or only member"
    BROKER = "broker"
    FOLLOWER = "whoever follows"
    OPERATOR = "operator"


class Store(StrEnum):
    """What keeps a message after it was sent."""

    NOTHING = "nothing"
    TRANSFER = "transfer"
    FACTS = "facts"
    SETTLE = "settle"
    BLOCKS = "blocks"
    INSTANCES = "instances"


@dataclass(frozen=True, slots=True)
class Carried:
    """One kind on one channel; `answer` is the kind by which a request is answered."""

    body: type[Body]
    sender: Party
    hearers: tuple[Party, ...]
    answer: type[Body] | None = None


@dataclass(frozen=True, slots=True)
class Channel:
    """One shape of subject. `tokens` follow the family; those in braces stand for an escaped name, or for a hash.

    A bucket has no family: its one token is the key.
    """

    name: str
    family: Family | None
    tokens: tuple[str, ...]
    carries: tuple[Carried, ...]
    stored: Store = Store.NOTHING

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names in braces."""
        return tuple(token[1:-1] for token in self.tokens if token.startswith("{"))

    @property
    def bodies(self) -> tuple[type[Body], ...]:
        """The kinds that are sent here; answers have subjects of their own."""
        return tuple(one.body for one in self.carries)


def _each(sender: Party, hearers: tuple[Party, ...], *bodies: type[Body]) -> tuple[Carried, ...]:
    return tuple(Carried(body, sender, hearers) for body in bodies)


def _asked_by_both(body: type[Body], answer: type[Body]) -> tuple[Carried, ...]:
    """Return a question to members that is a requester's as well as a follower's: a gateway is both."""
    return tuple(Carried(body, sender, (Party.MEMBER,), answer) for sender in (Party.REQUESTER, Party.FOLLOWER))


_FACTS = (
    events.LeaseGranted,
    events.AttemptMade,
    events.OutcomeFixed,
    events.FactsSeen,
    events.TransferStep,
    events.TransferOutcome,
    events.SnapshotTaken,
    events.EventsBatch,
    events.NamesForgotten,
)
_DECISIONS = (
    events.TermTaken,
    events.TransferOpened,
    events.SettleDecided,
    events.MadeVisible,
    events.SettleVoided,
    events.CancelDecided,
    events.EventsBatch,
)
_BLOCKS = (events.BlocksChanged, events.BlocksUnseen)
_MEMBERS_AND_FOLLOWERS = (Party.MEMBER, Party.FOLLOWER)

CHANNELS = (
    Channel(
        "transfer",
        Family.TRANSFER,
        ("{destination}", "{hash}"),
        _each(Party.REQUESTER, (Party.DESTINATION,), events.TransferRequested),
        Store.TRANSFER,
    ),
    Channel(
        "transfer_now",
        Family.COMMAND,
        ("{destination}", Command.TRANSFER),
        (Carried(events.TransferRequested, Party.REQUESTER, (Party.DESTINATION,), events.TransferVerdict),),
    ),
    Channel(
        "cancel",
        Family.COMMAND,
        ("{destination}", Command.CANCEL),
        (Carried(events.TransferCancelRequested, Party.REQUESTER, (Party.DESTINATION,), events.StatsAnswered),),
    ),
    Channel(
        "lease",
        Family.COMMAND,
        ("{source}", Command.LEASE, "{member}"),
        (
            Carried(events.LendRequested, Party.DESTINATION, (Party.SOURCE,), events.LendAnswered),
            Carried(events.LeaseReleased, Party.DESTINATION, (Party.SOURCE,), events.ReleaseConfirmed),
            Carried(events.PrefixAsked, Party.DESTINATION, (Party.SOURCE,), events.PrefixAnswered),
        ),
    ),
    Channel(
        "cache",
        Family.COMMAND,
        ("{instance}", Command.CACHE, "{member}"),
        (
            Carried(events.CacheAsked, Party.REQUESTER, (Party.MEMBER,), events.CacheAnswered),
            Carried(events.CacheChangeAsked, Party.REQUESTER, (Party.MEMBER,), events.CacheChanged),
        ),
    ),
    Channel(
        "drain",
        Family.COMMAND,
        ("{instance}", Command.DRAIN, "{member}"),
        (Carried(events.DrainAsked, Party.OPERATOR, (Party.MEMBER,), events.DrainAnswered),),
    ),
    Channel(
        "plan",
        Family.COMMAND,
        ("{instance}", Command.PLAN, "{member}"),
        (Carried(events.PlanAsked, Party.MEMBER, (Party.COORDINATOR,), events.PlanAnswered),),
    ),
    Channel(
        "stats",
        Family.QUERY,
        ("{instance}", Query.STATS),
        (Carried(events.StatsAsked, Party.FOLLOWER, (Party.MEMBER,), events.StatsAnswered),),
    ),
    Channel(
        "member_stats",
        Family.QUERY,
        ("{instance}", Query.STATS, "{member}"),
        _asked_by_both(events.StatsAsked, events.StatsAnswered),
    ),
    Channel(
        "snapshot",
        Family.QUERY,
        ("{instance}", Query.SNAPSHOT, "{member}"),
        _asked_by_both(events.SnapshotAsked, events.SnapshotTaken),
    ),
    Channel("facts", Family.FACTS, ("{instance}",), _each(Party.MEMBER, (Party.FOLLOWER,), *_FACTS), Store.FACTS),
    Channel("live_facts", Family.LIVE_FACTS, ("{instance}",), _each(Party.BROKER, (Party.FOLLOWER,), *_FACTS)),
    Channel(
        "settle",
        Family.SETTLE,
        ("{instance}",),
        _each(Party.COORDINATOR, _MEMBERS_AND_FOLLOWERS, *_DECISIONS),
        Store.SETTLE,
    ),
    Channel(
        "live_settle", Family.LIVE_SETTLE, ("{instance}",), _each(Party.BROKER, _MEMBERS_AND_FOLLOWERS, *_DECISIONS)
    ),
    Channel(
        "result",
        Family.RESULT,
        ("{requester}",),
        _each(Party.DESTINATION, (Party.REQUESTER,), events.TransferVerdict, events.TransferOutcome),
    ),
    Channel(
        "heartbeat",
        Family.HEARTBEAT,
        ("{instance}",),
        _each(Party.MEMBER, (*_MEMBERS_AND_FOLLOWERS, Party.REQUESTER), events.HeartbeatSeen),
    ),
    Channel("shares", Family.SHARES, ("{instance}",), _each(Party.MEMBER, (Party.MEMBER,), events.SharesReported)),
    Channel("blocks", Family.BLOCKS, ("{instance}",), _each(Party.MEMBER, (Party.REQUESTER,), *_BLOCKS), Store.BLOCKS),
    Channel("live_blocks", Family.LIVE_BLOCKS, ("{instance}",), _each(Party.BROKER, (Party.REQUESTER,), *_BLOCKS)),
    Channel(
        "instances",
        None,
        ("{key}",),
        _each(Party.MEMBER, (Party.DESTINATION, Party.FOLLOWER), events.InstanceRecord),
        Store.INSTANCES,
    ),
)


def channel_of(subject: Subject) -> Channel | None:
    """Return the channel of a parsed subject; None where nothing is sent, such as a verb that nobody answers yet."""
    return _BY_SHAPE.get((subject.family, subject.last if _has_verb(subject.family) else "", bool(subject.member)))


def _has_verb(family: Family) -> bool:
    return family in {Family.COMMAND, Family.QUERY}


_BY_SHAPE = {
    (channel.family, channel.tokens[1] if _has_verb(channel.family) else "", len(channel.tokens) == 3): channel
    for channel in CHANNELS
    if channel.family is not None
}
