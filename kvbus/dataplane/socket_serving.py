"""One reader's connection at the source: what it may ask, and how its questions are answered, within bounds.

Everything here runs on the server's thread. Pages are copied out of the pool by `sendmsg` itself, never by reference
(no MSG_ZEROCOPY, no sendfile): when the call has returned, the kernel will not look at the pool again, so the records
that are read next speak for every byte that was sent. A lease that is closed while an answer is under way gives no
further byte: what the answer still owes is sent as zeros, and its end says so.
"""

import hmac
import secrets
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvbus.dataplane import socket_wire as wire
from kvbus.dataplane.cutting import expected_records
from kvbus.dataplane.socket_calls import Places, Ranges
from kvbus.dataplane.socket_pool import WORDS, Column, Pages, PoolBytes
from kvbus.dataplane.socket_wire import Header, Kind, State, Status, Why

RECEIVE_BYTES = 64 << 10
"""One question at its longest, and a few short ones."""
REFUSALS_MAX = 32
"""Of one connection, which is closed then: a sound reader is refused when its lease is closed, eight questions deep."""
UNANSWERED_MAX = 7
"""Packets in a row to which a peer's host said nothing, at doubling intervals: some 25 s on one host, a minute over a
slow network. A stopped process is none of these: its kernel goes on answering."""

_TCP_INFO_HEAD = struct.Struct("4B")
_BODY_BYTES: dict[int, int] = {Kind.OPEN: wire.PROOF_BYTES, Kind.READ: wire.STATE_BYTES, Kind.RELEASE: 0}


class RefusalError(Exception):
    """A frame that ends its connection."""

    def __init__(self, why: Why, text: str) -> None:
        super().__init__(text)
        self.why = why


class Lease:
    """Pages that may be read by whoever proves to know the secret, each while it has exactly that generation."""

    def __init__(self, ticket: int, secret: bytes, pool: PoolBytes, epoch: int) -> None:
        self.ticket = ticket
        self.secret = secret
        self.pool = pool
        self.epoch = epoch
        self.is_closed = False
        self.connections: set[Connection] = set()
        """Where it was opened; without any of them, nobody can read it."""
        self._pages: Pages = np.empty(0, dtype=np.int64)
        self._records: Column = np.empty((0, WORDS), dtype=np.uint64)
        self._places: Places = np.empty(0, dtype=np.uint64)

    def cover(self, pages: Pages, counters: Column) -> None:
        """Let these pages be read, one or more, each in that generation."""
        order = np.argsort(pages)
        self._pages = pages[order]
        self._records = expected_records(self.epoch, counters[order])
        self._places = self.pool.places(self._pages)

    def question(self, number: int, pages: Pages, counters: Column) -> "Question | str":
        """Return what is asked for, where all of it is lent in these very generations; else why it is not."""
        at = self._pages.searchsorted(pages)
        outside = self._pages.take(at, mode="clip") != pages
        if np.count_nonzero(outside):
            return f"page {int(pages[outside][0])} is not lent under T{self.ticket}"
        records = self._records.take(at, axis=0)
        other = records[:, 1] != counters
        if np.count_nonzero(other):
            return f"page {int(pages[other][0])} is lent under T{self.ticket} in another generation"
        return Question(number, self, pages, records, self._places.take(at))


class House(Protocol):
    """The server, as far as a connection needs it."""

    def lease(self, ticket: int) -> Lease | None:
        """Return the lease that is lent under a ticket now."""

    def let_go(self, lease: Lease) -> None:
        """A reader has said that its access under a lease has ended."""

    def note_refusal(self, why: Why, text: str) -> None:
        """Something was refused."""


@dataclass(frozen=True, slots=True)
class Question:
    """Pages to send, where they are, and the records that they have while they are as they were lent."""

    number: int
    lease: Lease
    pages: Pages
    records: Column
    places: Places


