"""Grants: the signed description of lent pages that a lender gives one reader, and why a reader may refuse one.

Addresses and keys leave a worker only inside a grant. The source cannot check a one-sided access, so the reader checks
every descriptor before it posts anything: who lends, to whom, which lease, which pool, which pages, in which
generation. A grant is bound to one reader key and signed with the lending member's key (Ed25519).
"""

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, ClassVar

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey
from pydantic import AfterValidator, Field, ValidationError

from kvbus.codec import pack, unpack
from kvbus.errors import PeerError
from kvbus.events import fields_of, from_column
from kvbus.parts import Count, Epoch, Name, Nonce, Part, ProcessIdentity, Rank, ReaderKey

GRANT_LENGTH_MAX_BYTES = 192 << 10
"""A grant travels in one answer under the 256 KiB event limit; 12 bytes a page leave room for 15,000 pages,
and 20 bytes, with digests, for 9,000."""


class UcxAccess(Part):
    """How to reach the pool by UCX: the worker's address and the packed key of the registered memory."""

    address: Annotated[bytes, Field(min_length=1, max_length=4096)]
    rkey: Annotated[bytes, Field(min_length=1, max_length=4096)]


class MemoryAccess(Part):
    """How to reach the pool on the same host: the file descriptor of its memfd in the lender's process."""

    process: ProcessIdentity
    fd: Annotated[int, Field(ge=0, lt=2**31)]


def _must_be_numeric(address: str) -> str:
    ip_address(address)  # a name would be looked up by the thread that moves pages
    return address


class SocketAccess(Part):
    """How to reach the lease over plain TCP: numeric addresses to try in order, a port, and the lease's own secret."""

    addresses: tuple[Annotated[str, Field(min_length=2, max_length=64), AfterValidator(_must_be_numeric)], ...] = Field(
        strict=False, min_length=1, max_length=8
    )
    port: Annotated[int, Field(gt=0, lt=2**16)]
    secret: Annotated[bytes, Field(min_length=32, max_length=32)]


class PoolGeometry(Part):
    """Where things are in the pool: the base address in the lender's process, and offsets from it, in bytes."""

    base: Count
    length_bytes: Annotated[int, Field(gt=0, lt=2**48)]
    generations_offset: Count
    pages_offset: Count
    page_stride: Annotated[int, Field(gt=0, lt=2**40)]
    page_bytes: Annotated[int, Field(gt=0, lt=2**40)]
    page_count: Annotated[int, Field(gt=0, lt=2**32)]


class Grant(Part):
    """The pages of one read lease for one reader. `pages` is a u32 column, `counters` a u64 column of generations.

    Row n is the n-th name that the reader asked for; `nonce` is the reader's own, from its question: with it the
    reader, and nobody else, can end the lease.

    `checked` states terms: whoever reads under this grant delivers a page only after it has read all of the page, then
    its generation, and found there what the grant says (P2). A reader that does not look must refuse such a grant; one
    that reads declares by it that it looks, and may be fenced (P5). All readers of kvbus look.

    `digests`, where the lender makes them, is a u64 column of what the pages' bytes come to; a reader that compares
    them delivers no page that differs.
    """

    GENERATION_LENGTH_BYTES: ClassVar[int] = 32

    lender_instance: Name
    lender_member: Name
    lender_epoch: Epoch
    reader: ReaderKey
    ticket: Count
    rank: Rank
    fingerprint: Annotated[str, Field(min_length=1, max_length=64)]
    nonce: Nonce
    pool: PoolGeometry
    pages: bytes
    counters: bytes
    ucx: UcxAccess | None = None
    memory: MemoryAccess | None = None
    socket: SocketAccess | None = None
    checked: bool = False
    digests: bytes | None = None

    def page_indexes(self) -> tuple[int, ...]:
        """Return the lent pages' indexes in the lender's pool, row by row."""
        return from_column(self.pages, 4)

    def page_counters(self) -> tuple[int, ...]:
        """Return the generation counters that the lent pages had at hand-over, row by row."""
        return from_column(self.counters, 8)

    def page_digests(self) -> tuple[int, ...]:
        """Return the lent pages' digests, row by row; none where the lender makes none."""
        return from_column(self.digests or b"", 8)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the reader asked for, against which a grant is checked; `looks`: it compares generations after reading."""

    reader: ReaderKey
    lender_instance: str
    lender_epoch: int
    fingerprint: str
    page_bytes: int
    names_asked: int
    looks: bool = True


class LenderKey:
    """The signing key of one lending member, made at its start; the verify key goes into the registry."""

    def __init__(self, signing_key: SigningKey) -> None:
        self._signing_key = signing_key

    @classmethod
    def generate(cls) -> "LenderKey":
        """Return a fresh key from the operating system's randomness."""
        return cls(SigningKey.generate())

    @property
    def verify_key(self) -> bytes:
        """The 32 public bytes against which readers check grants."""
        return bytes(self._signing_key.verify_key)

    def seal(self, grant: Grant) -> tuple[bytes, bytes]:
        """Return the grant's bytes and their signature; ValueError where it is too long for one answer."""
        data = pack(fields_of(grant), fields_of)
        if len(data) > GRANT_LENGTH_MAX_BYTES:
            raise ValueError(f"grant is {len(data)} bytes, expected at most {GRANT_LENGTH_MAX_BYTES}: lend fewer pages")
        return data, self._signing_key.sign(data).signature


