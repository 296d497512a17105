"""The AsyncAPI 3 document of the bus, made from the code: channels, kinds, models, golden files, streams."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from kvbus import events, topics
from kvbus.bus_assets import Assets, WorkLimits, work_consumer
from kvbus.bus_guards import limit_for
from kvbus.channels import CHANNELS, Carried, Channel, Party, Store
from kvbus.events import KINDS
from kvbus.parts import Body
from kvbus.topics import REQUEST_HASH_PATTERN, Topics, escape
from kvbus.transport import BUCKET_INSTANCES
from scripts.wire_schemas import Document, examples, payload, schemas, words

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
TOPICS = Topics()
ASSETS = Assets(TOPICS)

STREAMS = {
    Store.TRANSFER: ASSETS.transfer,
    Store.FACTS: ASSETS.facts,
    Store.SETTLE: ASSETS.settle,
    Store.BLOCKS: ASSETS.blocks,
    Store.INSTANCES: f"KV_{ASSETS.bucket(BUCKET_INSTANCES)}",
}
EXAMPLES = {
    "instance": "b",
    "source": "a",
    "destination": "b",
    "requester": "requester",
    "member": "m0",
    "hash": "0123456789abcdef" * 2,
    "key": escape("b/m0"),
}
LOCATIONS = {"destination": "b/destination", "hash": "b/request_hash"}
"""Where the request itself says what its subject says; elsewhere the subject names who is asked, or who speaks."""


def document() -> Document:
    """Return the whole document, in the order in which it is read."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "kvbus",
            "version": str(events.VERSION),
            "description": f"{words(events)}\n\n{words(topics)}\n\nIn the examples, bytes are hexadecimal digits.",
            "license": {"name": project["license"]},
        },
        "defaultContentType": "application/msgpack",
        "servers": {
            "nats": {
                "host": "{host}:4222",
                "protocol": "nats",
                "variables": {"host": {"default": "127.0.0.1"}},
            }
        },
        "channels": {name: one for channel in CHANNELS for name, one in _channels(channel)},
        "operations": {name: one for channel in CHANNELS for name, one in _operations(channel)},
        "components": {
            "schemas": schemas(),
            "messages": {kind: _message(body) for kind, body in KINDS.items()},
        },
        "x-streams": {str(one["name"]): one for one in ASSETS.all() if one["name"] in STREAMS.values()},
    }


def address(channel: Channel) -> str:
    """Return a channel's subject with its parameters in braces."""
    if channel.family is None:
        return f"$KV.{ASSETS.bucket(BUCKET_INSTANCES)}.{channel.tokens[0]}"
    return ".".join((TOPICS.prefix, channel.family, *channel.tokens))


def limit_bytes(channel: Channel) -> int:
    """Return how long a message may be there."""
    return limit_for(address(channel), TOPICS.prefix) if channel.family else events.EVENT_LENGTH_MAX_BYTES


def said_of(channel: Channel) -> str:
    """Return what the code says of a channel: the builder of its subjects, or its one kind."""
    if channel.family is None:
        return words(channel.bodies[0])
    return words(getattr(Topics, channel.family.name.lower()))


def _channels(channel: Channel) -> Iterator[tuple[str, Document]]:
    """Yield a channel, and behind it the one of its answers, which has no address of its own."""
    own: Document = {
        "address": address(channel),
        "description": said_of(channel),
        "messages": _messages(channel.bodies),
        "parameters": {name: _parameter(name, channel) for name in channel.parameters},
        "x-message-length-max-bytes": limit_bytes(channel),
    }
    if channel.stored is not Store.NOTHING:
        own["x-stream"] = STREAMS[channel.stored]
    yield channel.name, own
    answers = _answers(channel)
    if answers:
        limit = limit_for("_INBOX", TOPICS.prefix)
        inbox: Document = {"address": None, "messages": _messages(answers), "x-message-length-max-bytes": limit}
        yield _answer_name(channel), inbox


def _parameter(name: str, channel: Channel) -> Document:
    parameter: Document = {"examples": [EXAMPLES[name]]}
    if channel.stored is Store.TRANSFER:
        parameter["location"] = f"$message.payload#/{LOCATIONS[name]}"
    if name == "hash":
        parameter["x-pattern"] = REQUEST_HASH_PATTERN.pattern
    return parameter


def _operations(channel: Channel) -> Iterator[tuple[str, Document]]:
    """Yield who sends and who receives what; what is answered has an operation of its own."""
    for group in _groups(channel):
        first = group[0]
        suffix = f"_{first.body.KIND}" if first.answer else ""
        if first.sender is not Party.BROKER:
            senders = tuple(dict.fromkeys(one.sender for one in group))
            yield f"send_{channel.name}{suffix}", _operation("send", senders, channel, group)
        yield f"receive_{channel.name}{suffix}", _operation("receive", first.hearers, channel, group)


def _operation(action: str, parties: tuple[Party, ...], channel: Channel, group: tuple[Carried, ...]) -> Document:
    operation: Document = {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel.name}"},
        "messages": [
            {"$ref": f"#/channels/{channel.name}/messages/{kind}"}
            for kind in dict.fromkeys(one.body.KIND for one in group)
        ],
        "x-parties": [str(party) for party in parties],
    }
    if action == "receive" and channel.stored is Store.TRANSFER:
        name = EXAMPLES["destination"]
        consumer = work_consumer(f"dst-{escape(name)}", TOPICS.transfer_filter(name), WorkLimits())
        operation["bindings"] = {"nats": {"x-stream": ASSETS.transfer, "x-consumer": consumer}}
    answer = group[0].answer
    if answer is not None:
        there = f"#/channels/{_answer_name(channel)}"
        operation["reply"] = {
            "address": {
                "location": "$message.header#/reply",
                "description": "The reply subject of the message itself.",
            },
            "channel": {"$ref": there},
            "messages": [{"$ref": f"{there}/messages/{answer.KIND}"}],
        }
    return operation


def _groups(channel: Channel) -> Iterator[tuple[Carried, ...]]:
    if any(one.answer for one in channel.carries):
        for body in dict.fromkeys(channel.bodies):
            yield tuple(one for one in channel.carries if one.body is body)
    else:
        yield channel.carries


def _answers(channel: Channel) -> tuple[type[Body], ...]:
    return tuple(one.answer for one in channel.carries if one.answer)


def _answer_name(channel: Channel) -> str:
    return f"{channel.name}_answer"


def _messages(bodies: tuple[type[Body], ...]) -> Document:
    return {body.KIND: {"$ref": f"#/components/messages/{body.KIND}"} for body in bodies}


def _message(body: type[Body]) -> Document:
    return {
        "name": body.KIND,
        "description": words(body),
        "correlationId": {"location": "$message.payload#/c"},
        "payload": payload(body),
        "examples": examples(body, GOLDEN),
    }
