"""Frames of the local link: what is cut out of a stream, and what is refused."""

import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.codec import MESSAGE_LENGTH_MAX_BYTES, pack
from kvbus.engines import link
from kvbus.engines.link import BlockingLink, EngineError, FrameBuffer, encode_frame
from kvbus.errors import ConfigError, PeerError


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@given(cuts=st.lists(st.integers(1, 40), max_size=30), texts=st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_frames_come_out_as_they_went_in_however_the_stream_was_cut(cuts: list[int], texts: list[str]) -> None:
    stream = b"".join(encode_frame("say", number, {"text": text}) for number, text in enumerate(texts))
    buffer, seen = FrameBuffer(), []
    for length in [*cuts, len(stream)]:
        buffer.feed(stream[:length])
        stream = stream[length:]
        while (frame := buffer.take()) is not None:
            seen.append(frame)
    assert seen == [{"op": "say", "id": number, "text": text} for number, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "frame length"),
        (framed(b""), "frame length"),
        (struct.pack("<I", MESSAGE_LENGTH_MAX_BYTES + 1), "frame length"),
        (framed(b"\xc1"), "msgpack"),
        (framed(pack({"id": 1})), "op must be a string"),
        (framed(pack({"op": 7, "id": 1})), "op must be a string"),
        (framed(pack({"op": "x" * 33, "id": 1})), "op is too long"),
        (framed(pack({"op": "match"})), "id must be an integer"),
        (framed(pack({"op": "match", "id": True})), "id must be an integer"),
        (framed(pack({"op": "match", "id": -1})), "id is out of range"),
    ],
)
def test_bytes_that_are_no_frames_are_refused_with_their_reason(data: bytes, says: str) -> None:
    buffer = FrameBuffer()
    buffer.feed(data)
    with pytest.raises(PeerError, match=says):
        buffer.take()


def test_a_length_beyond_the_limit_is_refused_before_its_body_is_awaited() -> None:
    buffer = FrameBuffer()
    buffer.feed(struct.pack("<I", 1 << 31))
    with pytest.raises(PeerError, match="frame length"):
        buffer.take()


def test_a_frame_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode_frame("generate", 1, {"text": "x" * MESSAGE_LENGTH_MAX_BYTES})


def test_fields_of_a_wrong_kind_are_refused_by_name() -> None:
    frame: link.Frame = {"op": "alloc", "id": 1, "count": "3", "ids": b"abc", "store": 1, "layout": [], "salt": 5}
    for read, name in (
        (lambda: link.number(frame, "count"), "count"),
        (lambda: link.number(frame, "handle"), "handle"),
        (lambda: link.column(frame, "ids"), "ids"),
        (lambda: link.column(frame, "count"), "count"),
        (lambda: link.flag(frame, "store", default=True), "store"),
        (lambda: link.mapping(frame, "layout"), "layout"),
        (lambda: link.text(frame, "salt"), "salt"),
        (lambda: link.number(frame, "id", least=2), "id"),
    ):
        with pytest.raises(PeerError, match=f"frame field {name} "):
            read()


def test_token_ids_that_do_not_fit_u32_are_refused() -> None:
    for ids in ([-1], [2**32]):
        with pytest.raises(PeerError, match="token ids"):
            link.as_column(ids)


def test_nobody_listening_is_said_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no worker listens on .*none\.sock"):
        BlockingLink.connect(tmp_path / "none.sock")


def test_a_socket_path_that_linux_cannot_hold_is_the_operators_to_mend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shorter state folder"):
        BlockingLink.connect(tmp_path / ("x" * 120))


def test_a_wait_without_a_bound_is_not_cut_short_by_an_earlier_one() -> None:
    # R23: an engine has waited for its welcome with a bound, and waits for work without one, for as long as it is idle
    ours, theirs = socket.socketpair()
    ends = BlockingLink(ours)
    for bound_s in (0.25, None, 60.0, None):
        theirs.sendall(encode_frame("say", 4, {}))
        assert ends.receive(bound_s) == {"op": "say", "id": 4}
        seconds, microseconds = struct.unpack("ll", ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
        assert seconds + microseconds / 1e6 == pytest.approx(bound_s or 0.0, abs=0.01)  # 0: the kernel waits for ever
    theirs.close()
    ends.close()


def test_a_closed_peer_is_the_end_and_a_silent_one_a_timeout() -> None:
    ours, theirs = socket.socketpair()
    ends = BlockingLink(ours)
    with pytest.raises(TimeoutError):
        ends.receive(0.01)
    theirs.sendall(encode_frame("say", 4, {}))
    assert ends.receive(60) == {"op": "say", "id": 4}
    theirs.close()
    assert ends.receive(60) is None
    with pytest.raises(EngineError, match="gone"):
        ends.send("say", 1)
    ends.close()