def unseal(data: bytes, signature: bytes, verify_key: bytes) -> Grant:
    """Return the grant if the signature is the lender's; PeerError otherwise."""
    try:
        VerifyKey(verify_key).verify(data, signature)
    except (BadSignatureError, ValueError, TypeError) as error:
        raise PeerError("grant is not signed by its lender", reason=str(error)[:100]) from error
    try:
        return Grant.model_validate(unpack(data, length_max_bytes=GRANT_LENGTH_MAX_BYTES))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise PeerError("grant is malformed", field=where, problem=problem["msg"]) from error


def refusal(grant: Grant, expected: Expected) -> str | None:
    """Return why a reader must not use this grant, or None; called before any byte moves (contract 47, 48)."""
    if grant.reader != expected.reader:
        return "the grant is for another reader, transfer, attempt or epoch"
    if grant.lender_instance != expected.lender_instance:
        return f"the grant is from {grant.lender_instance!r}, asked {expected.lender_instance!r}"
    if grant.lender_epoch != expected.lender_epoch:
        return "the grant is of another epoch of its lender than the one that the registry names"
    if grant.fingerprint != expected.fingerprint:
        return f"layout fingerprint is {grant.fingerprint}, expected {expected.fingerprint}"
    if grant.rank != expected.reader.rank:
        return f"the grant is for rank {grant.rank}, asked for rank {expected.reader.rank}"
    if grant.checked and not expected.looks:
        return "the grant is for readers that compare generations after reading, which this one does not"
    return _geometry_refusal(grant.pool, expected.page_bytes) or _pages_refusal(grant, expected.names_asked)


def _geometry_refusal(pool: PoolGeometry, page_bytes: int) -> str | None:
    stride, base, length_bytes = pool.page_stride, pool.base, pool.length_bytes
    pages_offset, page_count = pool.pages_offset, pool.page_count
    if pool.page_bytes != page_bytes:
        return f"pages are {pool.page_bytes} bytes, expected {page_bytes}"
    if stride < page_bytes:
        return f"page stride {stride} is shorter than a page of {page_bytes} bytes"
    if not base or base + length_bytes >= 1 << 63:
        return "the pool has no address, or its address range wraps"
    if pool.generations_offset + Grant.GENERATION_LENGTH_BYTES * page_count > pages_offset:
        return "the generation table overlaps the pages"
    if pages_offset + stride * page_count > length_bytes:
        return f"{page_count} pages do not fit the pool of {length_bytes} bytes"
    return None


def _pages_refusal(grant: Grant, names_asked: int) -> str | None:
    try:
        pages, counters, digests = grant.page_indexes(), grant.page_counters(), grant.page_digests()
    except PeerError as error:
        return str(error)
    if len(pages) != len(counters):
        return f"{len(pages)} pages but {len(counters)} generations"
    if grant.digests is not None and len(digests) != len(pages):
        return f"{len(pages)} pages but {len(digests)} digests"
    if not 0 < len(pages) <= names_asked:
        return f"{len(pages)} pages granted, {names_asked} asked for"
    if max(pages) >= grant.pool.page_count:
        return f"page {max(pages)} lies outside the pool of {grant.pool.page_count} pages"
    if len(set(pages)) != len(pages):
        return "one page is granted twice"
    if any(counter % 2 or not counter for counter in set(counters)):  # pages of one age share theirs
        return "a granted page is not sealed (its generation counter is odd or zero)"
    return None
