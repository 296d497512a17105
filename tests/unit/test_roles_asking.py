"""Asking a source that nobody hears for: what it may mean, and for how long it is believed to come back."""

import asyncio
import time

from kvbus.events import Header, InstanceRecord, LendAnswered, LendRequested, ReaderKey, encode
from kvbus.ledger.facts import FailureClass
from kvbus.parts import ProcessIdentity
from kvbus.processes import identity
from kvbus.roles import asking
from kvbus.roles.asking import Asker, Granted, NotGranted
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Registered
from kvbus.testing.bus import MemoryBus
from kvbus.topics import Command, Topics
from kvbus.transport import Delivery, NoAnswer
from tests.waiting import until

TOPICS = Topics()
ELSEWHERE = ProcessIdentity(pid=4_242, start_ticks=1, boot_id="another host", pid_namespace=1)
KEY = ReaderKey(instance="b", member="m0", epoch=9 << 32 | 1, transfer="T1", attempt=1, rank=0)


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
        record = InstanceRecord(
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
        return await self.asker.ask(
            question,
            Registered("a", "m0", 7, record),
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
