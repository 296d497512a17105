"""What the flow tests share: short folders, since a socket's path has at most 107 bytes."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder of this module's own, with a short path."""
    with tempfile.TemporaryDirectory(prefix="kvflow-") as name:
        yield Path(name)
