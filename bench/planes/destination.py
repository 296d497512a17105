"""The destination: this process's pool, ledger and readers, and whole transfers through them.

A transfer is everything from the write lease and the question to the source until the bytes are known to be whole:
look-up and pins at the source, the signed grant, its checks, the reading, the generations read after it, the facts.
The lease's return is waited for as well, but not counted: the pages are of use before.
"""

import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from dataplane_socket import TCP_ONLY, Plain, layout, views_of
from planes.cases import Case, local_pages
from planes.source import BLOCK_TOKENS, FRAME, LENDERS, SALT, SOURCE_EPOCH, VOCAB_SIZE, Told, Unrecorded, tokens_of

from kvbus.dataplane.choosing import ChoosingReader
from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.planner import Planner
from kvbus.dataplane.reading import ReadOrder
from kvbus.dataplane.socket_reader import SocketReader
from kvbus.dataplane.ucx import UcxPlane, UcxReader
from kvbus.events import Header, LeaseReleased, LendAnswered, LendRequested, ReaderKey, decode, encode
from kvbus.grants import Expected, refusal, unseal
from kvbus.ledger.agreement import Agreement, Party
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import RESULT_BITS, Fact, LeaseFacts
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Backend, Direction, SubmitMode
from kvbus.parts import Body
from kvbus.pool.lease import PoolLease
from kvbus.processes import identity
from kvbus.roles.poolside import PoolSide
from kvbus.roles.rounds import Rounds

LOCAL_EPOCH = 9 << 32 | 1
TRANSFER_WAIT_S = 60.0
"""Of one transfer; a gigabyte over the slowest transport takes two seconds."""
WAYS = {
    "kvbus": ("ucx", ("ucx", "memory", "socket")),
    "kvbus-memory": ("ucx", ("memory",)),
    "kvbus-ucx": ("ucx", ("ucx",)),
    "kvbus-socket": ("ucx", ("socket",)),
    "kvbus-ucx-tcp": ("ucx-tcp", ("ucx",)),
}
"""By contestant: which lender is asked, and for which transports. `kvbus` is what a worker does unless it is told
otherwise: it asks for all, and its planner takes the one that costs least for these pages."""
BINDINGS = {"ucx": "auto", "ucx-tcp": "ucx-tcp"}
"""By lender: which binding reads from it."""


class Watched(Unrecorded):
    """Notes when a ticket's result was reported, and what was said of it."""

    def __init__(self) -> None:
        self.ended_at: dict[int, float] = {}
        self.bits: dict[int, int] = {}
        self.texts: dict[int, str] = {}

    def facts(self, facts: LeaseFacts) -> None:
        """Take one batch."""
        now = time.perf_counter()
        for ticket, _, bits, _, _ in facts.lines:
            self.bits[ticket] = bits
            if bits & RESULT_BITS:
                self.ended_at.setdefault(ticket, now)
        for detail in facts.details:
            self.texts[detail.ticket] = detail.text


@dataclass(frozen=True, slots=True)
class Begun:
    """One transfer under way: its lease, what its source is to be asked, and when it began."""

    contestant: str
    ticket: int
    lease: PoolLease
    question: LendRequested
    began: float


@dataclass(frozen=True, slots=True)
class Brought:
    """What came of one transfer: which pages arrived whole, after how many seconds that was known, and why not all."""

    arrived: tuple[bool, ...]
    seconds: float
    text: str