class Answer:
    """One answer on its way: head, the bytes of pages that are as they were lent, then their records."""

    def __init__(self, question: Question) -> None:
        self.lease = question.lease
        self.is_diverted = False
        """Whether zeros were sent where pages were due."""
        self._pages = question.pages
        pool = self.lease.pool
        # This first look only saves sending what nobody could use; what counts is the look afterwards (P2).
        same = pool.records(question.pages) == question.records
        whole, rows = np.count_nonzero(same) == same.size, len(question.pages)
        kept = np.empty(0, dtype=bool) if whole else same.all(axis=1)
        self.places = question.places if whole else question.places[kept]
        length_bytes = len(self.places) * pool.page_bytes
        header = Header(Kind.DATA, Status.ALL if whole else Status.SOME, rows, question.number, length_bytes)
        self.head = header.encode() + (b"" if whole else kept.astype(np.uint8).tobytes())

    def tail(self) -> bytes:
        """Return the answer's end; only once the socket has taken all of its pages."""
        if self.is_diverted:
            return wire.state(State.CLOSED) + bytes(wire.tail_bytes(len(self._pages)) - wire.STATE_BYTES)
        # Every byte has been copied into the socket by now, so a page that was rewritten meanwhile shows here (P2).
        return wire.state(State.WHOLE) + self.lease.pool.records(self._pages).tobytes()


