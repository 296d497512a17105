"""Who may say and hear what on the bus, as lists of subjects that a nats-server enforces.

One user per instance, because an instance's members speak for each other; requesters, observers and operators beside
them. Whatever is not listed is denied. Three rules stand behind the lists:

- Prompts travel on transfer and command subjects and in answers. So each user hears only its own inbox, and nobody but
  an operator reads the request stream except through the queue of the instance that it is.
- Nobody publishes on the live subjects: only the broker repeats there what it has stored (P25).
- An answer goes to an inbox, by a plain right to publish on all of them. NATS can instead allow "the reply subject of
  what was received"; whoever may send itself a message could then publish anything, anywhere.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvbus.topics import Command, Family, Query, Topics, escape

INBOX = "_INBOX"
"""The first token of all subjects on which answers come."""


class Role(StrEnum):
    """What a user of the bus is."""

    INSTANCE = "instance"
    REQUESTER = "requester"
    OBSERVER = "observer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class User:
    """One user: its role, its name (an instance's or requester's own), and an instance's members."""

    role: Role
    name: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AssetNames:
    """What the streams and buckets of a deployment are called in its broker."""

    transfer: str
    facts: str
    settle: str
    instances: str
    epochs: str
    blocks: str


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects and patterns that a user may publish on and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    publish_never: tuple[str, ...] = ()

    def may_publish(self, subject: str) -> bool:
        """Whether a message on this subject would be taken."""
        return _any_covers(self.publish, subject) and not _any_covers(self.publish_never, subject)

    def may_subscribe(self, subject: str) -> bool:
        """Whether a subscription to this subject or pattern would be taken."""
        return _any_covers(self.subscribe, subject)


def inbox_of(key: str) -> str:
    """Return the prefix of the inboxes of the user with this public key, on which nobody else hears."""
    return f"{INBOX}.{key}"


def bucket_key(instance: str, member: str) -> str:
    """Return a member's key in the buckets: its own, and one token, so that a permission can name it."""
    return escape(f"{instance}/{member}")


def work_consumer_of(instance: str) -> str:
    """Return the name of the consumer through which an instance takes its requests."""
    return f"dst-{escape(instance)}"


def permissions_of(user: User, key: str, topics: Topics, names: AssetNames) -> Permissions:
    """Return what a user with this public key may do."""
    builder = {
        Role.INSTANCE: _of_instance,
        Role.REQUESTER: _of_requester,
        Role.OBSERVER: _of_observer,
        Role.OPERATOR: _of_operator,
    }[user.role]
    return builder(user, f"{inbox_of(key)}.>", topics, names)


def _of_instance(user: User, inbox: str, topics: Topics, names: AssetNames) -> Permissions:
    name, queue = user.name, work_consumer_of(user.name)
    keys = [bucket_key(name, member) for member in user.members]
    publish = [
        topics.facts(name),
        topics.settle(name),
        topics.heartbeat(name),
        topics.shares(name),
        topics.blocks(name),
        _all_of(topics, Family.RESULT),  # the results of whoever asked
        f"{topics.prefix}.{Family.COMMAND.value}.*.{Command.LEASE.value}.*",  # questions to sources, and releases
        f"{topics.command(name, Command.PLAN)}.*",
        f"{INBOX}.>",
        *(f"$KV.{bucket}.{key}" for bucket in (names.instances, names.epochs) for key in keys),
        f"$JS.API.STREAM.INFO.KV_{names.instances}",
        *(f"$JS.API.STREAM.MSG.GET.KV_{bucket}" for bucket in (names.instances, names.epochs)),
        f"$JS.API.CONSUMER.CREATE.{names.transfer}.{queue}.{topics.transfer_filter(name)}",
        f"$JS.API.CONSUMER.MSG.NEXT.{names.transfer}.{queue}",
        f"$JS.ACK.{names.transfer}.{queue}.>",
    ]
    subscribe = [
        *(topics.command(name, verb) for verb in (Command.TRANSFER, Command.CANCEL, Command.DRAIN)),
        *(f"{topics.command(name, verb)}.*" for verb in (Command.LEASE, Command.PLAN, Command.CACHE, Command.DRAIN)),
        *(topics.query(name, verb) for verb in Query),
        *(f"{topics.query(name, verb)}.*" for verb in (Query.SNAPSHOT, Query.STATS)),
        inbox,
    ]
    publish += _history(names.facts, topics.facts(name))  # how requests ended that a run before this one took
    if len(user.members) > 1:
        publish += [f"$JS.API.STREAM.MSG.GET.{names.settle}", *_history(names.settle, topics.settle(name))]
        subscribe += [topics.live_settle(name), topics.shares(name), topics.heartbeat(name)]
    return Permissions(tuple(publish), tuple(subscribe))


