"""One map in, one map out; whatever else arrives is the peer's fault."""

import contextlib

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.codec import MESSAGE_LENGTH_MAX_BYTES, pack, unpack
from kvbus.errors import PeerError

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=8), plain, max_size=6))
def test_a_map_of_plain_values_comes_back(document: dict[str, object]) -> None:
    assert unpack(pack(document)) == document
    assert unpack(memoryview(pack(document))) == document


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_map_or_a_peer_error(data: bytes) -> None:
    with contextlib.suppress(PeerError):
        assert isinstance(unpack(data), dict)


@pytest.mark.parametrize("value", [[1], "x", b"x", 1, None, 1.5, True])
def test_anything_but_a_map_is_refused(value: object) -> None:
    with pytest.raises(PeerError, match="must be a msgpack map"):
        unpack(msgpack.packb(value))


@pytest.mark.parametrize("document", [{b"x": 1}, {"a": {b"x": 1}}, {"a": [{b"x": 1}]}])
def test_keys_are_strings_at_every_depth(document: dict[object, object]) -> None:
    with pytest.raises(PeerError, match="keys must be strings"):
        unpack(msgpack.packb(document))


@pytest.mark.parametrize("key", [1, None, 1.5, True])
def test_a_key_of_another_type_is_refused(key: object) -> None:
    with pytest.raises(PeerError):
        unpack(msgpack.packb({key: 1}))


@pytest.mark.parametrize("nest", [lambda ext: {"a": ext}, lambda ext: {"a": [ext]}, lambda ext: {"a": {"b": [[ext]]}}])
@pytest.mark.parametrize("ext", [msgpack.ExtType(5, b"x"), msgpack.ExtType(0, b""), msgpack.Timestamp(1, 2)], ids=str)
def test_extension_types_are_refused_at_every_depth_timestamps_too(nest: object, ext: object) -> None:
    # msgpack decodes its own timestamp without asking the extension hook
    assert callable(nest)
    with pytest.raises(PeerError, match="expected plain values"):
        unpack(msgpack.packb(nest(ext)))


def test_a_message_of_the_greatest_length_passes_and_one_byte_more_does_not() -> None:
    data = pack({"a": b"x" * 100})
    assert unpack(data, length_max_bytes=len(data))
    with pytest.raises(PeerError, match="too long") as caught:
        unpack(data, length_max_bytes=len(data) - 1)
    assert caught.value.details == {"length_bytes": len(data), "length_max_bytes": len(data) - 1}
    with pytest.raises(PeerError, match="too long"):
        unpack(bytes(MESSAGE_LENGTH_MAX_BYTES + 1))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81\xa1a",
        b"\x80\x00",
        b"\x81\xa1a\xa2\xff\xfe",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
        b"\x81\xa1a" + b"\x91" * 5_000 + b"\xc0",
        b"\x81\xa1a" + b"\x81\xa1b" * 5_000 + b"\xc0",
    ],
    ids=["empty", "unused", "cut", "trailing", "utf8", "map bomb", "list bomb", "bin bomb", "deep lists", "deep maps"],
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="not valid msgpack"):
        unpack(data)


def test_text_and_bytes_stay_apart() -> None:
    assert unpack(pack({"t": "x", "b": b"x"})) == {"t": "x", "b": b"x"}


def test_what_cannot_be_a_message_cannot_be_packed() -> None:
    with pytest.raises(TypeError):
        pack({"a": object()})
    with pytest.raises(OverflowError):
        pack({"a": 2**64})


def part_of(value: object) -> object:
    assert isinstance(value, complex)
    return pack({"of": value.real, "far": value.imag}, part_of)


def test_a_message_that_is_packed_within_another_leaves_both_whole() -> None:
    inner = pack({"of": 1.0, "far": 2.0})
    for _ in range(2):
        assert unpack(pack({"a": 1, "b": 1 + 2j, "c": [1 + 2j]}, part_of)) == {"a": 1, "b": inner, "c": [inner]}
    with pytest.raises(TypeError):
        pack({"a": "begun", "b": object()})
    assert unpack(pack({"a": 1})) == {"a": 1}
