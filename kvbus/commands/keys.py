"""Keys of a terminal, one by one as they are pressed; the terminal is as before afterwards, whatever ends the block."""

import asyncio
import contextlib
import os
import termios
import tty
from collections.abc import AsyncIterator, Iterator

KEYS_WAITING_MAX = 64
"""Keys that nobody has taken yet: a person is slower; what comes beyond is dropped."""
READ_BYTES = 1_024

_NAMES = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "back",
    b"\x1b": "escape",
}


def named(data: bytes) -> Iterator[str]:
    """Yield the names of the keys that some bytes stand for; a sequence that is not known is passed over whole.

    A terminal sends a key's sequence in one piece, so an escape sign at the end is the key itself.
    """
    while data:
        length = _sequence_length(data)
        sequence, data = data[:length], data[length:]
        name = _NAMES.get(sequence) or (sequence.decode("ascii") if sequence.isalnum() and sequence.isascii() else "")
        if name:
            yield name


def _sequence_length(data: bytes) -> int:
    if len(data) < 3 or data[:1] != b"\x1b" or data[1:2] not in b"[O":
        return 1
    if data[1:2] == b"O":
        return 3
    end = next((place for place, sign in enumerate(data[2:], 2) if 0x40 <= sign <= 0x7E), len(data) - 1)
    return end + 1


@contextlib.asynccontextmanager
async def pressed(descriptor: int) -> "AsyncIterator[asyncio.Queue[str]]":
    """Give a queue that fills with the names of pressed keys; one that stays empty where no terminal is read.

    Signals stay what they are: Ctrl-C is no key.
    """
    keys: asyncio.Queue[str] = asyncio.Queue(KEYS_WAITING_MAX)
    if not os.isatty(descriptor):
        yield keys
        return
    loop, before = asyncio.get_running_loop(), termios.tcgetattr(descriptor)

    def read() -> None:
        try:
            data = os.read(descriptor, READ_BYTES)
        except OSError:  # the terminal is gone
            data = b""
        if not data:
            loop.remove_reader(descriptor)
            return
        for name in named(data):
            with contextlib.suppress(asyncio.QueueFull):
                keys.put_nowait(name)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield keys
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
