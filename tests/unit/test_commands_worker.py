"""`kvbus worker` as a process of its own: what it does for its loop once it is ready."""

import gc
from collections.abc import Iterator

import pytest

from kvbus.commands.worker import YOUNG_OBJECTS_MAX, keep_what_stands


@pytest.fixture
def thawed_again() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("thawed_again")
def test_what_stands_when_a_worker_is_ready_is_not_looked_through_again() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    keep_what_stands()
    assert gc.get_freeze_count() > len(gc.get_objects())
    assert not any(one is cycle for one in gc.get_objects())


@pytest.mark.usefixtures("thawed_again")
def test_cycles_are_looked_for_after_many_transfers_and_not_after_each() -> None:
    older = gc.get_threshold()[1:]
    keep_what_stands()
    assert gc.get_threshold() == (YOUNG_OBJECTS_MAX, *older)
    assert gc.isenabled()
