"""The pool's memory: a sealed file that two processes map, and that nobody can pull away."""

import contextlib
import fcntl
import gc
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbus.errors import ConfigError, PeerError
from kvbus.pool.generations import Generation
from kvbus.pool.host_memory import available_bytes
from kvbus.pool.memory import Closing, PoolMemory
from tests.unit import pool_parts
from tests.unit.pool_parts import EPOCH, TOY, fill, names_of

ROOT = Path(__file__).parents[2]


def open_files() -> set[int]:
    """The files that this process has open, by number."""
    numbers = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            numbers.add(entry.stat().st_ino)
    return numbers


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    memory = PoolMemory.create(TOY, 5, EPOCH)
    yield memory
    memory.close()


def test_the_regions_stand_where_the_pool_says(pool: PoolMemory) -> None:
    assert pool.generations_offset == 4096
    assert pool.pages_offset == 8192
    assert pool.page_stride == 4096
    assert pool.length_bytes == 8192 + 5 * 4096 == os.fstat(pool.fd).st_size
    pool.page_bytes(3)[:] = 9
    assert os.pread(pool.fd, 64, pool.pages_offset + 3 * pool.page_stride) == b"\x09" * 64
    pool.generations.raise_pages([4])
    raw = os.pread(pool.fd, 32, pool.generations_offset + 4 * 32)
    assert raw[:16] == EPOCH.to_bytes(8, "little") + (1).to_bytes(8, "little")
    assert pool.page_bytes(0).ctypes.data == pool.address + pool.pages_offset


def test_a_pool_says_what_it_is(pool: PoolMemory) -> None:
    assert repr(pool) == f"<PoolMemory pages=5 of 64 bytes fd={pool.fd} {TOY.fingerprint()[:8]}>"
    assert repr(pool.generations) == f"<Generations pages=5 epoch={EPOCH}>"


def test_all_memory_is_there_from_the_start(pool: PoolMemory) -> None:
    assert os.fstat(pool.fd).st_blocks * 512 >= pool.length_bytes


def test_a_page_is_seen_in_the_layouts_shape() -> None:
    kv = replace(TOY, kind="kv", layers=2, kv_heads=3, dtype="float16")
    memory = PoolMemory.create(kv, 2, EPOCH)
    array = memory.page_array(1)
    assert array.shape == (2, 2, 3, 4, 16)
    assert array.dtype == np.float16
    array[1, 1, 2, 3, 15] = 1.0
    assert bytes(memory.page_bytes(1)[-2:]) == np.float16(1.0).tobytes()
    assert not memory.page_bytes(0).any()


@pytest.mark.parametrize("page", [-1, 5])
def test_no_page_outside_the_pool(pool: PoolMemory, page: int) -> None:
    with pytest.raises(IndexError, match="5 pages"):
        pool.page_bytes(page)


