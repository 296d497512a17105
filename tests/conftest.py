"""What every test shares: a marker that names the numbered statement a test proves."""

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvbus.broker import EmbeddedBroker
from kvbus.testing.cluster import free_ports

# No example is judged by how long it took: on a busy machine that says nothing about the code.
settings.register_profile("untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests after the fast ones, and tests that need a real model last; order is otherwise kept."""
    items.sort(key=_cost)


def _cost(item: pytest.Item) -> int:
    if item.get_closest_marker("model"):
        return 2
    return 1 if item.get_closest_marker("slow") else 0


@pytest.fixture(autouse=True)
def logged_as_before() -> Iterator[None]:
    """No test leaves the log quieter than it found it: a later test that asks for a warning would not see it."""
    logger = logging.getLogger("kvbus")
    before = (logger.level, logging.root.manager.disable)
    yield
    assert (logger.level, logging.root.manager.disable) == before, "this test left kvbus's log at another level"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
    """A real broker of this test's own: a free port, an empty store."""
    async with EmbeddedBroker.started(tmp_path / "broker", port=free_ports(1)[0]) as running:  # kept while it is away
        yield running


@pytest.fixture
def nats_url(broker: EmbeddedBroker) -> str:
    """Where this test's broker listens, its token included."""
    return broker.url.replace("://", f"://{broker.token}@")
