"""A gateway ends aloud with the first of its parts that ends, and drops what belongs to instances long gone."""

import asyncio

import pytest

from kvbus.errors import KvbusError
from kvbus.events import Header, TransferStep, encode
from kvbus.gateway.answers import Problem
from kvbus.gateway.directory import Directory
from kvbus.gateway.engines import Engines
from kvbus.gateway.feed import Feed
from kvbus.gateway.gates import Gates
from kvbus.gateway.lives import Lives
from kvbus.gateway.records import Record
from kvbus.gateway.restarts import Restarts
from kvbus.gateway.serving import run_gateway
from kvbus.gateway.settings import GatewaySettings
from kvbus.parts import Prompt
from kvbus.subscriber import Seen
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.transport import BUCKET_INSTANCES
from tests.unit.gateway_parts import TOPICS, Played

END_S = 60.0
"""Only a hang meets it."""


class Breaking(MemoryBus):
    """A connection over which the registry can be read until the test says otherwise; then a fault of ours shows."""

    broken = False

    async def keys(self, bucket: str) -> list[str]:
        """List the keys, or fail as nothing of the bus may."""
        if self.broken:
            raise ZeroDivisionError(bucket)
        return list(await super().keys(bucket))


async def test_a_gateway_one_of_whose_parts_fails_ends_with_its_fault() -> None:
    bus = Breaking()

    def ready(_url: str) -> None:
        bus.broken = True

    serving = asyncio.ensure_future(run_gateway(GatewaySettings(), bus, TOPICS, stop=asyncio.Event(), on_ready=ready))
    ended, _ = await asyncio.wait({serving}, timeout=END_S)
    serving.cancel()
    assert ended
    with pytest.raises(ZeroDivisionError):
        await serving


async def test_a_gateway_that_is_told_to_stop_ends_without_a_word() -> None:
    stop = asyncio.Event()
    async with asyncio.timeout(END_S):
        await run_gateway(GatewaySettings(), MemoryBus(), TOPICS, stop=stop, on_ready=lambda _: stop.set())


async def test_a_part_that_ends_by_itself_or_failed_unseen_is_told() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def nothing() -> None:
        return

    ended, failed = Lives(), Lives()
    ended.begin(nothing())
    async with asyncio.timeout(END_S):
        with pytest.raises(KvbusError, match="has ended by itself"):
            await ended.last_until(asyncio.Event())
        task = failed.begin(fail())
        await asyncio.wait({task})
        with pytest.raises(ZeroDivisionError):
            await failed.end()


async def test_facts_that_a_follower_cannot_take_are_not_said_to_be_heard() -> None:
    class Choking:
        def hear(self, seen: Seen) -> tuple[()]:
            raise ZeroDivisionError(seen.sequence)

    bus = MemoryBus()
    feed = Feed(bus, TOPICS)
    feed.follow(Choking())
    running = asyncio.ensure_future(feed.run())
    step = TransferStep(transfer="T", request_hash="ab" * 16, step="accepted")
    async with asyncio.timeout(END_S):
        while not running.done():
            data = encode(Header(k=step.KIND, i="b", m="m0", e=1, s=1, t=1), step)
            await bus.store(TOPICS.facts("b"), data, message_id=f"{bus.broker.logs[0].head}")
            await asyncio.wait({running}, timeout=0.02)
    with pytest.raises(ZeroDivisionError):
        await running
    assert not feed.listening


class Coming:
    """A registry in which instances come and go, and a directory that reads it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(clock=lambda: 0.0)
        self.bus = self.broker.connect()
        self.directory = Directory(self.bus)

    async def only(self, *names: str) -> None:
        """Have these registered, and nobody else."""
        self.broker.entries(BUCKET_INSTANCES).clear()
        for name in names:
            await Played(name, self.bus).register()
        await self.directory.refresh()


@pytest.fixture
def coming(monkeypatch: pytest.MonkeyPatch) -> Coming:
    monkeypatch.setattr("kvbus.gateway.directory.KEEP_S", 0.0)  # who is not registered now is gone for long
    return Coming()


def record(destination: str) -> Record:
    return Record("ab" * 16, "a", destination, "", 0.0, 0.0)


# H24
async def test_gates_of_names_that_are_used_once_go_and_what_they_counted_stays(coming: Coming) -> None:
    gates = Gates(GatewaySettings(), coming.directory)
    for number in range(10):
        await coming.only(f"pod-{number}")
        gate = gates.gate(f"pod-{number}", 0.0)
        one = record(f"pod-{number}")
        gate.enter(one)
        gate.fire(one)
        gate.end(one, "transferred")
        assert gates.names() == [f"pod-{number}"]
        total = gates.total(gates.names(), 0.0)
        assert (total.fired, total.transferred, total.inflight) == (number + 1, number + 1, 0)
        assert (total.seen, total.max_inflight) == (1, 4)


async def test_a_gate_at_which_something_runs_stays_and_so_does_one_that_the_settings_name(coming: Coming) -> None:
    gates = Gates(GatewaySettings(instances=("named",)), coming.directory)
    running = record("running")
    for name in ("running", "idle", "named"):
        gate = gates.gate(name, 0.0)
        if name == "running":
            gate.enter(running)
            gate.fire(running)
    gates.drop_gone(0.0)
    assert set(gates.names()) == {"running", "named"}
    gates.gate("running", 0.0).end(running, "failed")
    gates.drop_gone(0.0)
    assert gates.names() == ["named"]
    assert gates.total(gates.names(), 0.0).failed == 1


async def test_lines_of_instances_that_are_gone_are_dropped_once_nobody_stands_in_them(coming: Coming) -> None:
    engines = Engines(coming.directory, None)
    for number in range(5):
        with pytest.raises(Problem):
            async with engines.answer(f"pod-{number}", Prompt(text="x"), max_tokens=1, salt=""):
                pass
        assert set(engines.statistics()) == {f"pod-{number}"}
    await coming.only("pod-4")
    with pytest.raises(Problem):
        async with engines.answer("pod-5", Prompt(text="x"), max_tokens=1, salt=""):
            pass
    assert set(engines.statistics()) == {"pod-4", "pod-5"}


def test_a_later_word_of_another_run_is_a_restart_and_a_late_one_of_the_run_before_is_none() -> None:
    restarts = Restarts(members_max=2)

    def said(member: str, epoch: int, at_ns: int) -> bool:
        return restarts.spoke(Header(k="k", i="b", m=member, e=epoch, s=1, t=at_ns))

    assert [said("m0", 7, 10), said("m0", 7, 11), said("m1", 7, 10)] == [False] * 3
    assert said("m0", 5, 12)  # epochs are equal or not, and never compared otherwise
    assert not said("m0", 7, 11)
    assert not said("m0", 5, 13)
    for member in ("m2", "m3"):
        said(member, 7, 20)
    assert not said("m0", 7, 30)  # forgotten among many: nothing is concluded


async def test_an_instance_whose_members_are_others_than_before_has_started_anew(coming: Coming) -> None:
    restarts, directory = Restarts(), coming.directory
    await coming.only("b")
    members = dict(directory.instances["b"])
    assert not restarts.registered("b", members)
    assert not restarts.registered("b", {})  # nobody refreshed it for a moment
    assert not restarts.registered("b", members)
    assert restarts.registered("b", members | {"m1": members["m0"]})  # its pool is empty
    assert not restarts.registered("b", members)  # and one that went had nothing that is needed
    restarts.forget("b")
    assert not restarts.registered("b", members | {"m2": members["m0"]})