@pytest.mark.contract("55")
def test_whoever_has_the_descriptor_can_neither_shrink_nor_grow_nor_reseal(pool: PoolMemory) -> None:
    for length in (0, pool.length_bytes - 1, pool.length_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_the_descriptor_is_not_inherited(pool: PoolMemory) -> None:
    assert not os.get_inheritable(pool.fd)


@pytest.mark.parametrize("pages", [0, -1, 1 << 31 | 1, True, 2.0, None])
def test_a_page_count_that_is_none_is_refused(pages: object) -> None:
    with pytest.raises(ConfigError, match="pages"):
        PoolMemory.create(TOY, pages, EPOCH)  # type: ignore[arg-type]


@pytest.mark.parametrize("epoch", [0, 1 << 63])
def test_an_epoch_that_is_none_is_refused(epoch: int) -> None:
    with pytest.raises(ValueError, match="epoch"):
        PoolMemory.create(TOY, 1, epoch)


def test_more_memory_than_the_host_has_is_refused_with_the_sizes() -> None:
    available = available_bytes()
    assert available is not None
    pages = available // TOY.page_stride + 1
    with pytest.raises(ConfigError, match=rf"{pages} pages.*needs \d+ bytes.*has \d+ bytes.*page count"):
        PoolMemory.create(TOY, pages, EPOCH)


def test_more_memory_than_a_grant_can_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most"):
        PoolMemory.create(replace(TOY, head_dim=65536, block_tokens=4096), 1 << 30, EPOCH)


def test_a_control_groups_limit_counts_where_it_is_smaller(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/outer/inner"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1000 kB\n")
    assert available_bytes(tmp_path) == 1000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert available_bytes(tmp_path) == 1000 * 1024
    (group.parent / "memory.max").write_text("5000\n")
    (group.parent / "memory.current").write_text("4500\n")
    (group.parent / "memory.stat").write_text("anon 4000\ninactive_file 200\nactive_file 100\n")
    assert available_bytes(tmp_path) == 800


def test_an_attached_pool_shows_the_same_bytes_and_generations(pool: PoolMemory) -> None:
    engine = PoolMemory.attach(os.dup(pool.fd), writable=True, expected=TOY)
    assert (engine.layout, engine.epoch, engine.page_count) == (TOY, EPOCH, 5)
    engine.page_bytes(2)[:] = 7
    assert set(pool.page_bytes(2)) == {7}
    pool.generations.raise_pages([2])
    assert engine.generations.read(2) == Generation(EPOCH, 1)
    assert engine.close() is Closing.UNMAPPED


@pytest.mark.contract("P1")
def test_an_engine_cannot_raise_generations_nor_a_reader_write_pages(pool: PoolMemory) -> None:
    engine = PoolMemory.attach(os.dup(pool.fd), writable=True)
    with pytest.raises(TypeError, match="read-only"):
        engine.generations.raise_pages([0])
    reader = PoolMemory.attach(os.dup(pool.fd), writable=False)
    with pytest.raises(ValueError, match="read-only"):
        reader.page_bytes(0)[:] = 1
    engine.close()
    reader.close()


def test_another_layout_than_expected_is_refused(pool: PoolMemory) -> None:
    with pytest.raises(ConfigError, match="cd34"):
        PoolMemory.attach(pool.fd, writable=False, expected=replace(TOY, model_digest="cd34"))


@contextlib.contextmanager
def forged(raw: bytes, length: int, *, sealed: bool = True) -> Iterator[int]:
    fd = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length)
        os.pwrite(fd, raw, 0)
        if sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield fd
    finally:
        os.close(fd)


def changed(header: bytes, offset: int, value: bytes) -> bytes:
    return header[:offset] + value + header[offset + len(value) :]


