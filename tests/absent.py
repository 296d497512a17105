"""What a test needs and this machine lacks: a laptop skips the test, CI, which installs all of it, fails."""

import os
from typing import NoReturn

import pytest


def absent(text: str, *, excused: str = "") -> NoReturn:
    """End the running test, saying what is missing and how to get it.

    `excused` names the variable by which .ci/run says that this cannot be installed where it runs.
    """
    if os.environ.get("CI") and not (excused and os.environ.get(excused)):
        pytest.fail(text)
    pytest.skip(text)