def _of_requester(user: User, inbox: str, topics: Topics, names: AssetNames) -> Permissions:
    publish = [
        topics.transfer_filter(),
        f"$JS.API.STREAM.INFO.{names.transfer}",  # how many requests wait for a destination; not what they hold
        *(f"{topics.prefix}.{Family.COMMAND.value}.*.{verb.value}" for verb in (Command.TRANSFER, Command.CANCEL)),
        f"{topics.prefix}.{Family.COMMAND.value}.*.{Command.CACHE.value}.*",
        # Counts, which a gateway tells Prometheus; and leases, where the facts that told of them are lost.
        *(f"{topics.prefix}.{Family.QUERY.value}.*.{verb.value}.*" for verb in (Query.STATS, Query.SNAPSHOT)),
        *_registry(names),
        *_log(names.facts, topics.facts_filter()),
        *_log(names.settle, topics.settle_filter()),  # a gateway tells stories; decisions hold no prompts
        *_log(names.blocks, topics.blocks_filter()),  # no more than it may ask each cache: a router knows the prompts
    ]
    subscribe = (topics.result(user.name), topics.live_facts(), topics.live_blocks(), topics.heartbeat(), inbox)
    return Permissions(tuple(publish), subscribe)


def _of_observer(user: User, inbox: str, topics: Topics, names: AssetNames) -> Permissions:
    del user  # all observers may see the same
    publish = [
        f"{topics.prefix}.{Family.QUERY.value}.*.{Query.STATS.value}",
        *(f"{topics.prefix}.{Family.QUERY.value}.*.{verb.value}.*" for verb in (Query.STATS, Query.SNAPSHOT)),
        *_registry(names),
        *_log(names.facts, topics.facts_filter()),
        *_log(names.settle, topics.settle_filter()),
        "$JS.API.INFO",
        f"$JS.API.STREAM.INFO.{names.transfer}",
        f"$JS.API.STREAM.INFO.KV_{names.epochs}",
    ]
    return Permissions(tuple(publish), (topics.live_facts(), topics.live_settle(), topics.heartbeat(), inbox))


def _of_operator(user: User, inbox: str, topics: Topics, names: AssetNames) -> Permissions:
    del user, inbox, names
    live = f"{topics.prefix}.live.>"
    return Permissions((">",), (">",), publish_never=(live,))


def _registry(names: AssetNames) -> tuple[str, ...]:
    """Look up who is registered."""
    return (f"$JS.API.STREAM.INFO.KV_{names.instances}", f"$JS.API.STREAM.MSG.GET.KV_{names.instances}")


def _log(stream: str, subjects: str) -> tuple[str, ...]:
    """Read all of a log."""
    return (f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.STREAM.MSG.GET.{stream}", *_history(stream, subjects))


def _history(stream: str, subjects: str) -> tuple[str, ...]:
    """Read a log's subjects through readers of one's own; their names are random, so all readers' are allowed."""
    return (
        f"$JS.API.CONSUMER.CREATE.{stream}.*.{subjects}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
        f"$JS.API.CONSUMER.DELETE.{stream}.*",
    )


def _all_of(topics: Topics, family: Family) -> str:
    return f"{topics.prefix}.{family.value}.*"


def _any_covers(patterns: tuple[str, ...], subject: str) -> bool:
    return any(covers(pattern, subject) for pattern in patterns)


def covers(pattern: str, subject: str) -> bool:
    """Whether a pattern holds everything that a subject, or another pattern, stands for."""
    wanted, given = pattern.split("."), subject.split(".")
    for place, word in enumerate(wanted):
        if word == ">":
            return len(given) > place
        if place >= len(given) or given[place] == ">" or word not in {"*", given[place]}:
            return False
    return len(wanted) == len(given)
