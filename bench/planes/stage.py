"""Everyone who takes part in one page size: the pools, the source process, and the contestants over the same pages."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from planes.cases import Case, local_pages, pool_pages, source_order
from planes.destination import WAYS, Destination, plain_of
from planes.peers import PEERS, PeerPair
from planes.raw import RawRead
from planes.source import Told, run_source

CONTESTANTS = (
    "raw",
    "kvbus",
    "kvbus-memory",
    "kvbus-ucx",
    "kvbus-socket",
    "plain-socket",
    "kvbus-ucx-tcp",
    *(kind.name for kind in PEERS),
)
START_S = 120.0
"""For a gigabyte to be filled on a busy machine."""

Move = Callable[[], float]
"""Moves all pages of a case once, and returns the seconds that counted."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """Somebody who moves pages, and the processes whose processor time is theirs."""

    name: str
    move: Move
    pids: tuple[int, int]

    def cpu_s(self) -> float:
        """Return the processor time of both processes until now, all of their threads together."""
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.pids)  # what clock_getcpuclockid names


@dataclass
class Stage:
    """The parts of one page size."""

    destination: Destination
    told: Told
    pipe: Connection
    source_bytes: np.ndarray[tuple[int], np.dtype[np.uint8]]
    source_order: list[int]
    peers: dict[str, PeerPair] = field(default_factory=dict)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """Of the present case: (page here, page of the source)."""

    def prepare(self, case: Case, names: tuple[str, ...]) -> list[Contestant]:
        """Return who moves the pages of a case, all of them the same pages."""
        memory = self.destination.pool.memory
        local = local_pages(memory.page_count, case.count, contiguous=case.contiguous)
        self.destination.keep_free(local)
        self.pairs = list(zip(local, self.source_order, strict=False))
        length_bytes = case.length_bytes if case.contiguous else case.page_bytes
        ranges = [(self.local_offset(here), self.source_offset(there)) for here, there in self.pairs]
        if case.contiguous:
            ranges = ranges[:1]
        return [self.contestant(name, case, ranges, length_bytes) for name in CONTESTANTS if name in names]

    def contestant(self, name: str, case: Case, ranges: list[tuple[int, int]], length_bytes: int) -> Contestant:
        """Return one contestant, prepared."""
        here, source = os.getpid(), self.told.pid
        base = self.destination.pool.memory.address
        if name in WAYS:
            return Contestant(name, lambda: self.destination.move(name, case.count), (here, source))
        if name == "raw":
            raw = RawRead(source, [(base + to, self.told.base + from_) for to, from_ in ranges], length_bytes)
            return Contestant(name, lambda: timed(raw.move), (here, source))
        if name == "plain-socket":
            plain = plain_of(self.destination, self.pipe, case, [page for _, page in self.pairs])
            return Contestant(name, lambda: timed(plain.move), (here, source))
        peer = self.peers[name]
        with awake(peer):
            peer.prepare(length_bytes, [to for to, _ in ranges], [from_ for _, from_ in ranges])
        return Contestant(name, peer.move, (peer.sink.pid, peer.source.pid))

    def check(self, contestant: Contestant) -> float:
        """Clear the pages, move them, and compare every byte; return the seconds. RuntimeError where one differs."""
        memory = self.destination.pool.memory
        for here, _ in self.pairs:
            memory.page_bytes(here)[:] = 255
        seconds = self.move(contestant)
        for here, there in self.pairs:
            first = self.source_offset(there)
            if not np.array_equal(memory.page_bytes(here), self.source_bytes[first : first + memory.layout.page_bytes]):
                raise RuntimeError(
                    f"{contestant.name}: page {here} does not hold what page {there} of the source holds"
                )
        return seconds

    def move(self, contestant: Contestant) -> float:
        """Let one contestant move its pages; a peer's processes stand still while it is not their turn."""
        if contestant.name not in self.peers:
            return contestant.move()
        with awake(self.peers[contestant.name]):
            return contestant.move()

    def local_offset(self, page: int) -> int:
        """Return where a page of the destination starts in its pool."""
        memory = self.destination.pool.memory
        return memory.pages_offset + memory.page_stride * page

    def source_offset(self, page: int) -> int:
        """Return where a page of the source starts in its pool."""
        return self.told.pages_offset + self.told.page_stride * page


@contextlib.contextmanager
def stage_for(cases: list[Case], names: tuple[str, ...]) -> Iterator[Stage]:
    """Start the source and the contestants of one page size, and end them all."""
    page_bytes, pages, contiguous = cases[0].page_bytes, pool_pages(cases), cases[0].contiguous
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder, contextlib.ExitStack() as ends:
        path = Path(folder) / "questions"
        arguments = {"contiguous": contiguous}
        process = context.Process(
            target=run_source, args=(theirs, path, page_bytes, pages), kwargs=arguments, daemon=True
        )
        process.start()
        ends.callback(process.join, 10.0)
        ends.callback(process.kill)
        theirs.close()
        if not ours.poll(START_S):
            raise RuntimeError(f"the source process did not start within {START_S:g} s")
        told: Told = ours.recv()
        destination = Destination(page_bytes, pages, told, path)
        ends.callback(destination.close)
        source_path = f"/proc/{told.pid}/fd/{told.fd}"
        source_bytes = np.memmap(source_path, dtype=np.uint8, mode="r", shape=(told.length_bytes,))
        stage = Stage(destination, told, ours, source_bytes, source_order(pages, contiguous=contiguous))
        memory = destination.pool.memory
        for kind in PEERS:
            if kind.name in names:
                mine = f"/proc/{os.getpid()}/fd/{memory.fd}"
                peer = PeerPair(kind, source_path, told.length_bytes, mine, memory.length_bytes)
                ends.callback(peer.close)
                stage.peers[kind.name] = peer
                stand_still(peer)
        yield stage


@contextlib.contextmanager
def awake(peer: PeerPair) -> Iterator[None]:
    """Let a peer's processes run for a while: some of their threads never sleep, and would disturb the others."""
    for pid in peer.pids():
        os.kill(pid, signal.SIGCONT)
    try:
        yield
    finally:
        stand_still(peer)


def stand_still(peer: PeerPair) -> None:
    """Stop a peer's processes until they are awake again."""
    for pid in peer.pids():
        os.kill(pid, signal.SIGSTOP)


def timed(move: Callable[[], None]) -> float:
    """Return how many seconds a call took."""
    began = time.perf_counter()
    move()
    return time.perf_counter() - began
