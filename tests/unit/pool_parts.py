"""Small pools for tests, and the peer process of the two-process test."""

import os
import socket
import sys

from kvbus.names import page_names
from kvbus.pool.layout import PageLayout
from kvbus.pool.lender import PoolLender, lender_over
from kvbus.pool.memory import PoolMemory

EPOCH = 7 << 32 | 0x5EED
TOY = PageLayout(
    kind="toy",
    layers=1,
    kv_heads=1,
    block_tokens=4,
    head_dim=16,
    dtype="uint8",
    rank=0,
    ranks=1,
    model_digest="ab12",
)


def names_of(count: int, prompt: int = 1) -> tuple[bytes, ...]:
    """The names of the first blocks of one prompt."""
    return page_names(TOY.namespace("salt"), [prompt] * (4 * count), 4)


def small_lender(pages: int = 8, reserve: int = 0) -> PoolLender:
    """A lender over a new pool of toy pages."""
    return lender_over(PoolMemory.create(TOY, pages, EPOCH), name="pool", engine_reserve_pages=reserve)


def fill(lender: PoolLender, names: tuple[bytes, ...], byte: int = 1) -> tuple[int, ...]:
    """Bring content into the pool as the engine does, and return its pages."""
    lease = lender.lend_write(names, range(len(names)), for_peer=False)
    view = lease.poll()
    assert view is not None, lease.failure
    for page in view.pages:
        lender.memory.page_bytes(page)[:] = byte
    lease.mark_arrived([True] * len(view.pages))
    lease.release()
    return view.pages


def serve(channel: socket.socket) -> None:
    """Map the pool that arrives, write what is asked for, and answer each line with a page's generation and bytes."""
    _, descriptors, _, _ = socket.recv_fds(channel, 16, 1)
    memory = PoolMemory.attach(descriptors[0], writable=True, expected=TOY)
    with channel.makefile("rw", encoding="ascii") as lines:
        print(memory.page_count, file=lines, flush=True)
        for line in lines:
            verb, page, value = line.split()
            if verb == "write":
                memory.page_bytes(int(page))[:] = int(value)
            generation = memory.generations.read(int(page))
            counter = generation.counter if generation else -1
            print(counter, bytes(memory.page_bytes(int(page))).hex(), file=lines, flush=True)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        serve(inherited)
    os._exit(0)
