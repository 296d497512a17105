"""Faults of an instance with several members: what is shown when, and who decides."""

# ruff: noqa: SLF001, ANN401 - a fault sits inside of what it spoils, and hands on what it does not look at

from collections.abc import Sequence
from typing import Any

from kvbus.ledger.agreement import Decision
from kvbus.ledger.council import Council
from kvbus.ledger.shares import ShareStage
from kvbus.testing.sim.plants.plant import Change, plant


@plant("pages are shown before every member has promised", "P10", weathers=("ranks", "frail ranks"))
def show_early() -> Sequence[Change]:
    """Let names become visible as soon as the settle stands in the log."""
    about = Council._about

    def at_once(self: Council, now: float, case: Any) -> Decision | None:
        shares = self._shares_in(case)
        if case.stage is ShareStage.SETTLED and not self._obstacle(now, case, shares):
            return self._word("visible", case, shares)
        return about(self, now, case)

    return [(Council, "_about", at_once)]


@plant("a new coordinator decides before it has heard the members", "P13", check="council")
def no_gathering() -> Sequence[Change]:
    """Lead as soon as the term stands in the log."""

    def at_once(self: Council, now: float) -> bool:
        self._gathered = True
        for transfer, parties in self._reported().items():
            self._cases[transfer] = self._adopted(now, transfer, parties)
        return True

    return [(Council, "_gather", at_once)]


@plant("a new coordinator decides anew what a member has applied", "P15", check="council")
def decide_anew() -> Sequence[Change]:
    """Forget how a transfer of an earlier term ended at some member."""
    adopted = Council._adopted

    def unbound(self: Council, now: float, transfer: str, parties: Any) -> Any:
        case = adopted(self, now, transfer, parties)
        case.bound_to = None
        return case

    return [(Council, "_adopted", unbound)]
