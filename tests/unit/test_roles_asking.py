"""Asking a source that nobody hears for: what it may mean, and for how long it is believed to come back."""

import asyncio
import time
from pathlib import Path

import pytest

from kvbus.events import (
    Header,
    InstanceRecord,
    LeaseReleased,
    LendAnswered,
    LendRequested,
    ReaderKey,
    ReleaseConfirmed,
    decode,
    encode,
)
from kvbus.ledger.facts import FailureClass
from kvbus.parts import ProcessIdentity
from kvbus.processes import identity
from kvbus.roles import asking
from kvbus.roles.asking import Asker, Granted, NotGranted
from kvbus.roles.owed import keep_owed, kept_owed
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Registered, registry_key
from kvbus.testing.bus import MemoryBus
from kvbus.topics import Command, Topics
from kvbus.transport import BUCKET_INSTANCES, Delivery, NoAnswer
from tests.waiting import until

TOPICS = Topics()
ELSEWHERE = ProcessIdentity(pid=4_242, start_ticks=1, boot_id="another host", pid_namespace=1)
KEY = ReaderKey(instance="b", member="m0", epoch=9 << 32 | 1, transfer="T1", attempt=1, rank=0)


def record_of(process: ProcessIdentity) -> InstanceRecord:
    return InstanceRecord(
        verify_key=b"\x07" * 32,
        fingerprint="f" * 32,
        model="toy",
        engine="toy",
        block_tokens=4,
        ranks=1,
        page_bytes=64,
        pages=8,
        process=process,
        transports=("memory",),
        version="0.1.0",
    )


class Counting(MemoryBus):
    """A connection that counts the questions that nobody hears."""

    def __init__(self) -> None:
        super().__init__()
        self.unheard = 0

    async def request(self, subject: str, data: bytes, *, wait_s: float) -> bytes | NoAnswer:
        answer = await super().request(subject, data, wait_s=wait_s)
        self.unheard += isinstance(answer, NoAnswer) and answer.reason == "nobody_listens"
        return answer


class Asking:
    """One member that asks, over a bus in memory."""

    def __init__(self) -> None:
        self.bus = Counting()
        self.skipped_s = 0.0
        recorder = Recorder(bus=self.bus, topics=TOPICS, instance="b", member="m0", epoch=9, unix_ns=time.time_ns)
        self.asker = Asker(
            bus=self.bus,
            topics=TOPICS,
            recorder=recorder,
            pause_s=0.01,
            clock=lambda: asyncio.get_running_loop().time() + self.skipped_s,
        )

    async def ask(self, process: ProcessIdentity) -> Granted | NotGranted:
        question = LendRequested(
            key=KEY,
            nonce=b"\x05" * 16,
            fingerprint="f" * 32,
            names=b"\x01" * 16,
            first_block=0,
            on_miss="fail",
            budget_s=30.0,
            wait_s=0.5,
            process=identity(),
            transports=("memory",),
        )
        return await self.asker.ask(
            question,
            Registered("a", "m0", 7, record_of(process)),
            page_bytes=64,
            deadline=asyncio.get_running_loop().time() + 60.0,
            on_computing=lambda: None,
        )


async def refused(delivery: Delivery) -> bytes:
    body = LendAnswered(status="refused", failure="source_misses", reason=f"asked on {delivery.subject}")
    return encode(Header(k=body.KIND, i="a", m="m0", e=7, s=1, t=1), body)


async def until_unheard(one: Asking, times: int) -> None:
    await until(lambda: one.bus.unheard >= times, what=f"nobody heard {times} questions")


async def test_a_source_that_comes_back_from_a_broken_connection_is_asked_again() -> None:
    one = Asking()
    task = asyncio.create_task(one.ask(ELSEWHERE))
    await until_unheard(one, 2)
    await one.bus.respond(TOPICS.command("a", Command.LEASE, "m0"), refused)

    assert await task == NotGranted(FailureClass.SOURCE_MISSES, "asked on kv.cmd.a.lease.m0")


async def test_a_source_that_nobody_hears_for_through_three_beats_of_its_heart_is_gone() -> None:
    one = Asking()
    task = asyncio.create_task(one.ask(ELSEWHERE))
    await until_unheard(one, 2)
    assert not task.done()
    one.skipped_s = asking.NOBODY_MAX_S

    ended = await task
    assert isinstance(ended, NotGranted)
    assert ended.failure is FailureClass.PEER_LOST


