"""Whole instances over a transport that changes bits: digests let no page through that differs."""

import logging
from collections.abc import Sequence

import pytest

from kvbus.dataplane.reader import Progress
from kvbus.testing.sim.plants.plant import Change
from kvbus.testing.sim.settings import CALM, SimSettings
from kvbus.testing.sim.world import SimResult, World

FLIPS = 0.03


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Refusals and retries, thousands of them, are not worth a record each."""
    caplog.set_level(logging.CRITICAL, logger="kvbus")


def run(seed: int, **more: object) -> SimResult:
    return World(SimSettings(seed=seed, transfers=150, flips=FLIPS, **more)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_page_with_a_changed_bit_becomes_content_while_everything_else_goes_wrong_too(seed: int) -> None:
    # P2
    result = run(seed)
    assert result.violation is None, result.violation
    assert result.leaked == ()
    assert result.transfers["fired"] >= 150


def test_changed_bits_fail_some_transfers_and_most_pages_move(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    compare = Progress._with_their_bytes

    def noted(self: Progress, rows: Sequence[int]) -> Sequence[int]:
        whole = compare(self, rows)
        found.append(len(rows) - len(whole))
        return whole

    monkeypatch.setattr(Progress, "_with_their_bytes", noted)
    result = run(4, rates=CALM)
    assert result.violation is None, result.violation
    assert 0 < sum(found) < sum(1 for differing in found if not differing)


def test_without_the_comparison_a_changed_bit_is_found_in_somebodys_content(monkeypatch: pytest.MonkeyPatch) -> None:
    change: Change = (Progress, "_with_their_bytes", lambda _self, rows: rows)
    monkeypatch.setattr(*change)
    result = run(1, rates=CALM)
    assert result.violation is not None
    assert "wrong bytes" in result.violation.text
