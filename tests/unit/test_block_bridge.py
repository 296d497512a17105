"""vLLM's KV events become one stream of blocks on the bus: in order, repaired or told, and without token ids."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from docs.prefix_index import PrefixIndex
from kvbus.blocks import BlockChange, BlocksChanged, BlocksUnseen, prompt_names
from kvbus.engines.kv_events import Batch
from kvbus.engines.zmq_events import ZmqEvents
from kvbus.errors import PeerError
from kvbus.events import EVENT_LENGTH_MAX_BYTES, Event, Header, encode
from kvbus.names import epoch_from
from kvbus.roles.block_bridge import BlockBridge, BridgeSettings, length_max
from kvbus.subscriber import Seen, Subscriber
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Topics
from tests.unit.helpers.vllm_publisher import (
    CLEARED,
    VllmPublisher,
    as_array,
    payload_of,
    removed,
    stored,
)
from tests.waiting import until

TOPICS = Topics()
QUICK = BridgeSettings("a", look_s=0.05, dead_after_s=60.0)
DEAD_AFTER_S = 1.5
"""Thirty looks, so that a process that others starve for a second is not taken for dead."""
PROMPT = tuple(range(70_000, 70_012))
H1, H2, H3 = 2**64 - 1, 11, bytes(range(32))


@dataclass
class Heard:
    """A router: what it read, and the index that it keeps of it."""

    bus: MemoryBus
    events: list[Event] = field(default_factory=list)
    index: PrefixIndex = field(default_factory=PrefixIndex)

    async def read(self) -> None:
        async with aclosing(Subscriber(self.bus).blocks()) as items:
            async for item in items:
                if isinstance(item, Seen):
                    self.events.append(item.event)
                    self.index.take(item.event)

    @property
    def told(self) -> list[str]:
        """Each change in one word: its kind, and the last byte of each hash."""
        bodies = [event.body for event in self.events]
        return [
            " ".join((change.change, *(str(hash_[-1]) for hash_ in change.hashes)))
            for body in bodies
            if isinstance(body, BlocksChanged)
            for change in body.changes
        ]

    @property
    def reasons(self) -> list[str]:
        bodies = [event.body for event in self.events if isinstance(event.body, BlocksChanged)]
        return [change.reason for body in bodies for change in body.changes if change.change == "cleared"]

    @property
    def epochs(self) -> list[int]:
        return list(dict.fromkeys(event.header.e for event in self.events))

    def held(self) -> int:
        return self.index.prefixes(PROMPT).get("a", 0)


@dataclass
class Running:
    """A bridge at work, and a router that reads what it says."""

    bridge: BlockBridge
    bus: MemoryBus
    heard: Heard
    task: "asyncio.Task[str]"
    stream: ZmqEvents


@asynccontextmanager
async def bridged(publisher: VllmPublisher, settings: BridgeSettings = QUICK) -> AsyncIterator[Running]:
    broker = MemoryBroker()
    bus, router = broker.connect(), Heard(broker.connect())
    live, replay = publisher.addresses
    epochs = itertools.count(1)
    async with ZmqEvents(live, replay if publisher.has_replay else "") as stream:
        bridge = BlockBridge(stream, bus, TOPICS, settings, next_epoch=lambda: epoch_from(next(epochs), 7))
        reading, task = asyncio.create_task(router.read()), asyncio.create_task(bridge.run())
        await publisher.until_subscribed()
        try:
            yield Running(bridge, bus, router, task, stream)
        finally:
            for one in (reading, task):
                one.cancel()
            await asyncio.gather(reading, task, return_exceptions=True)
            await router.bus.close()
            await bus.close()


async def test_batches_come_in_order_with_names_that_a_router_can_compute_and_without_token_ids() -> None:
    async with VllmPublisher() as vllm, bridged(vllm) as run:
        await vllm.publish(stored([H1, H2], PROMPT[:8]))
        await vllm.publish(as_array(stored([H3], PROMPT[8:], H2)), removed(H1))
        await until(lambda: len(run.heard.told) == 4)
        assert run.heard.told == ["cleared", "stored 255 11", "stored 31", "removed 255"]
        first, second = (event.body for event in run.heard.events[1:])
        assert isinstance(first, BlocksChanged)
        assert isinstance(second, BlocksChanged)
        assert (*first.changes[0].names, *second.changes[0].names) == prompt_names(PROMPT, 4)
        assert second.changes[0].parent == (11).to_bytes(8, "big")
        kept = b"".join(delivery.data for delivery in await run.bus.history(TOPICS.blocks_filter()))
        for token in PROMPT:
            packed = payload_of([token], time_s=0)[-6:-1]  # as msgpack writes it
            assert not any(form in kept for form in (packed, str(token).encode(), token.to_bytes(4, "little")))
    assert [event.header.s for event in run.heard.events] == [1, 2, 3]


def many_small() -> list[dict[str, object]]:
    """A thousand blocks dropped and a thousand stored, one at a time; 320 KB as one message."""
    hashes = [number.to_bytes(64, "big") for number in range(2_000)]
    return [event for n in range(1_000) for event in (removed(hashes[n]), stored([hashes[-1 - n]], PROMPT[:4]))]


async def test_a_batch_of_many_small_changes_is_told_in_messages_that_a_broker_takes() -> None:
    events = many_small()
    async with VllmPublisher() as vllm, bridged(vllm) as run:
        await vllm.publish(*events)
        await until(lambda: len(run.heard.told) == 1 + len(events))
        lengths = [len(delivery.data) for delivery in await run.bus.history(TOPICS.blocks_filter())]
        assert run.bridge.counts["store_retries"] == run.bridge.counts["too_long"] == 0
    assert sum(lengths) > EVENT_LENGTH_MAX_BYTES > max(lengths)
    assert [event.header.s for event in run.heard.events] == list(range(1, len(lengths) + 1))


async def test_a_message_that_is_too_long_for_the_bus_is_not_tried_again_and_its_loss_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.roles.block_bridge.PART_LENGTH_MAX_BYTES", 2 * EVENT_LENGTH_MAX_BYTES)
    events = many_small()
    async with VllmPublisher() as vllm, bridged(vllm) as run:
        await vllm.publish(*events)
        await vllm.publish(stored([1], PROMPT[:4]))
        await until(lambda: run.heard.told[-1:] == ["stored 1"])
        assert run.heard.reasons[-1] == "the broker takes no message as long as that of batch 0"
        assert (run.bridge.counts["too_long"], run.bridge.counts["store_retries"]) == (1, 0)
    assert [event.header.s for event in run.heard.events] == [1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [
        BlockChange(change="removed", hashes=(b"a",)),
        BlockChange(change="cleared", reason="é" * 2_000),
        BlockChange(
            change="stored", hashes=(b"a" * 64,) * 2_000, names=(b"n" * 16,) * 2_000, parent=b"p" * 64,
            block_tokens=2**63 - 1, medium="é" * 32, group=2**63 - 1, lora="é" * 200,
        ),
    ],
)  # fmt: skip
def test_no_change_is_longer_than_its_bound(change: BlockChange) -> None:
    header = Header(k="blocks", i="a", m="dp0", e=2**63 - 1, s=2**63 - 1, t=2**63 - 1)
    one, none = (len(encode(header, BlocksChanged(changes=changes))) for changes in ((change,), ()))
    assert one - none <= length_max(change) < EVENT_LENGTH_MAX_BYTES


async def test_a_router_knows_the_longest_prefix_and_forgets_it_with_its_first_block() -> None:
    async with VllmPublisher() as vllm, bridged(vllm) as run:
        await vllm.publish(stored([1, 2, 3], PROMPT))
        await until(lambda: run.heard.held() == 12)
        await vllm.publish(removed(3))
        await until(lambda: run.heard.held() == 8)
        await vllm.publish(stored([1], PROMPT[:4], medium="CPU"), removed(1))  # it is still in host memory
        await vllm.publish(removed(2))
        await until(lambda: run.heard.held() == 4)
        await vllm.publish(CLEARED)
        await until(lambda: run.heard.held() == 0)


async def test_a_block_with_more_in_it_than_tokens_has_no_name_and_neither_has_one_behind_it() -> None:
    async with VllmPublisher() as vllm, bridged(vllm) as run:
        await vllm.publish(stored([1, 2], PROMPT[:8], extra=[None, ["salt"]]))
        await vllm.publish(stored([3], PROMPT[8:], 2))
        await vllm.publish(stored([4], PROMPT[:4], lora="one", extra=[["one"]]))
        await until(lambda: len(run.heard.told) == 4)
        names = [event.body.changes[0].names for event in run.heard.events if isinstance(event.body, BlocksChanged)]
        assert names[1:] == [
            (prompt_names(PROMPT, 4)[0], b""),
            (b"",),
            prompt_names(PROMPT[:4], 4, lora="one"),
        ]


@pytest.mark.parametrize("with_topic", [False, True])
async def test_a_batch_that_was_dropped_is_asked_for_again(with_topic: bool) -> None:  # noqa: FBT001
    async with VllmPublisher(with_topic=with_topic) as vllm, bridged(vllm) as run:
        await vllm.publish(stored([1], PROMPT[:4]))
        await vllm.publish(stored([2], PROMPT[4:8], 1), lose=True)
        await vllm.publish(stored([3], PROMPT[8:], 2))
        await until(lambda: run.heard.held() == 12)
        assert run.heard.told == ["cleared", "stored 1", "stored 2", "stored 3"]


async def test_a_last_batch_that_was_dropped_is_found_although_nothing_follows() -> None:
    async with VllmPublisher() as vllm, bridged(vllm) as run:
        await vllm.publish(stored([1], PROMPT[:4]))
        await until(lambda: run.heard.held() == 4)
        await vllm.publish(removed(1), lose=True)
        await until(lambda: run.heard.held() == 0)
        assert run.heard.told == ["cleared", "stored 1", "removed 1"]


async def test_batches_out_of_order_are_put_in_order() -> None:
    async with VllmPublisher() as vllm, bridged(vllm) as run:
        numbers = [vllm.keep(stored([1], PROMPT[:4])), vllm.keep(removed(1)), vllm.keep(stored([1], PROMPT[:4]))]
        for number in reversed(numbers):
            await vllm.resend(number)
        await until(lambda: run.bridge.counts["repeated"] >= 1)
        await until(lambda: run.heard.held() == 4)
        assert run.heard.told == ["cleared", "stored 1", "removed 1", "stored 1"]
        assert len(run.heard.epochs) == 1


@pytest.mark.parametrize("replay", [False, True])
async def test_what_cannot_be_repaired_is_told_before_anything_that_follows(replay: bool) -> None:  # noqa: FBT001
    async with VllmPublisher(replay=replay, buffer=1) as vllm, bridged(vllm) as run:
        await vllm.publish(stored([1], PROMPT[:4]))
        await until(lambda: run.heard.held() == 4)
        vllm.answers = False  # so that the bridge does not find the lost one before it is gone
        await vllm.publish(removed(1), lose=True)
        vllm.keep(stored([9], PROMPT[4:8], 1))
        vllm.answers = True
        await vllm.resend(2)
        await until(lambda: "stored 9" in run.heard.told)
        lost = "1 batches before 2 are lost"
        assert run.heard.reasons[1:] in ([lost], [f"the engine started anew: it has another batch {1}"])
        assert run.heard.held() == 0
        assert run.heard.told[-2:] == ["cleared", "stored 9"]


@pytest.mark.parametrize("ahead", [0, 3])
async def test_a_restart_begins_an_epoch_even_where_the_new_run_is_ahead_of_the_old(ahead: int) -> None:
    async with VllmPublisher() as old, bridged(old) as run:
        addresses = old.addresses
        await old.publish(stored([1], PROMPT[:4]))
        await old.publish(stored([2], PROMPT[4:8], 1))
        await until(lambda: run.heard.held() == 8)
        await old.__aexit__()
        async with VllmPublisher(addresses=addresses) as new:
            new.keep(stored([5], PROMPT[:4]))
            for other in range(ahead):
                new.keep(stored([20 + other], range(4)))
            # On a starved machine more epochs may begin: then a connection or an answer was lost on the way there.
            anew = ["cleared", "stored 5", *(f"stored {20 + other}" for other in range(ahead))]
            await until(lambda: run.heard.told[-len(anew) :] == anew, what="a new epoch tells all of the new run")
            assert run.heard.held() == 4
            assert len(run.heard.epochs) >= 2
            assert {event.header.e for event in run.heard.events[-len(anew) :]} == {run.heard.epochs[-1]}


async def test_without_replay_another_run_is_not_taken_for_the_same_though_its_number_fits() -> None:
    async with VllmPublisher(replay=False) as old, bridged(old) as run:
        addresses = old.addresses
        await old.publish(stored([1], PROMPT[:4]))
        await old.publish(stored([2], PROMPT[4:8], 1))
        await until(lambda: run.heard.held() == 8)
        await old.__aexit__()
        async with VllmPublisher(replay=False, addresses=(addresses[0], "")) as new:
            for number in (21, 22):
                new.keep(stored([number], range(4)))
            await new.until_subscribed()
            await new.publish(stored([23], range(4)))  # batch 2, which is what would follow
            await until(lambda: "stored 23" in run.heard.told)
        assert run.heard.told[-2:] == ["cleared", "stored 23"]
        assert run.heard.held() == 0
        assert len(run.heard.epochs) == 2


async def test_garbage_is_counted_and_what_hid_behind_it_is_told_to_be_unknown() -> None:
    async with VllmPublisher() as vllm, bridged(vllm) as run:
        await vllm.publish(stored([1], PROMPT[:4]))
        await until(lambda: run.heard.held() == 4)
        for frames in ((b"",), (b"", b"12345678"), (b"", b"short", b"x"), (b"", b"\xff" * 8, b"x"), (b"",) * 9):
            await vllm.pub.send_multipart(frames)
        await vllm.publish(payload=b"\xc1 no msgpack")
        await vllm.publish(stored([2], PROMPT[:4]))
        await until(lambda: "stored 2" in run.heard.told)
        assert run.heard.told == ["cleared", "stored 1", "cleared", "stored 2"]
        assert run.heard.reasons[-1] == "batch 1 cannot be read"
        assert run.stream.counts["garbage"] == 5
        assert run.bridge.counts["garbage"] == 1


@pytest.mark.parametrize("replay", [False, True])
async def test_a_dead_stream_raises_the_alarm_and_ends_the_bridge(replay: bool) -> None:  # noqa: FBT001
    settings = BridgeSettings("a", look_s=0.05, dead_after_s=DEAD_AFTER_S)
    async with VllmPublisher(replay=replay) as vllm, bridged(vllm, settings) as run:
        await vllm.publish(stored([1], PROMPT[:4]))
        await until(lambda: run.heard.held() == 4)
        await asyncio.wait({run.task}, timeout=1.5 * DEAD_AFTER_S)
        assert not run.task.done()  # quiet is not dead
        await vllm.__aexit__()
        await until(run.task.done)
        assert "no sign of life of the engine's KV events any more" in run.task.result()
        await until(lambda: run.heard.held() == 0)
        last = run.heard.events[-1].body
        assert isinstance(last, BlocksUnseen)
        assert last.silent_s >= DEAD_AFTER_S


async def test_a_publisher_that_is_connected_but_answers_no_replay_is_dead() -> None:
    settings = BridgeSettings("a", look_s=0.05, dead_after_s=DEAD_AFTER_S)
    async with VllmPublisher() as vllm, bridged(vllm, settings) as run:
        await vllm.publish(stored([1], PROMPT[:4]))
        await until(lambda: run.heard.held() == 4)
        vllm.answers = False
        await until(run.task.done)
        assert "any more" in run.task.result()


async def test_while_the_broker_is_away_nothing_is_lost_and_nothing_said_twice() -> None:
    async with VllmPublisher() as vllm, bridged(vllm) as run:
        await vllm.publish(stored([1], PROMPT[:4]))
        await until(lambda: run.heard.held() == 4)
        run.bus.cut()
        for number in range(2, 30):
            await vllm.publish(stored([number], range(4)), lose=number % 3 == 0)
        await until(lambda: run.bridge.counts["store_retries"] >= 1)
        run.bus.restore()
        await until(lambda: len(run.heard.told) == 30)
        assert run.heard.told == ["cleared", *(f"stored {number}" for number in range(1, 30))]


async def until_later(wait_s: float) -> None:
    """Let a quiet spell pass."""
    await asyncio.wait({asyncio.get_running_loop().create_future()}, timeout=wait_s)


class ScriptedStream:
    """An engine that stores, removes, restarts and loses by a seed; what it holds is known."""

    def __init__(self, seed: int, steps: int) -> None:
        self.random = random.Random(seed)
        self.steps = steps
        self.counts: Counter[str] = Counter()
        self.connected = True
        self.has_replay = self.random.random() < 0.7
        self.always_answers = self.random.random() < 0.5
        self.buffer_max = self.random.choice((3, 1_000))
        self.buffer: list[Batch] = []
        self.sequence = 0
        self.run = 0
        self.held: set[int] = set()
        self.quiet = asyncio.Event()

    async def next(self, wait_s: float) -> Batch | None:
        while self.steps:
            self.steps -= 1
            batch = self._step()
            if self.random.random() < 0.25:
                continue  # lost on the way
            return batch
        if not self.quiet.is_set():  # one batch that arrives, so that a stream without replay shows its gap, too
            self.quiet.set()
            return self._step()
        await until_later(wait_s)
        return None

    async def replay(self, first: int) -> AsyncIterator[Batch]:
        if not self.always_answers and not self.quiet.is_set() and self.random.random() < 0.3:
            raise PeerError("not answered")
        for batch in tuple(self.buffer):
            if batch.sequence >= first:
                yield batch

    def _step(self) -> Batch:
        if self.random.random() < 0.1:
            self.run, self.sequence, self.buffer = self.run + 1, 0, []
            self.counts["connected"] += 1
            self.held.clear()
        block = self.random.randrange(1, 7)
        if block in self.held:
            self.held.discard(block)
            event = removed(block)
        else:
            self.held.add(block)
            event = stored([block], [block] * 4)
        payload = payload_of([event], time_s=self.run * 1_000 + self.sequence)
        batch = Batch(self.sequence, payload)
        self.sequence += 1
        self.buffer = [*self.buffer, batch][-self.buffer_max :]
        return batch


@pytest.mark.parametrize("seed", range(60))
async def test_whatever_is_lost_a_router_never_believes_what_the_engine_has_not(seed: int) -> None:
    broker = MemoryBroker()
    stream, router = ScriptedStream(seed, steps=80), Heard(broker.connect())
    epochs = itertools.count(1)
    settings = BridgeSettings("a", look_s=0.01)
    bridge = BlockBridge(stream, broker.connect(), TOPICS, settings, next_epoch=lambda: epoch_from(next(epochs), 7))
    tasks = [asyncio.create_task(router.read()), asyncio.create_task(bridge.run())]
    await until(stream.quiet.is_set)

    async def agrees() -> bool:
        believed = {block for block in range(1, 7) if router.index.prefixes([block] * 4).get("a")}
        whole = stream.has_replay and stream.always_answers and stream.buffer_max == 1_000
        return believed == stream.held if whole else believed <= stream.held

    await until(agrees)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