async def test_a_source_whose_process_has_died_here_is_gone_at_once() -> None:
    one = Asking()
    ended = await one.ask(identity().model_copy(update={"start_ticks": 1}))

    assert isinstance(ended, NotGranted)
    assert ended.failure is FailureClass.PEER_LOST
    assert one.bus.unheard == 1


def source_elsewhere() -> Registered:
    return Registered("a", "m0", 7, record_of(ELSEWHERE))


async def register(one: Asking, epoch: int) -> None:
    body = record_of(ELSEWHERE)
    data = encode(Header(k=body.KIND, i="a", m="m0", e=epoch, s=1, t=1), body)
    await one.bus.put(BUCKET_INSTANCES, registry_key("a", "m0"), data)


# P18
async def test_a_release_to_a_source_that_is_gone_for_good_is_repeated_and_keeps_nobody_from_leaving() -> None:
    one = Asking()
    one.asker.release(KEY, b"\x05" * 16, source_elsewhere())
    await until_unheard(one, 2)
    assert (one.asker.unconfirmed, one.asker.awaited) == (1, 1), "it may come back"
    one.skipped_s = asking.ABSENT_S + 1
    assert (one.asker.unconfirmed, one.asker.awaited) == (1, 0)
    await register(one, 7)
    heard = one.bus.unheard
    await one.asker.flush(0.0)
    await until_unheard(one, heard + 2)
    assert (one.asker.unconfirmed, one.asker.awaited) == (1, 1), "its record is there again, and so may it be"
    await register(one, 8)
    await until(lambda: one.asker.unconfirmed == 0, what="its next epoch proves its end")
    assert one.asker.awaited == 0


# P18
async def test_whoever_waits_for_releases_has_them_repeated_at_once_and_hears_of_those_that_nobody_confirmed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Asking()
    one.asker.release(KEY, b"\x05" * 16, source_elsewhere())
    await until_unheard(one, 6)  # by now it pauses for long between two tries

    async def confirmed(delivery: Delivery) -> bytes:
        assert decode(delivery.data).header.k == LeaseReleased.KIND
        body = ReleaseConfirmed(known=True)
        return encode(Header(k=body.KIND, i="a", m="m0", e=7, s=1, t=1), body)

    assert await one.asker.flush(0.0) == 1
    heard = one.bus.unheard
    await until_unheard(one, heard + 12)  # at once: doubled again and again, the pauses would take minutes
    subscription = await one.bus.respond(TOPICS.command("a", Command.LEASE, "m0"), confirmed)
    assert await one.asker.flush(60.0) == 0
    await subscription.close()
    one.asker.release(KEY, b"\x05" * 16, source_elsewhere())
    assert await one.asker.flush(0.0) == 1
    assert [owed.key for owed in await one.asker.close()] == [KEY]
    assert "a/m0 has not confirmed that access for T1 has ended" in caplog.text


# P4, P18
async def test_the_next_run_brings_the_word_of_the_one_before_as_it_was_until_it_is_confirmed(tmp_path: Path) -> None:
    before, after, place = Asking(), Asking(), tmp_path / "b.m0.owed"
    before.asker.release(KEY, b"\x05" * 16, source_elsewhere())
    keep_owed(place, await before.asker.close())
    assert place.stat().st_mode & 0o777 == 0o600, "a nonce is for nobody else's eyes"

    heard: list[object] = []

    async def confirmed(delivery: Delivery) -> bytes:
        heard.append(decode(delivery.data).body)
        body = ReleaseConfirmed(known=True)
        return encode(Header(k=body.KIND, i="a", m="m0", e=7, s=1, t=1), body)

    after.asker.bring(kept_owed(place))
    after.asker.bring(kept_owed(place))
    assert after.asker.unconfirmed == 1
    await until_unheard(after, 1)
    assert len(kept_owed(place)) == 1, "a run that crashes loses none"
    await after.bus.respond(TOPICS.command("a", Command.LEASE, "m0"), confirmed)
    assert await after.asker.flush(60.0) == 0
    assert heard == [LeaseReleased(key=KEY, nonce=b"\x05" * 16)]
    keep_owed(place, await after.asker.close())
    assert not place.exists()
    place.write_text("[{")
    assert kept_owed(place) == ()
