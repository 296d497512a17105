"""Grants: signed by their lender, bound to one reader, and refused when anything in them does not fit."""

import pytest

from kvbus.codec import pack, unpack
from kvbus.errors import PeerError
from kvbus.events import ProcessIdentity, ReaderKey, column
from kvbus.grants import (
    GRANT_LENGTH_MAX_BYTES,
    Expected,
    Grant,
    LenderKey,
    PoolGeometry,
    UcxAccess,
    refusal,
    unseal,
)

READER = ReaderKey(instance="B", member="m0", epoch=7, transfer="t1", attempt=1, rank=0)
GEOMETRY = PoolGeometry(
    base=1 << 40,
    length_bytes=4096 * 11,
    generations_offset=512,
    pages_offset=4096,
    page_stride=4096,
    page_bytes=4000,
    page_count=10,
)
EXPECTED = Expected(
    reader=READER, lender_instance="A", lender_epoch=5, fingerprint="f1", page_bytes=4000, names_asked=3
)
PROCESS = ProcessIdentity(pid=77, start_ticks=1, boot_id="b", pid_namespace=1)


def grant(**changes: object) -> Grant:
    fields: dict[str, object] = {
        "lender_instance": "A",
        "lender_member": "m0",
        "lender_epoch": 5,
        "reader": READER,
        "ticket": 1,
        "rank": 0,
        "fingerprint": "f1",
        "nonce": b"n" * 16,
        "pool": GEOMETRY,
        "pages": column((3, 1, 9), 4),
        "counters": column((2, 4, 6), 8),
        "ucx": UcxAccess(address=b"address", rkey=b"key"),
    }
    return Grant.model_validate({**fields, **changes})


def pool(**changes: int) -> PoolGeometry:
    return GEOMETRY.model_copy(update=changes)


def test_a_sealed_grant_comes_back_the_same() -> None:
    lender = LenderKey.generate()
    data, signature = lender.seal(grant())
    received = unseal(data, signature, lender.verify_key)
    assert received == grant()
    assert received.page_indexes() == (3, 1, 9)
    assert received.page_counters() == (2, 4, 6)
    assert refusal(received, EXPECTED) is None


def test_an_unsealed_or_forged_grant_is_refused() -> None:
    lender, stranger = LenderKey.generate(), LenderKey.generate()
    data, signature = lender.seal(grant())
    forged, _ = stranger.seal(grant(ticket=2))
    _, foreign = stranger.seal(grant())
    for bytes_, signed, key in (
        (forged, signature, lender.verify_key),
        (data, foreign, lender.verify_key),
        (data, b"", lender.verify_key),
        (data, bytes(64), lender.verify_key),
        (data, signature, stranger.verify_key),
        (data, signature, b"short"),
        (data[:-1], signature, lender.verify_key),
    ):
        with pytest.raises(PeerError, match="not signed by its lender"):
            unseal(bytes_, signed, key)


def test_every_flipped_bit_breaks_the_signature() -> None:
    lender = LenderKey.generate()
    data, signature = lender.seal(grant())
    for at in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(PeerError):
            unseal(bytes(flipped), signature, lender.verify_key)


def test_a_signed_document_that_is_no_grant_names_the_field() -> None:
    lender = LenderKey.generate()
    document = grant().model_dump(exclude_none=True)
    for field in ("nonce", "pool", "pages"):
        data, signature = signed(lender, {**document, field: 1})
        with pytest.raises(PeerError, match="malformed") as caught:
            unseal(data, signature, lender.verify_key)
        assert field in str(caught.value)


def signed(lender: LenderKey, document: dict[str, object]) -> tuple[bytes, bytes]:
    data = pack(document)
    return data, lender._signing_key.sign(data).signature


