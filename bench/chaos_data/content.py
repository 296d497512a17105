"""What a page holds follows from its name, so that anyone can tell whether a page is what its name says."""

import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbus.names import NAME_LENGTH_BYTES
from kvbus.pool.layout import PageLayout

BLOCK_TOKENS = 32


def names_of(tag: str, count: int) -> tuple[bytes, ...]:
    """Return so many page names that no other tag shares."""
    return tuple(
        hashlib.blake2b(f"{tag}/{row}".encode(), digest_size=NAME_LENGTH_BYTES).digest() for row in range(count)
    )


def pattern(name: bytes) -> NDArray[np.uint64]:
    """Return the four words that fill a page of this name, over and over."""
    return np.frombuffer(hashlib.sha256(name).digest(), dtype=np.uint64)


def fill(page: NDArray[np.uint8], name: bytes) -> None:
    """Make a page what its name says."""
    page.view(np.uint64).reshape(-1, 4)[:] = pattern(name)


def wrong_bytes(page: NDArray[np.uint8], name: bytes) -> int:
    """Count the bytes of a page that are not what its name says."""
    words = page.view(np.uint64).reshape(-1, 4)
    if (words == pattern(name)).all():
        return 0
    return int(np.count_nonzero(page.reshape(-1, 32) != pattern(name).view(np.uint8)))


def layout(page_bytes: int) -> PageLayout:
    """Return a layout with pages of so many bytes."""
    return PageLayout(
        kind="toy",
        layers=1,
        kv_heads=1,
        block_tokens=BLOCK_TOKENS,
        head_dim=page_bytes // BLOCK_TOKENS,
        dtype="uint8",
        rank=0,
        ranks=1,
        model_digest="c4a0",
    )


@dataclass(frozen=True, slots=True)
class Window:
    """Where a process's pool can be looked at from outside."""

    pid: int
    fd: int
    pages_offset: int
    page_stride: int
    page_bytes: int
    length_bytes: int


class Eye:
    """Looks at a pool through its own descriptor; it goes on seeing after the pool's process has died."""

    def __init__(self, window: Window) -> None:
        self._window = window
        descriptor = os.open(f"/proc/{window.pid}/fd/{window.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._mapping = mmap.mmap(descriptor, window.length_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def page(self, page: int) -> NDArray[np.uint8]:
        """Return a page's bytes as they are now; the view must not outlive the next `close`."""
        start = self._window.pages_offset + page * self._window.page_stride
        return np.frombuffer(self._mapping, dtype=np.uint8, count=self._window.page_bytes, offset=start)

    def wrong_bytes(self, content: dict[bytes, int]) -> int:
        """Count, over all named pages, the bytes that are not what the name says."""
        return sum(wrong_bytes(self.page(page), name) for name, page in content.items())

    def begun(self, pages: Sequence[int], names: Sequence[bytes]) -> int:
        """Count the rows of a transfer whose first bytes have arrived."""
        heads = [pattern(name).view(np.uint8) for name in names]
        return sum(bool((self.page(page)[:32] == head).all()) for page, head in zip(pages, heads, strict=True))

    def close(self) -> None:
        """Stop looking."""
        self._mapping.close()
