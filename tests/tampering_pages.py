"""Writes into a worker's pool as no lease allows: for tests of who notices."""

import os

from kvbus.engines.desk import Where


def flip_a_bit(where: Where, page: int) -> None:
    """Change one bit near the end of a page."""
    descriptor = os.open(f"/proc/{where.pid}/fd/{where.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        at = where.offset + page * where.stride + where.page_bytes - 7
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 1]), at)
    finally:
        os.close(descriptor)
