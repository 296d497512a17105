"""Whether a broker lets a user do what it must, and nothing else: asked of the broker itself, right by right.

Nothing is stored, created, taken or removed: a message for a stream names another stream, so that the broker refuses
it after it was let through; a request of JetStream's carries a body that it cannot read, or one that matches nothing;
what may be heard by others goes to a name that no instance has, or is an empty message on a subject of the user's own.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from kvbus.bus import NatsBus
from kvbus.bus_access import DeniedError
from kvbus.bus_assets import Assets
from kvbus.errors import BusError
from kvbus.permissions import INBOX, AssetNames, Role, User, bucket_key, work_consumer_of
from kvbus.topics import Command, Family, Query, Topics
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES, Delivery

PROBE = "kvbus-probe"
"""An instance that nobody is."""
PROBE_S, DENIAL_S = 1.0, 10.0
"""A denial comes within a round trip, which takes a while on a busy machine; whoever is let through may find nobody who
answers."""

_HASH = "0" * 32
_UNSTORED = {"Nats-Expected-Stream": PROBE}
_UNREADABLE = b"x"
_ALL = frozenset(Role)
_INSTANCE, _REQUESTER, _OBSERVER, _OPERATOR = Role.INSTANCE, Role.REQUESTER, Role.OBSERVER, Role.OPERATOR


@dataclass(frozen=True, slots=True)
class PermissionLine:
    """One right: what should be allowed, and whether the broker allows it."""

    verb: str
    subject: str
    expected: bool
    found: bool

    @property
    def ok(self) -> bool:
        """Whether the broker does what it should."""
        return self.expected == self.found

    def document(self) -> dict[str, object]:
        """Return it for programs."""
        return {**asdict(self), "ok": self.ok}


@dataclass(frozen=True, slots=True)
class _Right:
    """A right that some roles have; `subject` makes its subject for an instance's name."""

    verb: str
    roles: frozenset[Role]
    subject: Callable[[str], str]
    data: bytes = b""
    headers: Mapping[str, str] | None = None


async def permission_lines(bus: NatsBus, user: User, topics: Topics, *, other: str = PROBE) -> list[PermissionLine]:
    """Try each right; `other` is an instance that the user is not, on whose subjects it must be denied."""
    lines = []
    for right in rights_of(user, topics):
        expected = user.role in right.roles
        # What is let through goes to nobody; what should be denied is tried on a name that counts.
        subject = right.subject(PROBE if expected else other)
        if right.verb == "publish":
            found = await _publishes(bus, right, subject, PROBE_S if expected else DENIAL_S)
        else:
            found = await _subscribes(bus, subject)
        lines.append(PermissionLine(right.verb, subject, expected, found))
    return lines


async def _publishes(bus: NatsBus, right: _Right, subject: str, wait_s: float) -> bool:
    try:
        await bus.ask(subject, right.data, headers=right.headers, wait_s=wait_s)
    except DeniedError:
        return False
    except (BusError, TimeoutError):
        if not bus.health().connected:
            raise
    return True


async def _subscribes(bus: NatsBus, subject: str) -> bool:
    try:
        subscription = await bus.subscribe(subject, _ignore)
    except DeniedError:
        return False
    await subscription.close()
    return True


async def _ignore(_delivery: Delivery) -> None:
    """What comes while a right is tried is for others."""


def asset_names(topics: Topics) -> AssetNames:
    """Return what a deployment's streams and buckets are called."""
    assets = Assets(topics)
    return AssetNames(
        transfer=assets.transfer,
        facts=assets.facts,
        settle=assets.settle,
        instances=assets.bucket(BUCKET_INSTANCES),
        epochs=assets.bucket(BUCKET_EPOCH),
        blocks=assets.blocks,
    )


def rights_of(user: User, topics: Topics) -> Iterator[_Right]:
    """Yield the rights to try for a user: its own, then those of each kind of user, whatever it is itself."""
    if user.role is _INSTANCE:
        yield from _own_rights(user, topics, asset_names(topics))
    if user.role is _REQUESTER:
        yield _Right("subscribe", _ALL, lambda _: topics.result(user.name))
    yield from _stream_rights(topics, asset_names(topics))
    yield from _message_rights(topics)
    yield from _hearing_rights(topics)


def _own_rights(user: User, topics: Topics, names: AssetNames) -> Iterator[_Right]:
    own, queue = user.name, work_consumer_of(user.name)
    stored = [topics.facts(own), topics.settle(own), topics.blocks(own)]
    buckets = (names.instances, names.epochs)
    stored += [f"$KV.{bucket}.{bucket_key(own, member)}" for bucket in buckets for member in user.members]
    for subject in stored:
        yield _Right("publish", _ALL, _only(subject), headers=_UNSTORED)
    for subject in (topics.heartbeat(own), topics.shares(own)):
        yield _Right("publish", _ALL, _only(subject))
    asked = [
        f"CONSUMER.CREATE.{names.transfer}.{queue}.{topics.transfer_filter(own)}",
        f"CONSUMER.MSG.NEXT.{names.transfer}.{queue}",
        *(f"STREAM.MSG.GET.KV_{bucket}" for bucket in buckets),
        f"CONSUMER.CREATE.{names.facts}.{PROBE}.{topics.facts(own)}",
    ]
    heard = [topics.command(own, verb) for verb in (Command.TRANSFER, Command.CANCEL)]
    alone = (Command.LEASE, Command.PLAN, Command.CACHE)
    heard += [topics.command(own, verb, member) for verb in alone for member in user.members]
    heard.append(topics.query(own, Query.STATS))
    heard += [topics.query(own, verb, name) for verb in (Query.SNAPSHOT, Query.STATS) for name in user.members]
    if len(user.members) > 1:
        asked += [f"CONSUMER.CREATE.{names.settle}.{PROBE}.{topics.settle(own)}", f"STREAM.MSG.GET.{names.settle}"]
        heard += [topics.live_settle(own), topics.shares(own), topics.heartbeat(own)]
    for subject in asked:
        yield _Right("publish", _ALL, _only(f"$JS.API.{subject}"), data=_UNREADABLE)
    for subject in heard:
        yield _Right("subscribe", _ALL, _only(subject))