def test_a_grant_too_long_for_one_answer_is_not_sealed() -> None:
    pages = column(range(GRANT_LENGTH_MAX_BYTES // 4), 4)
    with pytest.raises(ValueError, match="lend fewer pages"):
        LenderKey.generate().seal(grant(pages=pages))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reader": READER.model_copy(update={"transfer": "t2"})}, "another reader"),
        ({"reader": READER.model_copy(update={"attempt": 2})}, "another reader"),
        ({"reader": READER.model_copy(update={"epoch": 8})}, "another reader"),
        ({"lender_instance": "C"}, "from 'C'"),
        ({"lender_epoch": 6}, "another epoch of its lender"),
        ({"fingerprint": "f2"}, "fingerprint is f2"),
        ({"rank": 1}, "for rank 1"),
        ({"pool": pool(page_bytes=4001)}, "expected 4000"),
        ({"pool": pool(page_stride=100)}, "stride 100 is shorter"),
        ({"pool": pool(base=(1 << 63) - 1)}, "wraps"),
        ({"pool": pool(base=0)}, "no address"),
        ({"pool": pool(generations_offset=4000)}, "overlaps the pages"),
        ({"pool": pool(pages_offset=8192)}, "do not fit the pool"),
        ({"pool": pool(page_count=11)}, "do not fit the pool"),
        ({"pages": column((3, 1, 10), 4)}, "page 10 lies outside"),
        ({"pages": column((3, 1, 3), 4)}, "granted twice"),
        ({"pages": column((3, 1), 4)}, "2 pages but 3 generations"),
        ({"pages": b"", "counters": b""}, "0 pages granted"),
        ({"pages": column((1, 2, 3, 4), 4), "counters": column((2, 2, 2, 2), 8)}, "4 pages granted, 3 asked"),
        ({"pages": b"12345"}, "multiple of its width"),
        ({"counters": column((2, 3, 6), 8)}, "not sealed"),
        ({"counters": column((2, 0, 6), 8)}, "not sealed"),
        ({"digests": column((7, 8), 8)}, "3 pages but 2 digests"),
        ({"digests": column((7, 8, 9, 10), 8)}, "3 pages but 4 digests"),
        ({"digests": b""}, "3 pages but 0 digests"),
        ({"digests": b"12345"}, "multiple of its width"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(changes: dict[str, object], reason: str) -> None:  # contract 47
    assert reason in (refusal(grant(**changes), EXPECTED) or "accepted")


def test_digests_travel_with_a_grant_and_a_forged_one_breaks_the_signature() -> None:  # contract 47
    # Planted fault that this catches: a signature over the grant without its digests.
    lender = LenderKey.generate()
    digests = column((7, 1 << 63, 9), 8)
    data, signature = lender.seal(grant(digests=digests))
    received = unseal(data, signature, lender.verify_key)
    assert received.page_digests() == (7, 1 << 63, 9)
    assert refusal(received, EXPECTED) is None
    assert data.count(digests) == 1
    forged = data.replace(digests, column((8, 1 << 63, 9), 8))
    with pytest.raises(PeerError, match="not signed by its lender"):
        unseal(forged, signature, lender.verify_key)


def test_a_grant_without_digests_is_what_it_was_before_there_were_any() -> None:
    data, _ = LenderKey.generate().seal(grant())
    assert "digests" not in unpack(data)
    assert grant().page_digests() == ()


def test_a_grant_of_a_later_version_is_read_without_what_is_unknown() -> None:
    lender = LenderKey.generate()
    document = {**grant().model_dump(exclude_none=True), "digests_of_a_later_kind": b"12345678"}
    data, signature = signed(lender, document)
    assert unseal(data, signature, lender.verify_key) == grant()


def test_a_grant_with_digests_has_room_for_nine_thousand_pages() -> None:
    def large(pages: int) -> Grant:
        rows = range(1, pages + 1)
        return grant(pages=column(rows, 4), counters=column(rows, 8), digests=column(rows, 8))

    assert len(LenderKey.generate().seal(large(9_000))[0]) <= GRANT_LENGTH_MAX_BYTES
    with pytest.raises(ValueError, match="lend fewer pages"):
        LenderKey.generate().seal(large(10_000))


def test_a_shorter_grant_is_a_prefix_and_fits() -> None:
    assert refusal(grant(pages=column((3,), 4), counters=column((2,), 8)), EXPECTED) is None
