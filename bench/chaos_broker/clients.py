"""Clients that misbehave, or are made to: callbacks that raise, messages that are too long, slow readers, repeats."""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from bench.chaos_broker.scene import Scene
from kvbus import bus_routes
from kvbus.errors import BusError
from kvbus.events import EVENT_LENGTH_MAX_BYTES, REQUEST_LENGTH_MAX_BYTES, decode
from kvbus.topics import Command, Query
from kvbus.transport import Delivery, NoAnswer, Stored
from tests.flow.town import TOPICS
from tests.waiting import until

PENDING_MAX = 100
"""Messages that may wait for the slow follower in its client."""
TAKE_S = 0.02
"""What the slow follower takes for each: a third of the pace at which they come."""
SLOW_S = 6.0
BROKER_AWAY_S = 1.0
REPEATS_MAX = 100


class Raised(Exception):  # noqa: N818 - it is no error of anybody's
    """What a callback of a row raises."""


async def raising(scene: Scene) -> None:
    """Handlers and responders raise at each message, before, during and after a loss of the broker."""
    bus, heard = scene.follower.bus, 0

    async def handler(_delivery: Delivery) -> None:
        nonlocal heard
        heard += 1
        raise Raised

    async def responder(_delivery: Delivery) -> bytes:
        raise Raised

    for subject in (TOPICS.live_facts(), TOPICS.heartbeat()):
        await bus.subscribe(subject, handler)
    await bus.respond("kv.query.nobody.stats", responder)

    async def ask_all() -> None:
        scene.row.check(isinstance(await bus.request("kv.query.nobody.stats", b"", wait_s=0.3), NoAnswer), "answered")
        for verb in (Command.CANCEL, Command.TRANSFER):  # no event at all: what answers them in the worker raises
            answer = await bus.request(TOPICS.command("b", verb), b"no event", wait_s=0.3)
            scene.row.check(isinstance(answer, NoAnswer), f"{verb} answered what is no event")
        answer = await bus.request(TOPICS.query("b", Query.STATS), b"no event", wait_s=0.3)
        scene.row.check(isinstance(answer, NoAnswer), "a query answered what is no event")

    await ask_all()
    scene.stage.broker.kill()
    await asyncio.sleep(BROKER_AWAY_S)
    await scene.stage.broker.start()
    await until(lambda: bus.health().connected, what="the follower is connected again")
    before = heard
    await ask_all()
    await until(lambda: heard > before, what="handlers that raised hear on")
    counters = bus.health().counters
    scene.row.notes.append(f"{counters.get('handler_raised', 0)} times a handler raised, and heard on")
    scene.row.check(counters.get("responder_raised", 0) >= 2, "no responder has raised")


async def oversized(scene: Scene) -> None:
    """Messages over a limit are refused before they are sent; one that is sent past that guard costs a connection."""
    bus = scene.follower.bus
    before = bus.health().counters
    for subject, length in (
        (TOPICS.heartbeat("x"), EVENT_LENGTH_MAX_BYTES),
        (TOPICS.facts("x"), EVENT_LENGTH_MAX_BYTES),
        (TOPICS.command("b", Command.LEASE, "m0"), REQUEST_LENGTH_MAX_BYTES),
    ):
        try:
            if subject == TOPICS.facts("x"):
                await bus.store(subject, bytes(length), message_id="x")  # the id in the header is too much
            else:
                await bus.publish(subject, bytes(length + 1))
        except BusError as error:
            scene.row.check("too long" in str(error), f"refused for another reason: {error}")
        else:
            scene.row.problems.append(f"{length} bytes to {subject} were not refused")
    scene.row.check(bus.health().counters == before and bus.health().connected, "a refusal cost the connection")
    client = bus._link.client  # noqa: SLF001 - past the guard, as no caller can go
    client._max_payload = 8 << 20  # noqa: SLF001 - same
    await client.publish(TOPICS.heartbeat("x"), bytes(2 << 20))
    await until(lambda: bus.health().counters.get("rebuilt", 0), 20, what="the client that was closed is replaced")
    scene.row.notes.append("the broker closed the follower's client for good once; it was replaced")


async def slow(scene: Scene) -> None:
    """The follower's client drops what it cannot queue; the follower reads that from the log, and slows nobody."""
    await asyncio.sleep(SLOW_S)
    dropped = scene.follower.bus.health().counters.get("client_SlowConsumerError", 0)
    scene.row.check(dropped, "the client of the slow follower dropped nothing: that proves nothing")
    scene.row.notes.append(f"the slow follower's client dropped {dropped} messages, and it read them in the log")


@contextmanager
def pending_limit() -> Iterator[None]:
    """Let at most so many messages wait in clients that subscribe meanwhile."""
    usual, bus_routes.QUEUED_MAX = bus_routes.QUEUED_MAX, PENDING_MAX
    try:
        yield
    finally:
        bus_routes.QUEUED_MAX = usual


async def injected(scene: Scene) -> None:
    """What two epochs of b have said is said again: twice, in the opposite order, and by the old epoch's own words."""
    stage = scene.stage
    old = await stage.bus.history(TOPICS.facts("b")), await stage.bus.history(TOPICS.settle("b"))
    heard: list[Delivery] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery)

    subscriptions = [await stage.bus.subscribe(TOPICS.heartbeat("b"), hear)]
    await until(lambda: heard, what="a heartbeat of the old epoch")
    before = stage.registered["b"].epoch
    await stage.restart("b")
    scene.row.check(stage.registered["b"].epoch != before, "the new run has the old epoch")
    await scene.served()
    new = await stage.bus.history(TOPICS.facts("b")), await stage.bus.history(TOPICS.settle("b"))
    for deliveries in (*old, *new):
        chosen = deliveries[-REPEATS_MAX:]
        for delivery in (*chosen, *reversed(chosen)):
            again = await stage.bus.store(delivery.subject, delivery.data, message_id=f"again-{secrets.token_hex(8)}")
            if isinstance(again, Stored):
                scene.injected.add((TOPICS.parse(delivery.subject).family, again.sequence))
    for delivery in heard:
        await stage.bus.publish(delivery.subject, delivery.data)
    for subscription in subscriptions:
        await subscription.close()
    epochs = {decode(delivery.data).header.e for delivery in old[0]}
    scene.row.check(before in epochs, "nothing of an old epoch was injected")
    scene.row.notes.append(f"{len(scene.injected)} events injected, {len(heard)} heartbeats of the old epoch")
