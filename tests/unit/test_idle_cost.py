"""What is not attached costs nothing, and what is idle costs one question a round, however much is held."""

import gc
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest

from kvbus.dataplane.lending import LendingBackend
from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.ucx_plane import UcxPlane
from kvbus.ledger.binding import Binding
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Direction, SubmitMode
from kvbus.testing.ledger_parts import ListedLender, ManualBackend

MODE = SubmitMode("pull", Direction.WRITE)


def calls_of(run: Callable[[], object]) -> Counter[str]:
    """Count the Python functions that a call enters, by their qualified names."""
    entered: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    gc.collect()  # what other tests left behind must not end within
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return entered


def idle_round(holder: LeaseHolder) -> None:
    holder.collect()
    holder.settle(())
    holder.advance()
    holder.finish()


def test_with_nothing_attached_a_round_calls_nobody() -> None:
    # R23
    holder = LeaseHolder(bindings=(), lenders=())
    entered = calls_of(lambda: idle_round(holder))
    own = ("LeaseHolder.", "Foreign.", "__create_fn__", "test_", "idle_round")  # created: the empty batch of facts
    assert not [name for name in entered if not name.startswith(own)]
    assert not holder.collect()
    assert holder.shutdown(0.0).complete


@pytest.mark.parametrize("held", [0, 10, 5_000])
def test_an_idle_round_asks_each_part_once_however_much_is_held(held: int) -> None:
    # R4, R23
    lender, backend = ListedLender(), ManualBackend()
    holder = LeaseHolder(bindings=[Binding("pull", backend, Direction.WRITE, retained_max=held + 1)], lenders=[lender])
    for _ in range(held):
        holder.take(lender.lend(Direction.WRITE), MODE, "go", now=0.0, peer="p")
    idle_round(holder)
    idle_round(holder)
    empty = LeaseHolder(bindings=[Binding("pull", ManualBackend(), Direction.WRITE)], lenders=[ListedLender()])
    assert calls_of(lambda: idle_round(holder)) == calls_of(lambda: idle_round(empty))
    before = backend.changes_calls, lender.progress_calls
    idle_round(holder)
    assert (backend.changes_calls, lender.progress_calls) == (before[0] + 1, before[1] + 1)
    assert [*backend.shutdowns, *backend.isolations, *backend.cancels] == []


def test_parts_that_were_not_started_have_no_thread() -> None:
    # R23
    before = set(threading.enumerate())
    parts = [
        MemoryReader(wake=lambda: None),
        UcxPlane(wake=lambda: None),
        LendingBackend(wake=lambda: None),
        LeaseHolder(bindings=(), lenders=()),
    ]
    assert set(threading.enumerate()) <= before  # one of another test may have ended meanwhile
    assert len(parts) == 4


def test_importing_kvbus_starts_nothing_and_loads_no_transport() -> None:
    # R23
    script = (
        "import sys, threading, kvbus, kvbus.ledger.holder, kvbus.pool.lender\n"
        "loaded = {'nats', 'libucx', 'torch', 'asyncio'} & set(sys.modules)\n"
        "print(threading.active_count(), sorted(loaded))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=150)
    assert result.stdout.strip() == "1 []"
