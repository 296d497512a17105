"""The frames that a socket reader and a socket server exchange; all numbers are little-endian.

The server speaks first: HELLO with a challenge. The reader opens each lease with a proof that it knows the lease's
secret, asks for pages by READ, several questions ahead, and says RELEASE when it has let go. The server answers the
questions in order, each with DATA or REFUSED:

    DATA header | mask, one byte a row, if status is SOME | the kept pages' bytes | state | one record per row

The records stand behind the bytes because they are read behind them: once the last byte of the answer's pages was
copied out of the pool, and not earlier (P2).
"""

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import NamedTuple

from kvbus.dataplane.reading import SEGMENT_ROWS_MAX
from kvbus.errors import PeerError
from kvbus.pool.generations import RECORD_BYTES

MAGIC = b"kvbs"
VERSION = 1
CHALLENGE_BYTES = 16
SECRET_BYTES = 32
ROWS_MAX = SEGMENT_ROWS_MAX
"""Of one question: what a reader verifies together. One question then fits 50 KB."""
REQUESTS_MAX = 8
"""Questions of one connection that wait for their answer; a reader that asks more is refused."""
TEXT_MAX_BYTES = 300
"""A refusal is one sentence."""

_HEADER = struct.Struct("<BBHIQQ")
HEADER_BYTES = _HEADER.size
_TICKET = struct.Struct("<Q")
HELLO_BYTES = len(MAGIC) + CHALLENGE_BYTES
PROOF_BYTES = hashlib.sha256().digest_size
STATE_BYTES = _TICKET.size
QUESTION_MAX_BYTES = _TICKET.size + 12 * ROWS_MAX


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    OPEN = 2
    READ = 3
    RELEASE = 4
    DATA = 5
    REFUSED = 6


class Status(IntEnum):
    """Of a DATA header: whether every row's bytes follow, or those only that the mask names."""

    ALL = 0
    SOME = 1


class State(IntEnum):
    """Of a DATA answer's end: whether all of its bytes are the pages', or the lease was closed on the way."""

    WHOLE = 0
    CLOSED = 1


class Why(IntEnum):
    """Why a server refuses."""

    MALFORMED = 1
    UNKNOWN_LEASE = 2
    NOT_LENT = 3
    TOO_MANY = 4
    CLOSED = 5
    FULL = 6


class Header(NamedTuple):
    """`number` is a question's number, a ticket, or the server's epoch; `length` counts bytes that follow.

    Of DATA it counts the pages' bytes only; mask, state and records follow from the rows.
    """

    kind: int
    status: int
    rows: int
    number: int
    length: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(self.kind, self.status, 0, self.rows, self.number, self.length)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> "Header":
        """Return the header in HEADER_BYTES bytes."""
        kind, status, _, rows, number, length = _HEADER.unpack(data)
        return cls(kind, status, rows, number, length)


def hello(epoch: int, challenge: bytes) -> bytes:
    """Return a server's first frame."""
    body = MAGIC + challenge
    return Header(Kind.HELLO, VERSION, 0, epoch, len(body)).encode() + body


def challenge_of(body: bytes | bytearray | memoryview, version: int) -> bytes:
    """Return the challenge in a HELLO; PeerError where another program answers."""
    data = bytes(body)
    if len(data) != HELLO_BYTES or data[: len(MAGIC)] != MAGIC or version != VERSION:
        raise PeerError("no kvbus page server answers at that address, or one of another version", version=version)
    return data[len(MAGIC) :]


def proof(secret: bytes, challenge: bytes, ticket: int) -> bytes:
    """Return what only who holds the lease's secret can say on this connection."""
    return hmac.digest(secret, challenge + _TICKET.pack(ticket), "sha256")


def opening(secret: bytes, challenge: bytes, ticket: int) -> bytes:
    """Return the frame that opens a lease on a connection."""
    body = proof(secret, challenge, ticket)
    return Header(Kind.OPEN, 0, 0, ticket, len(body)).encode() + body


def question(number: int, ticket: int, pages: bytes, counters: bytes) -> bytes:
    """Return the frame that asks for pages: a u32 column of pages, a u64 column of their counters."""
    body = _TICKET.pack(ticket) + pages + counters
    return Header(Kind.READ, 0, len(pages) // 4, number, len(body)).encode() + body


def ticket_of(body: bytes | bytearray | memoryview) -> int:
    """Return the ticket that stands first in a question."""
    (ticket,) = _TICKET.unpack_from(body)
    return int(ticket)


def release(ticket: int) -> bytes:
    """Return the frame by which a reader says that its access under a lease has ended."""
    return Header(Kind.RELEASE, 0, 0, ticket, 0).encode()


def refused(number: int, why: Why, text: str, *, of_question: bool) -> bytes:
    """Return a refusal: of a question, in its place among the answers, or of a lease or the whole connection."""
    body = text.encode()[:TEXT_MAX_BYTES]
    return Header(Kind.REFUSED, why, int(of_question), number, len(body)).encode() + body


def state(value: State) -> bytes:
    """Return the word that stands between an answer's bytes and its records."""
    return _TICKET.pack(value)


def tail_bytes(rows: int) -> int:
    """Return how long state and records of an answer are together."""
    return STATE_BYTES + RECORD_BYTES * rows