def _only(subject: str) -> Callable[[str], str]:
    return lambda _: subject


def _stream_rights(topics: Topics, names: AssetNames) -> Iterator[_Right]:
    operator = frozenset({_OPERATOR})
    for build in (
        topics.facts,
        topics.settle,
        topics.blocks,
        lambda name: f"$KV.{names.instances}.{bucket_key(name, 'm0')}",
        lambda name: f"$KV.{names.epochs}.{bucket_key(name, 'm0')}",
    ):
        yield _Right("publish", operator, build, headers=_UNSTORED)
    requesters = frozenset({_REQUESTER, _OPERATOR})
    yield _Right("publish", requesters, lambda name: topics.transfer(name, _HASH), headers=_UNSTORED)
    logs = frozenset({_REQUESTER, _OBSERVER, _OPERATOR})
    for roles, subject in (
        (_ALL, f"STREAM.INFO.KV_{names.instances}"),
        (logs, f"CONSUMER.CREATE.{names.facts}.{PROBE}.{topics.facts_filter()}"),
        (logs, f"CONSUMER.CREATE.{names.settle}.{PROBE}.{topics.settle_filter()}"),
        (requesters, f"CONSUMER.CREATE.{names.blocks}.{PROBE}.{topics.blocks_filter()}"),
        (logs, f"STREAM.INFO.{names.transfer}"),
        (operator, f"STREAM.MSG.GET.{names.transfer}"),
        (operator, f"STREAM.CREATE.{PROBE}"),
        (operator, f"DIRECT.GET.KV_{names.instances}"),  # it would send a stored message wherever its asker says
    ):
        yield _Right("publish", roles, _only(f"$JS.API.{subject}"), data=_UNREADABLE)
    # A purge takes what it cannot read for "everything". So whoever may do these is let loose on a stream that is none,
    # and for whoever may not there is no content with this filter.
    nothing = json.dumps({"filter": topics.settle(PROBE)}).encode()
    for verb in ("UPDATE", "PURGE", "DELETE", "MSG.DELETE"):
        yield _Right("publish", operator, _harmful(verb, names.settle), data=nothing)
    for build in (
        lambda name: f"CONSUMER.CREATE.{names.transfer}.{work_consumer_of(name)}.{topics.transfer_filter(name)}",
        lambda name: f"CONSUMER.MSG.NEXT.{names.transfer}.{work_consumer_of(name)}",
    ):
        yield _Right("publish", operator, _api(build), data=_UNREADABLE)


def _harmful(verb: str, stream: str) -> Callable[[str], str]:
    return lambda name: f"$JS.API.STREAM.{verb}.{PROBE if name == PROBE else stream}"


def _api(build: Callable[[str], str]) -> Callable[[str], str]:
    return lambda name: f"$JS.API.{build(name)}"


def _message_rights(topics: Topics) -> Iterator[_Right]:
    operator, nobody = frozenset({_OPERATOR}), frozenset[Role]()
    requesters, asking = frozenset({_REQUESTER, _OPERATOR}), frozenset({_INSTANCE, _OPERATOR})
    following = frozenset({_REQUESTER, _OBSERVER, _OPERATOR})
    for roles, build in (
        (operator, topics.heartbeat),
        (operator, topics.shares),
        (nobody, topics.live_facts),
        (nobody, topics.live_settle),
        (nobody, topics.live_blocks),
        (asking, topics.result),
        (asking, lambda name: topics.command(name, Command.LEASE, "m0")),
        (operator, lambda name: topics.command(name, Command.PLAN, "m0")),
        (requesters, lambda name: topics.command(name, Command.TRANSFER)),
        (requesters, lambda name: topics.command(name, Command.CANCEL)),
        (requesters, lambda name: topics.command(name, Command.CACHE, "m0")),
        (following, lambda name: topics.query(name, Query.STATS, "m0")),
        (following, lambda name: topics.query(name, Query.SNAPSHOT, "m0")),
        (frozenset({_OBSERVER, _OPERATOR}), lambda name: topics.query(name, Query.STATS)),
    ):
        yield _Right("publish", roles, build)


def _hearing_rights(topics: Topics) -> Iterator[_Right]:
    operator, observers = frozenset({_OPERATOR}), frozenset({_OBSERVER, _OPERATOR})
    commands = f"{topics.prefix}.{Family.COMMAND.value}"
    for roles, build in (
        (frozenset({_REQUESTER, _OBSERVER, _OPERATOR}), lambda _: topics.live_facts()),
        (frozenset({_REQUESTER, _OBSERVER, _OPERATOR}), lambda _: topics.heartbeat()),
        (observers, lambda _: topics.live_settle()),
        (frozenset({_REQUESTER, _OPERATOR}), lambda _: topics.live_blocks()),
        (operator, lambda _: topics.transfer_filter()),
        (operator, topics.transfer_filter),
        (operator, lambda _: f"{commands}.>"),
        (operator, lambda name: topics.command(name, Command.LEASE, "m0")),
        (operator, lambda name: topics.command(name, Command.PLAN, "m0")),
        (operator, topics.result),
        (operator, topics.shares),
        (operator, lambda _: f"{INBOX}.>"),
        (operator, lambda _: ">"),
    ):
        yield _Right("subscribe", roles, build)