class Destination:
    """One pool with a reader for each of kvbus's transports."""

    def __init__(self, page_bytes: int, pages: int, told: Told, path: Path) -> None:
        self.told = told
        self.pool = PoolSide.create(
            layout(page_bytes), pages=pages, tokens_max=BLOCK_TOKENS, vocab_size=VOCAB_SIZE, epoch=LOCAL_EPOCH
        )
        self.pool.memory.export()
        self.names = self.pool.names(tokens_of(pages), SALT)
        self.woken = threading.Event()
        self.on_wake: Callable[[], object] = self.woken.set
        self.planes = [UcxPlane(wake=self.wake, settings=settings) for settings in ({}, TCP_ONLY)]
        for plane in self.planes:
            plane.start()
            plane.register(self.pool.memory)
        sockets = SocketReader(wake=self.wake)
        sockets.start()
        sockets.register(self.pool.memory)
        memory = MemoryReader(wake=self.wake)
        memory.start()
        memory.register(self.pool.memory)
        self.process = identity()
        by_ucx, by_tcp = (UcxReader(plane, wake=self.wake) for plane in self.planes)
        self.by_ucx = {"kvbus-ucx": by_ucx, "kvbus-ucx-tcp": by_tcp}
        self.choosing = ChoosingReader(
            "auto", (by_ucx, memory, sockets), planner=Planner(self.process), lanes={by_ucx.name: by_ucx.lanes}
        )
        self.readers: dict[str, Backend] = {"auto": self.choosing, "ucx-tcp": by_tcp}
        self.ways: dict[str, str] = {}
        """By contestant: which way its last transfer took, and why."""
        self.watched = Watched()
        self.holder = LeaseHolder(
            bindings=[Binding(name, reader, Direction.WRITE) for name, reader in self.readers.items()],
            lenders=[self.pool.lender],
        )
        self.rounds = Rounds(
            holder=self.holder,
            agreement=Agreement(term=LOCAL_EPOCH),
            sink=self.watched,
            member="m0",
            epoch=LOCAL_EPOCH,
        )
        self.questions = socket.socket(socket.AF_UNIX)
        self.questions.connect(str(path))
        self.answers = self.questions.makefile("rb")
        self.numbers = itertools.count(1)
        self.kept: list[PoolLease] = []

    def wake(self) -> None:
        """Take note that a reader has something to say; called from the readers' threads."""
        self.on_wake()

    # --------------------------------------------------------------------------------------------------- the pages

    def keep_free(self, pages: list[int]) -> None:
        """Keep all pages but these out of the pool's hands, so that each transfer of a case fills these."""
        for lease in self.kept:
            lease.release()  # its view was never seen, so that its page is free at once
        count = self.pool.memory.page_count
        leases = {lease.pages[0]: lease for lease in (self.one_page() for _ in range(count))}
        for page in pages:
            leases.pop(page).release()
        self.kept = list(leases.values())

    def one_page(self) -> PoolLease:
        """Take some page out of the pool."""
        return self.pool.lender.lend_write(None, (0,), for_peer=False, salt=SALT)

    # ------------------------------------------------------------------------------------------------- one transfer

    def move(self, contestant: str, count: int) -> float:
        """Have so many pages brought; return the seconds until they were delivered. RuntimeError where one was not."""
        brought = self.bring(contestant, count)
        self.pool.lender.evict(self.names[:count])
        if brought.arrived != (True,) * count:
            raise RuntimeError(f"{contestant}: {count} pages were asked for: {brought.text}")
        return brought.seconds

    def bring(self, contestant: str, count: int) -> Brought:
        """Run one whole transfer, whatever comes of it; RuntimeError where it does not end."""
        which = WAYS[contestant][0]
        self.woken.clear()
        begun = self.begin(contestant, count)
        order = self.order(begun, self.said(which, begun.question))
        self.read(begun, order)
        deadline = time.monotonic() + TRANSFER_WAIT_S
        while not self.has_ended(begun) and time.monotonic() < deadline:
            self.woken.wait(0.05)
            self.woken.clear()
            self.rounds.run()
        brought = self.brought(begun)
        self.said(which, LeaseReleased(key=order.grant.reader, nonce=order.grant.nonce))  # as over the bus, each time
        return brought

    def begin(self, contestant: str, count: int) -> Begun:
        """Lease the pages of a transfer; the source is to be asked next."""
        names, transfer = self.names[:count], f"t{next(self.numbers)}"
        which, transports = WAYS[contestant]
        began = time.perf_counter()
        lease = self.pool.lender.lend_write(names, range(count), prompt_blocks=count, salt=SALT)
        mode = SubmitMode(BINDINGS[which], Direction.WRITE)
        ticket = self.holder.take(lease, mode, now=time.monotonic(), peer="A", transfer=transfer)
        parties = (Party("m0", LOCAL_EPOCH, 0, ticket),)
        self.rounds.decide(lambda agreement: agreement.open(transfer, parties))
        self.rounds.run()
        return Begun(contestant, ticket, lease, self.question(transfer, names, transports), began)

    def question(self, transfer: str, names: tuple[bytes, ...], transports: tuple[str, ...]) -> LendRequested:
        """Return what the source is asked."""
        return LendRequested(
            key=ReaderKey(instance="B", member="m0", epoch=LOCAL_EPOCH, transfer=transfer, attempt=1, rank=0),
            nonce=secrets.token_bytes(16),
            fingerprint=self.pool.layout.fingerprint(),
            names=b"".join(names),
            first_block=0,
            salt=SALT,
            on_miss="fail",
            budget_s=TRANSFER_WAIT_S,
            wait_s=0.0,
            process=self.process,
            source_epoch=SOURCE_EPOCH,
            transports=transports,
        )

    def order(self, begun: Begun, answer: object) -> ReadOrder:
        """Check the source's grant as a worker does; RuntimeError where it did not lend."""
        layout_ = self.pool.layout
        if not isinstance(answer, LendAnswered) or answer.status != "granted":
            raise RuntimeError(f"the source did not lend: {answer}")
        grant = unseal(answer.grant, answer.signature, self.told.verify_key)
        count = len(begun.lease.pages)
        expected = Expected(begun.question.key, "A", SOURCE_EPOCH, layout_.fingerprint(), layout_.page_bytes, count)
        if text := refusal(grant, expected):
            raise RuntimeError(f"the grant is refused: {text}")
        return ReadOrder(grant, expected, self.told.process)

    def read(self, begun: Begun, order: ReadOrder) -> None:
        """Let the readers begin."""
        self.holder.assign(begun.ticket, order)
        self.rounds.run()

    def has_ended(self, begun: Begun) -> bool:
        """Whether nothing of the transfer is held any more."""
        return not self.holder.bits(begun.ticket)

    def brought(self, begun: Begun) -> Brought:
        """Return what came of a transfer; RuntimeError where it has not ended."""
        ticket, watched = begun.ticket, self.watched
        if not watched.bits[ticket] & Fact.RETURNED:
            raise RuntimeError(f"{begun.contestant}: the transfer did not end within {TRANSFER_WAIT_S:g} s")
        text, ended_at = watched.texts.pop(ticket, ""), watched.ended_at.pop(ticket)
        del watched.bits[ticket]
        for way in self.choosing.ways(ticket):
            if way.step == "moving":
                self.ways[begun.contestant] = way.text
        return Brought(begun.lease.arrived or (), ended_at - begun.began, text)

    def said(self, which: str, body: Body) -> object:
        """Return what a lender answers to a message."""
        self.questions.sendall(self.framed(which, body))
        _, length = FRAME.unpack(self.answers.read(FRAME.size))
        return decode(self.answers.read(length)).body

    def framed(self, which: str, body: Body) -> bytes:
        """Return a message to a lender as it travels."""
        header = Header(k=body.KIND, i="B", m="m0", e=LOCAL_EPOCH, s=next(self.numbers), t=time.time_ns())
        data = encode(header, body)
        return FRAME.pack(LENDERS.index(which), len(data)) + data

    def lanes(self) -> dict[str, list[str]]:
        """Return UCX's transports by contestant, once connected."""
        every = {name: reader.statistics().lanes.values() for name, reader in self.by_ucx.items()}
        return {name: [lane for lanes in known for lane in lanes] for name, known in every.items()}

    def close(self) -> None:
        """End the readers and their threads."""
        for reader in self.readers.values():
            reader.shutdown(5.0)
            reader.release_hold()
        self.questions.close()


def plain_of(destination: Destination, pipe: Connection, case: Case, source_pages: list[int]) -> Plain:
    """Return a plain socket over which the source sends a case's pages."""
    pipe.send(("serve", source_pages))
    local = local_pages(destination.pool.memory.page_count, case.count, contiguous=case.contiguous)
    return Plain(pipe.recv(), views_of(destination.pool.memory, local))
