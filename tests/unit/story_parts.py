"""A transfer's trail as two members record it: real holders, agreements and recorders; bytes and bus by hand."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvbus.commands.logs import LogReader
from kvbus.events import Event, TransferOutcome, TransferStep
from kvbus.ledger.agreement import Agreement, Party
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Direction, SubmitMode
from kvbus.roles.recorder import Recorder
from kvbus.roles.rounds import Rounds
from kvbus.testing.ledger_parts import ListedLender, ManualBackend
from kvbus.topics import Topics
from kvbus.transport import Bus

HASH = "9f3c" + "0" * 28
TRANSFER = "b-00000007-1"
REQUEST = "requester-1.1"
BLOCKS = 31
BEGAN_NS = 1_700_000_000_000_000_000


def ticking(step_ns: int = 1_000_000) -> Callable[[], int]:
    """Return a clock on which a millisecond passes with each look, so that order shows."""
    now = BEGAN_NS

    def unix_ns() -> int:
        nonlocal now
        now += step_ns
        return now

    return unix_ns


class Member:
    """One member that lends and reads."""

    def __init__(self, bus: Bus, instance: str, *, epoch: int = 7, unix_ns: Callable[[], int]) -> None:
        self.instance, self.epoch = instance, epoch
        self.lender = ListedLender("pool", epoch=epoch)
        self.lending, self.ucx, self.engine = ManualBackend("lending"), ManualBackend("ucx"), ManualBackend("engine")
        self.recorder = Recorder(bus=bus, topics=Topics(), instance=instance, member="m0", epoch=epoch, unix_ns=unix_ns)
        self.holder = LeaseHolder(
            bindings=[
                Binding("lending", self.lending, Direction.READ),
                Binding("ucx", self.ucx, Direction.WRITE),
                Binding("engine-write", self.engine, Direction.WRITE),
            ],
            lenders=[self.lender],
        )
        self.rounds = Rounds(
            holder=self.holder, agreement=Agreement(term=epoch), sink=self.recorder, member="m0", epoch=epoch
        )

    def step(self, step: str, text: str = "", *, transfer: str = TRANSFER, request_hash: str = HASH) -> None:
        """Record a step."""
        cause = "" if step == "accepted" else REQUEST
        self.recorder.event(
            TransferStep(transfer=transfer, request_hash=request_hash, step=step, text=text), cause=cause
        )

    def lease_for_transfer(self, source: str = "a", *, transfer: str = TRANSFER) -> int:
        """Take a write lease for a transfer and open it."""
        lease = self.lender.lend(Direction.WRITE, BLOCKS)
        ticket = self.holder.take(lease, SubmitMode("ucx", Direction.WRITE), now=0.0, peer=source, transfer=transfer)
        self.rounds.decide(lambda agreement: agreement.open(transfer, (Party("m0", self.epoch, 0, ticket),)))
        self.rounds.run()
        return ticket

    def lend(self, reader: str = "b", *, transfer: str = TRANSFER) -> int:
        """Lend the pages of a transfer to a reader."""
        lease = self.lender.lend(Direction.READ, BLOCKS)
        mode = SubmitMode("lending", Direction.READ)
        ticket = self.holder.take(lease, mode, "reader", now=0.0, peer=reader, transfer=transfer)
        self.rounds.run()
        return ticket

    def engine_writes(self, rows: int = 4) -> int:
        """Let the local engine fill some pages."""
        lease = self.lender.lend(Direction.WRITE, rows)
        ticket = self.holder.take(lease, SubmitMode("engine-write", Direction.WRITE), "engine", now=0.0, peer="engine")
        self.rounds.run()
        self.engine.deliver(ticket)
        self.rounds.run()
        return ticket

    def outcome(self, word: str = "settled", **more: object) -> None:
        """Record how the transfer ended."""
        values: dict[str, object] = {
            "transfer": TRANSFER,
            "request_hash": HASH,
            "source": "a",
            "destination": "b",
            "outcome": word,
            "pages_wanted": BLOCKS,
            "total_s": 0.0142,
            "queue_s": 0.003,
        }
        self.recorder.event(TransferOutcome.model_validate(values | more), cause=REQUEST)


class Pair:
    """A source `a` and a destination `b` over one bus, and the trail that they leave there."""

    def __init__(self, bus: Bus, *, unix_ns: Callable[[], int] | None = None) -> None:
        self.bus = bus
        self.unix_ns = unix_ns or ticking()
        self.a = Member(bus, "a", unix_ns=self.unix_ns)
        self.b = Member(bus, "b", unix_ns=self.unix_ns)

    def begin(self, *, transfer: str = TRANSFER, request_hash: str = HASH) -> tuple[int, int]:
        """Run a transfer to the point where bytes move; return the tickets (write on b, read on a)."""
        b = self.b
        for step, text in (("accepted", "from a, on_miss prefill"), ("resolved", "1000 tokens, 31 blocks, 0 here")):
            b.step(step, text, transfer=transfer, request_hash=request_hash)
        write = b.lease_for_transfer(transfer=transfer)
        b.step("leased", f"T{write}: {BLOCKS} pages", transfer=transfer, request_hash=request_hash)
        b.step("asking", f"a for {BLOCKS} blocks, on_miss prefill", transfer=transfer, request_hash=request_hash)
        read = self.a.lend(transfer=transfer)
        b.step("granted", f"lease T{read} of a: {BLOCKS} pages", transfer=transfer, request_hash=request_hash)
        b.step("moving", "by ucx", transfer=transfer, request_hash=request_hash)
        b.holder.assign(write, "order")
        b.rounds.run()
        return write, read

    def whole(self) -> tuple[int, int]:
        """Run one transfer from request to return on both sides."""
        write, read = self.begin()
        self.b.ucx.deliver(write)
        self.b.rounds.run()
        self.b.step("access_ended", "completed")
        self.b.outcome(pages_moved=BLOCKS, length_bytes=2_031_616, lo=0, hi=BLOCKS, evidence=("completed",))
        self.a.lending.deliver(read, evidence=Evidence.PEER_ACK)
        self.a.rounds.run()
        return write, read

    def source_killed(self) -> tuple[int, int]:
        """Let the source die while bytes move: the destination ends its access by closing the endpoint."""
        write, read = self.begin()
        self.b.ucx.fail(write, FailureClass.PEER_LOST, evidence=Evidence.ENDPOINT_DESTROYED)
        self.b.rounds.run()
        self.b.step("access_ended", "endpoint_destroyed")
        self.b.outcome("failed", failure="peer_lost", reason="the transport failed", evidence=("endpoint_destroyed",))
        return write, read

    async def events(self) -> list[Event]:
        """Store what was recorded, and read it back from the bus."""
        async with flushed(self.a, self.b):
            return [seen.event async for seen in LogReader(self.bus, Topics()).newest(10_000)]


@asynccontextmanager
async def flushed(*members: Member) -> AsyncIterator[None]:
    """Have everything stored that the members recorded so far."""
    tasks = [asyncio.create_task(member.recorder.run()) for member in members]
    try:
        for member in members:
            assert await member.recorder.flush(10.0)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def command(name: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a command as a person does, in a process of its own, on a page of 100 columns."""
    program = f"import sys; from kvbus.commands.common import run; from kvbus.commands.{name} import {name}; "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}sys.exit(run({name}))", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
