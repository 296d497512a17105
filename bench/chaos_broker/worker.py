"""`kvbus worker` as it is, with three things beside it: its own notes of what it says, a clock to be moved, a plant.

The notes go to a file of lines: each event that the recorder takes (S, a decision D), each try to store a message (T),
each that a stream confirmed (A, the settle log's C), each request that was not taken on (V), with the time on the clock
that all processes of a host share. They are evidence that no bus carries.
"""

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any, cast

from bench.chaos_broker.plants import sow
from kvbus.bus import NatsBus
from kvbus.cli import main as kvbus
from kvbus.events import TransferRequested, TransferVerdict
from kvbus.roles.lane import Lane
from kvbus.roles.recorder import Recorder
from kvbus.roles.results import Results
from kvbus.transport import Stored

NOTES, CLOCK, PLANT = "CHAOS_NOTES", "CHAOS_CLOCK", "CHAOS_PLANT"
_SETTLE = ".settle."
OFFSET = struct.Struct("<q")


def move_clock(path: Path, seconds: float) -> None:
    """Set how far a worker's wall clock stands from the true time; in place, since the worker has the file mapped."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(OFFSET.pack(int(seconds * 1e9)))


def _follow_clock(path: Path) -> None:
    """Let this process read its wall clock with an offset. Deadlines run on the monotonic clock, which stays."""
    true_ns = time.time_ns
    with path.open("rb") as file:
        offset = mmap.mmap(file.fileno(), OFFSET.size, access=mmap.ACCESS_READ)

    def time_ns() -> int:
        return int(true_ns() + OFFSET.unpack_from(offset)[0])

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9


def _take_notes(path: Path) -> None:
    notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    recorder, bus, results = cast("Any", Recorder), cast("Any", NatsBus), cast("Any", Results)
    put, store, tell = recorder._put, bus.store, results.tell_verdict  # noqa: SLF001 - where events get their sequence

    def note(sign: str, what: str) -> None:
        os.write(notes, f"{sign} {time.monotonic_ns()} {what}\n".encode())

    def noted(self: Recorder, lane: Lane, *event: object, **rest: object) -> None:
        put(self, lane, *event, **rest)
        note("D" if _SETTLE in lane.subject else "S", f"{self._name}.{self._sequence}")

    async def stored(self: NatsBus, subject: str, data: bytes, *, message_id: str, **rest: object) -> object:
        note("T", message_id)
        answer = await store(self, subject, data, message_id=message_id, **rest)
        if isinstance(answer, Stored):
            note("C" if _SETTLE in subject else "A", message_id)
        return answer

    async def told(self: Results, request: TransferRequested, verdict: TransferVerdict) -> None:
        if verdict.verdict in {"refused", "skipped_busy"}:
            note("V", request.request_hash)
        await tell(self, request, verdict)

    recorder._put, bus.store, results.tell_verdict = noted, stored, told  # noqa: SLF001 - same


def main() -> None:
    """Run the worker; its options are those of `kvbus`."""
    _follow_clock(Path(os.environ[CLOCK]))
    _take_notes(Path(os.environ[NOTES]))
    sow(os.environ.get(PLANT, ""))
    kvbus()


if __name__ == "__main__":
    main()
