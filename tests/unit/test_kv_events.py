"""What vLLM says of its blocks is read strictly, whatever the bytes are; and as vLLM itself writes it."""

import asyncio
import time
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.blocks import BLOCKS_MAX, prompt_names
from kvbus.engines.kv_events import Batch, BlockBook, StreamPlace
from kvbus.engines.zmq_events import ZmqEvents
from kvbus.errors import PeerError
from tests.absent import absent
from tests.unit.helpers.vllm_publisher import CLEARED, VllmPublisher, as_array, payload_of, removed, stored

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
WRITTEN = """
import sys
from vllm.distributed.kv_events import (
    AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher,
)
out = ZmqEventPublisher(0, endpoint="ipc://" + sys.argv[1], replay_endpoint="ipc://" + sys.argv[2])
out.publish(KVEventBatch(ts=1.0, events=[BlockStored(
    block_hashes=[b"a" * 32, 2**64 - 1], parent_block_hash=None, token_ids=list(range(64)), block_size=32,
    lora_id=None, medium="GPU", lora_name=None)]))
print("published", flush=True)
for _ in sys.stdin:
    out.publish(KVEventBatch(ts=2.0, events=[BlockRemoved(block_hashes=[b"a" * 32], medium="GPU"), AllBlocksCleared()]))
out.shutdown()
"""

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
kinds = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Another"])


@given(st.one_of(st.binary(), plain.map(msgpack.packb)))
def test_bytes_that_are_no_batch_are_refused_and_change_nothing(data: bytes) -> None:
    book = BlockBook()
    book.changes(payload_of([stored([1], range(4))], time_s=0))
    try:
        book.changes(data)
    except PeerError:
        assert len(book) == 1


@pytest.mark.parametrize("size", [0, -1, 2**63, 2**64 - 1, 1 << 30])
def test_a_block_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(PeerError, match="no block size that can be"):
        BlockBook().changes(payload_of([stored([1], range(4), block_size=size)], time_s=0))


def test_a_medium_with_a_long_name_is_cut_to_what_travels() -> None:
    events = [stored([1], range(4), medium="remote storage " * 9), removed(1, medium="remote storage " * 9)]
    _, changes = BlockBook().changes(payload_of(events, time_s=0))
    assert [change.medium for change in changes] == [("remote storage " * 9)[:32]] * 2


@given(st.lists(st.tuples(kinds, st.lists(plain, max_size=9)), max_size=4))
def test_events_of_a_known_kind_with_wrong_fields_are_refused_and_never_raise_anything_else(
    events: list[tuple[str, list[object]]],
) -> None:
    payload = payload_of([[kind, *rest] for kind, rest in events], time_s=0)
    try:
        rank, changes = BlockBook().changes(payload)
    except PeerError:
        return
    assert rank == 0
    assert all(change.change in {"stored", "removed", "cleared"} for change in changes)


def test_one_wrong_event_spoils_its_batch_whole() -> None:
    book = BlockBook()
    with pytest.raises(PeerError, match="block hash"):
        book.changes(payload_of([stored([1], range(4)), removed("x")], time_s=0))  # type: ignore[arg-type]
    assert len(book) == 0


def test_a_block_in_two_places_is_known_until_it_has_left_both() -> None:
    book = BlockBook()
    for event, known in (
        (stored([1], range(4)), 1),
        (stored([1], range(4), medium="CPU"), 1),
        (removed(1), 1),
        (removed(1, medium="CPU"), 0),
        (removed(1), 0),
        (as_array(stored([2], range(4))), 1),
        (CLEARED, 0),
    ):
        book.changes(payload_of([event], time_s=0))
        assert len(book) == known


def test_a_large_event_is_cut_into_changes_that_fit_and_follow_on_each_other() -> None:
    blocks, tokens = range(1, 2 * BLOCKS_MAX + 2), range(2 * BLOCKS_MAX + 1)
    _, changes = BlockBook().changes(payload_of([stored(blocks, tokens, block_size=1)], time_s=0))
    assert [len(change.hashes) for change in changes] == [BLOCKS_MAX, BLOCKS_MAX, 1]
    assert changes[1].parent == changes[0].hashes[-1]
    assert tuple(name for change in changes for name in change.names) == prompt_names(tokens, 1)


def test_a_repeat_is_known_and_another_batch_of_the_same_number_is_not() -> None:
    place = StreamPlace()
    place.note(Batch(0, b"one"))
    assert place.knows(Batch(0, b"one"))
    assert not place.knows(Batch(0, b"two"))
    assert not place.knows(Batch(1, b"one"))
    assert place.last == 0


@pytest.mark.slow
async def test_what_a_real_vllm_publishes_is_read(tmp_path: Path) -> None:
    if not VLLM.exists():
        absent("no vLLM here: make vllm installs it into .venv-vllm", excused="KVBUS_WITHOUT_VLLM")
    live, replay = tmp_path / "live", tmp_path / "replay"
    pipe, arguments = asyncio.subprocess.PIPE, (str(live), str(replay))
    vllm = await asyncio.create_subprocess_exec(str(VLLM), "-c", WRITTEN, *arguments, stdin=pipe, stdout=pipe)
    assert vllm.stdin
    assert vllm.stdout
    try:
        async with asyncio.timeout(250):
            while (await vllm.stdout.readline()).strip() != b"published":
                assert not vllm.stdout.at_eof()
            async with ZmqEvents(f"ipc://{live}", f"ipc://{replay}") as stream:
                found: list[Batch] = []
                while not found:  # its thread may not have taken it yet
                    found = [batch async for batch in stream.replay(0)]
                while not stream.connected:
                    await stream.next(0.1)
                vllm.stdin.write(b"more\n")
                while (second := await stream.next(0.5)) is None:
                    vllm.stdin.write(b"more\n")  # the subscription may have been on its way
    finally:
        vllm.kill()
        await vllm.wait()
    book = BlockBook()
    (first,) = found
    rank, (change,) = book.changes(first.payload)
    assert (first.sequence, rank) == (0, 0)
    assert change.hashes == (b"a" * 32, b"\xff" * 8)
    assert change.names == prompt_names(range(64), 32)
    assert (change.block_tokens, change.medium, change.parent) == (32, "GPU", b"")
    _, changes = book.changes(second.payload)
    assert second.sequence >= 1
    assert [one.change for one in changes] == ["removed", "cleared"]


async def test_a_batch_that_comes_just_as_the_wait_for_one_ends_is_not_lost() -> None:
    wait_s = 0.02
    async with VllmPublisher(replay=False) as vllm, ZmqEvents(vllm.addresses[0]) as stream:
        await vllm.until_subscribed()

        async def publish_and_hold_the_loop(number: int) -> None:
            await vllm.publish(stored([number], range(4)))
            ends_at = time.monotonic() + 2 * wait_s
            while time.monotonic() < ends_at:  # so that batch and end of the wait are found at once
                pass

        for number in range(10):
            batch, _ = await asyncio.gather(stream.next(wait_s), publish_and_hold_the_loop(number))
            batch = batch or await stream.next(60.0)
            assert batch is not None
            assert batch.sequence == number