class Connection:
    """One connection, from its HELLO on; `OSError` and `RefusalError` out of its methods are its end."""

    def __init__(self, sock: socket.socket, house: House, *, epoch: int, now: float) -> None:
        self.sock = sock
        self.leases: dict[int, Lease] = {}
        self.quiet_since = self.since = now
        self.length_bytes = 0
        self.questions = 0
        self.has_opened = False
        self._house = house
        self._challenge = secrets.token_bytes(wire.CHALLENGE_BYTES)
        self._inbox = bytearray()
        self._queue: deque[bytes | Question] = deque([wire.hello(epoch, self._challenge)])
        self._answer: Answer | None = None
        self._out = Ranges()
        """What goes out now: the small parts, and behind them the pages of the answer whose head comes last there."""
        self._refusals = 0

    @property
    def has_output(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out.left_bytes or self._answer or self._queue)

    @property
    def is_answering(self) -> bool:
        """Whether the middle of an answer is under way, where no other frame may stand."""
        return bool(self._answer or self._out.left_bytes)

    def host_is_silent(self) -> bool:
        """Tell whether the reader's host has answered none of the last packets, some of which it owes an answer."""
        try:
            head = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_HEAD.size)
        except OSError:  # it is broken, and its end comes by itself
            return False
        _, _, retransmits, probes = _TCP_INFO_HEAD.unpack(head)
        return bool(max(retransmits, probes) >= UNANSWERED_MAX)

    # ------------------------------------------------------------------------------------------------------ questions

    def read(self, now: float) -> bool:
        """Take what has come; False where the reader has closed the connection."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.quiet_since = now
        self._inbox += data
        while len(self._inbox) >= wire.HEADER_BYTES:
            header = Header.decode(self._inbox[: wire.HEADER_BYTES])
            end = wire.HEADER_BYTES + _body_bytes(header)
            if len(self._inbox) < end:
                break
            body = bytes(self._inbox[wire.HEADER_BYTES : end])
            del self._inbox[:end]
            self._take(header, body)
        return True

    def _take(self, header: Header, body: bytes) -> None:
        if header.kind == Kind.OPEN:
            self._open(header.number, body)
        elif header.kind == Kind.READ:
            self._ask(header, body)
        elif (lease := self.leases.get(header.number)) is not None:
            self._house.let_go(lease)

    def _open(self, ticket: int, proof: bytes) -> None:
        lease = self._house.lease(ticket)
        # One text for both: who lacks the secret does not learn which tickets there are.
        if lease is None or not hmac.compare_digest(wire.proof(lease.secret, self._challenge, ticket), proof):
            self._refuse(ticket, Why.UNKNOWN_LEASE, f"T{ticket} is not lent to you", of_question=False)
        elif ticket not in self.leases:
            self.leases[ticket] = lease
            lease.connections.add(self)
            self.has_opened = True

    def _ask(self, header: Header, body: bytes) -> None:
        if len(self._queue) >= wire.REQUESTS_MAX:
            raise RefusalError(Why.TOO_MANY, f"at most {wire.REQUESTS_MAX} questions may wait")
        ticket, split = wire.ticket_of(body), wire.STATE_BYTES + 4 * header.rows
        lease = self.leases.get(ticket)
        if lease is None:
            self._refuse(header.number, Why.UNKNOWN_LEASE, f"T{ticket} was not opened on this connection")
            return
        pages = np.frombuffer(body[wire.STATE_BYTES : split], dtype=np.uint32).astype(np.int64)
        counters = np.frombuffer(body[split:], dtype=np.uint64)
        question = lease.question(header.number, pages, counters)
        if isinstance(question, str):
            self._refuse(header.number, Why.NOT_LENT, question)
            return
        self._queue.append(question)
        self.questions += 1

    def _refuse(self, number: int, why: Why, text: str, *, of_question: bool = True) -> None:
        self._house.note_refusal(why, text)
        self._refusals += 1
        if self._refusals > REFUSALS_MAX:
            raise RefusalError(why, text)
        self._queue.append(wire.refused(number, why, text, of_question=of_question))

    # -------------------------------------------------------------------------------------------------------- answers

    def write(self) -> bool:
        """Send what the socket takes in one call; False where something is left of that, or nothing waits."""
        answer = self._answer
        if answer is not None and answer.lease.is_closed and not answer.is_diverted:
            answer.is_diverted = True
            self._out.divert(answer.lease.pool.spare)
        if not self._out.left_bytes:
            self._prepare()
        if not self._out.left_bytes:
            return False
        try:
            self.length_bytes += self._out.send(self.sock)
        except BlockingIOError:
            return False
        return not self._out.left_bytes

    def _prepare(self) -> None:
        """Put together whatever small stands before the next pages, so that one call sends it with them.

        A small packet of its own would wake the reader for nothing. The end of the last answer is made here, after
        the call that took its last page, and before the next one.
        """
        small = bytearray(self._answer.tail() if self._answer is not None else b"")
        self._answer = None
        while self._queue and self._answer is None:
            said = self._begin(self._queue.popleft())
            if isinstance(said, bytes):
                small += said
            elif len(said.places):
                small += said.head
                self._answer = said
            else:  # none of its pages is as it was lent
                small += said.head + said.tail()
        if self._answer is None:
            self._out = Ranges(small)
        else:
            pool = self._answer.lease.pool
            self._out = Ranges(small, self._answer.places, pool.page_bytes, keep=pool)

    def _begin(self, item: bytes | Question) -> bytes | Answer:
        if isinstance(item, bytes):
            return item
        if item.lease.is_closed:
            return wire.refused(item.number, Why.CLOSED, f"T{item.lease.ticket} was closed", of_question=True)
        return Answer(item)


def _body_bytes(header: Header) -> int:
    """Return how many bytes follow a reader's header; RefusalError where it is no header of a reader."""
    expected = _BODY_BYTES.get(header.kind)
    if expected is None:
        raise RefusalError(Why.MALFORMED, f"a reader sends no frame of kind {header.kind}")
    if header.kind == Kind.READ:
        if not 0 < header.rows <= wire.ROWS_MAX:
            raise RefusalError(Why.TOO_MANY, f"a question has 1 to {wire.ROWS_MAX} pages, got {header.rows}")
        expected += 12 * header.rows
    if header.length != expected:
        raise RefusalError(Why.MALFORMED, f"a frame of kind {header.kind} has {header.length} bytes, not {expected}")
    return expected
