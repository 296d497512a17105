"""Scattered bytes over a socket: whatever pieces the kernel takes or gives, each byte goes where it belongs, once."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.dataplane.socket_calls import RANGES_A_CALL_MAX, Ranges, address_of
from kvbus.dataplane.socket_pool import PoolBytes
from kvbus.pool.memory import PoolMemory
from tests.unit.helpers.lending_process import LENDER_EPOCH, content, fill, layout

CANARY = 0xEE
STEPS_MAX = 100_000


class Laid:
    """A head, pages that lie scattered in one buffer, and a tail; and the ranges over them."""

    def __init__(self, head: int, pages: list[int], page_bytes: int, tail: int) -> None:
        self.head, self.tail = bytearray(head), bytearray(tail)
        self.page_bytes, self.pages = page_bytes, pages
        self.memory = bytearray([CANARY]) * (page_bytes * (max(pages, default=0) + 1))
        first = address_of(self.memory)
        places = np.array([first + page * page_bytes for page in pages], dtype=np.uint64)
        self.ranges = Ranges(self.head, places, page_bytes, self.tail, keep=self.memory)

    def page(self, number: int) -> slice:
        return slice(number * self.page_bytes, (number + 1) * self.page_bytes)

    def write(self, data: bytes) -> None:
        """Lay data down in the order in which the ranges are worked off."""
        self.head[:], data = data[: len(self.head)], data[len(self.head) :]
        for number in self.pages:
            self.memory[self.page(number)], data = data[: self.page_bytes], data[self.page_bytes :]
        self.tail[:] = data

    def read(self) -> bytes:
        return b"".join([self.head, *(self.memory[self.page(number)] for number in self.pages), self.tail])


@st.composite
def lays(draw: st.DrawFn) -> Laid:
    pages = draw(st.lists(st.integers(0, 60), unique=True, max_size=40))
    sizes = st.integers(0, 50)
    return Laid(draw(sizes), pages, draw(st.integers(1, 300)), draw(sizes))


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


PIECES = st.lists(st.integers(1, 400), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(lays(), PIECES)
def test_bytes_that_come_in_any_pieces_land_where_they_belong(laid: Laid, pieces: list[int]) -> None:
    # Planted fault that this catches: a first range that is cut from its start again after each call.
    data = np.random.default_rng(len(laid.pages)).bytes(laid.ranges.left_bytes)
    sent = 0
    with connected() as (ours, theirs):
        for step in range(STEPS_MAX):
            if not laid.ranges.left_bytes:
                break
            piece = data[sent : sent + pieces[step % len(pieces)]]
            theirs.sendall(piece)
            sent += len(piece)
            assert laid.ranges.receive(ours) == len(piece)
    assert laid.read() == data
    others = set(range(max(laid.pages, default=0) + 1)) - set(laid.pages)
    assert all(laid.memory[laid.page(number)] == bytes([CANARY]) * laid.page_bytes for number in others)


@settings(max_examples=100, deadline=None)
@given(lays(), PIECES)
def test_what_a_full_socket_takes_in_pieces_is_sent_once_and_in_order(laid: Laid, pieces: list[int]) -> None:
    data = np.random.default_rng(len(laid.pages)).bytes(laid.ranges.left_bytes)
    laid.write(data)
    came = bytearray()
    with connected() as (ours, theirs):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least: 2 KiB or so
        for step in range(STEPS_MAX):
            if laid.ranges.left_bytes:
                try:
                    laid.ranges.send(ours)
                except BlockingIOError:
                    assert len(came) < len(data)
            if len(came) == len(data):
                break
            came += theirs.recv(pieces[step % len(pieces)])
    assert bytes(came) == data


@settings(max_examples=200, deadline=None)
@given(lays(), st.data())
def test_after_a_diversion_no_byte_lands_in_a_page_and_the_tail_still_comes(laid: Laid, data: st.DataObject) -> None:
    # Planted fault that this catches: the page that is half full is left where it was.
    total, spare = laid.ranges.left_bytes, bytearray(laid.page_bytes)
    before = data.draw(st.integers(0, total))
    with connected() as (ours, theirs):
        theirs.sendall(b"\x01" * before)
        if before:
            assert laid.ranges.receive(ours) == before
        laid.ranges.divert(address_of(spare))
        theirs.sendall(b"\x02" * (total - before))
        while laid.ranges.left_bytes:
            laid.ranges.receive(ours)
    assert 2 not in laid.memory
    ends = [byte for part in (laid.head, laid.tail) for byte in part]
    assert set(ends) <= {1, 2}
    assert not laid.tail or before == total or laid.tail[-1] == 2


def test_more_ranges_than_the_kernel_takes_go_in_several_calls() -> None:
    pages = list(range(0, 6 * RANGES_A_CALL_MAX, 2))
    source, target = Laid(3, pages, 8, 5), Laid(3, pages, 8, 5)
    data = np.random.default_rng(1).bytes(source.ranges.left_bytes)
    source.write(data)
    calls = 0
    with connected() as (ours, theirs):
        while target.ranges.left_bytes:
            calls += 1
            source.ranges.send(ours)
            target.ranges.receive(theirs)
    assert target.read() == data
    assert calls == len(pages) // RANGES_A_CALL_MAX + 1


def test_a_call_says_what_the_socket_says() -> None:
    laid = Laid(4, [1], 8, 0)
    with connected() as (ours, theirs):
        with pytest.raises(BlockingIOError):
            laid.ranges.receive(ours)
        theirs.close()
        assert laid.ranges.receive(ours) == 0
        with pytest.raises(BrokenPipeError):  # and no signal
            laid.ranges.send(ours)
    with pytest.raises(OSError, match="descriptor"):
        laid.ranges.send(ours)
    assert laid.ranges.left_bytes == 12


def test_no_address_is_given_for_a_page_outside_the_pool() -> None:
    memory = PoolMemory.create(layout(4 << 10), 8, LENDER_EPOCH)
    fill(memory, range(8))
    pool = PoolBytes(memory, writable=False)
    for outside in ([8], [-1], [0, 1 << 40], [3, -(1 << 40)]):
        with pytest.raises(IndexError, match="outside the pool of 8"):
            pool.places(np.array(outside, dtype=np.int64))
    got = bytearray(3 * pool.page_bytes)
    with connected() as (ours, theirs):
        ranges = Ranges(None, pool.places(np.array([7, 0, 2], dtype=np.int64)), pool.page_bytes, keep=pool)
        while ranges.left_bytes:
            ranges.send(ours)
        theirs.recv_into(got, len(got), socket.MSG_WAITALL)
    assert got == b"".join(bytes([content(page)]) * pool.page_bytes for page in (7, 0, 2))
    assert len(pool.places(np.empty(0, dtype=np.int64))) == 0