@pytest.mark.parametrize(
    ("offset", "value", "problem"),
    [
        (0, b"kvbuspl\x02", "no pool"),
        (8, b"\x02", "no pool"),
        (12, b"\x01", "no layout"),
        (16, b"\x06", "contradicts"),
        (16, b"\0", "contradicts"),
        (24, b"\xff", "contradicts"),
        (40, b"\x08", "contradicts"),
        (72, b"zz", "fingerprint"),
        (80, b"zz", "fingerprint"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(pool: PoolMemory, offset: int, value: bytes, problem: str) -> None:
    header = os.pread(pool.fd, 4096, 0)
    with forged(changed(header, offset, value), pool.length_bytes) as fd, pytest.raises(PeerError, match=problem):
        PoolMemory.attach(fd, writable=False)


def test_a_file_of_another_length_is_refused(pool: PoolMemory) -> None:
    header = os.pread(pool.fd, 4096, 0)
    with forged(header, pool.length_bytes - 4096) as fd, pytest.raises(PeerError, match="another length"):
        PoolMemory.attach(fd, writable=False)
    with forged(header[:100], 100) as fd, pytest.raises(PeerError, match="too short"):
        PoolMemory.attach(fd, writable=False)


def test_an_unsealed_file_is_refused(pool: PoolMemory) -> None:
    header = os.pread(pool.fd, 4096, 0)
    with forged(header, pool.length_bytes, sealed=False) as fd, pytest.raises(PeerError, match="not sealed"):
        PoolMemory.attach(fd, writable=False)


def test_what_is_no_memory_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "plain").open("wb") as plain, pytest.raises(PeerError, match="no pool"):
        PoolMemory.attach(plain.fileno(), writable=False)


def test_close_says_what_it_did() -> None:
    memory = PoolMemory.create(TOY, 2, EPOCH)
    view = memory.page_bytes(0)
    memory.generations.raise_pages([0])
    assert memory.close() is Closing.KEPT_IN_USE
    assert memory.generations.seal_pages([0]) == (2,)  # it goes on working
    del view
    assert memory.close() is Closing.UNMAPPED
    assert memory.close() is Closing.UNMAPPED
    with pytest.raises(ValueError, match="closed"):
        memory.page_bytes(0)
    with pytest.raises(ValueError, match="closed"):
        memory.generations.read(0)


def test_a_pool_that_is_dropped_gives_its_descriptor_back_once() -> None:
    # Planted fault that this catches: a descriptor that only `close` gives back, and the tests dropped hundreds.
    memory = PoolMemory.create(TOY, 2, EPOCH)
    file = os.fstat(memory.fd).st_ino
    assert file in open_files()
    del memory
    gc.collect()
    assert file not in open_files()
    memory = PoolMemory.create(TOY, 2, EPOCH)
    fd = memory.fd
    memory.close()
    os.dup2(2, fd)  # somebody else opens a file, and gets that number
    del memory
    gc.collect()
    os.close(fd)  # it is still open


@pytest.mark.contract("55")
def test_an_exported_pool_stays_mapped_after_everybody_dropped_it() -> None:
    memory = PoolMemory.create(TOY, 2, EPOCH)
    memory.page_bytes(1)[:] = 5
    address, offset = memory.export(), memory.pages_offset + memory.page_stride
    assert memory.export() == address
    assert memory.close() is Closing.KEPT_EXPORTED
    fd = memory.fd
    del memory
    assert any(f"{address:x}-" in line for line in Path("/proc/self/maps").read_text().splitlines())
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as again:
        assert again[offset : offset + 4] == b"\5\5\5\5"


@pytest.mark.contract("P1")
def test_two_processes_see_the_same_bytes_and_generations() -> None:
    lender = pool_parts.small_lender(4)
    ours, theirs = socket.socketpair()
    program = [sys.executable, "-m", "tests.unit.pool_parts", str(theirs.fileno())]
    ours.settimeout(30)
    with ours, subprocess.Popen(program, pass_fds=[theirs.fileno()], cwd=ROOT) as engine:
        theirs.close()
        socket.send_fds(ours, [b"pool"], [lender.memory.fd])
        with ours.makefile("rw", encoding="ascii") as lines:

            def ask(verb: str, page: int, value: int = 0) -> list[str]:
                print(verb, page, value, file=lines, flush=True)
                return lines.readline().split()

            assert lines.readline() == "4\n"
            assert ask("read", 0) == ["0", "00" * 64]
            lease = lender.lend_write(names_of(1), [0])
            view = lease.poll()
            assert view is not None
            assert ask("write", view.pages[0], 0xAB) == ["1", "ab" * 64]
            assert bytes(lender.memory.page_bytes(view.pages[0])) == b"\xab" * 64
            lease.mark_arrived([True])
            lease.release()
            assert ask("read", view.pages[0]) == ["2", "ab" * 64]
            (other,) = fill(lender, names_of(1, prompt=2), byte=3)
            assert ask("read", other) == ["2", "03" * 64]
        ours.shutdown(socket.SHUT_WR)
        assert engine.wait(30) == 0
