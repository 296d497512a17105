"""What a test needs and this machine lacks: a laptop skips the test, CI, which installs all of it, fails."""

import os
from typing import NoReturn

import pytest


def absent(text: str) -> NoReturn:
    """End the running test, saying what is missing and how to get it."""
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)
