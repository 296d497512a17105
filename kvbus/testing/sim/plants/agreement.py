"""Faults of the agreement: who has to have reported what before a decision, and what a decision says."""

# ruff: noqa: SLF001, ANN401 - a fault sits inside of what it spoils, and hands on what it does not look at

from collections.abc import Sequence
from typing import Any

from kvbus.ledger.agreement import Agreement, Decision
from kvbus.ledger.facts import RESULT_BITS, Fact
from kvbus.testing.sim.plants.plant import Change, plant

_ABANDONED = int(Fact.ABANDONED)


@plant("a settle is decided on a subset of ranks", "contract 3, R6, R7", check="agreement")
def settle_on_a_subset() -> Sequence[Change]:
    """Decide although one party has not reported."""
    settle = Agreement._settle_if_complete

    def without_one(self: Agreement, transfer: str, opened: Any) -> Any:
        reports = opened.reports
        silent = [party for party, report in reports.items() if not report.bits]
        if len(silent) != 1 or len(reports) == 1:
            return settle(self, transfer, opened)
        missing = reports.pop(silent[0])
        decision = settle(self, transfer, opened)
        if decision is None:
            reports[silent[0]] = missing
        return decision

    return [(Agreement, "_settle_if_complete", without_one)]


@plant("a settle is decided on results alone", "contract 3, 34", check="agreement")
def settle_on_results() -> Sequence[Change]:
    """Decide when all have a result, whether or not access has ended."""
    report = Agreement.report

    def as_if_ended(self: Agreement, party_key: Any, bits: int, *, lo: int, hi: int) -> Any:
        return report(self, party_key, bits | int(Fact.ACCESS_ENDED) if bits & RESULT_BITS else bits, lo=lo, hi=hi)

    return [(Agreement, "report", as_if_ended)]


@plant("a settle is decided though a rank gave up", "P10, P11", check="agreement")
def settle_abandoned() -> Sequence[Change]:
    """Let names become visible that one rank has not applied."""
    report = Agreement.report

    def unaware(self: Agreement, party_key: Any, bits: int, *, lo: int, hi: int) -> Any:
        return report(self, party_key, bits & ~_ABANDONED, lo=lo, hi=hi)

    return [(Agreement, "report", unaware)]


def _with_other_epochs(accepts: Any) -> Sequence[Change]:
    report = Agreement.report

    def of_any(self: Agreement, party_key: tuple[str, int, int], bits: int, *, lo: int, hi: int) -> Any:
        member, epoch, ticket = party_key
        for known in self._by_party:
            if (known[0], known[2]) == (member, ticket) and accepts(epoch, known[1]):
                return report(self, known, bits, lo=lo, hi=hi)
        return report(self, party_key, bits, lo=lo, hi=hi)

    return [(Agreement, "report", of_any)]


@plant("facts of an old epoch count", "contract 48, P16", check="agreement")
def accept_old_epoch() -> Sequence[Change]:
    """Take what an earlier run of a member said for its present run's word."""
    return _with_other_epochs(lambda epoch, known: epoch <= known)


@plant("facts of a later epoch count", "P4, P16", check="agreement")
def accept_later_epoch() -> Sequence[Change]:
    """Compare epochs by their order: a member that started again speaks for its last run."""
    return _with_other_epochs(lambda epoch, known: epoch >= known)


@plant("a transfer's parties may change", "P12", check="agreement")
def reopen() -> Sequence[Change]:
    """Open a transfer again with other parties."""
    open_once = Agreement.open

    def open_again(self: Agreement, transfer: str, parties: Any) -> Decision:
        if transfer in self._open:
            self._close(transfer)
        return open_once(self, transfer, parties)

    return [(Agreement, "open", open_again)]


@plant("one ticket serves two transfers", "P12, contract 11", check="agreement")
def share_ticket() -> Sequence[Change]:
    """Open a transfer with a ticket that another one has."""
    open_once = Agreement.open

    def open_over(self: Agreement, transfer: str, parties: Any) -> Decision:
        if transfer not in self._open:
            for party in parties:
                self._by_party.pop(party.key, None)
        return open_once(self, transfer, parties)

    return [(Agreement, "open", open_over)]


@plant("decision numbers repeat", "P15")
def repeat_numbers() -> Sequence[Change]:
    """Use some numbers twice, as after a restart that forgot the last one."""
    decide = Agreement._decision

    def sometimes(self: Agreement, *args: Any, **options: Any) -> Decision:
        if self._n and self._n % 5 == 0:
            self._n -= 1
        return decide(self, *args, **options)

    return [(Agreement, "_decision", sometimes)]


@plant("a decision names another one as its previous", "P15", check="agreement")
def break_chain() -> Sequence[Change]:
    """Chain a decision to the last one of its own transfer."""
    decide = Agreement._decision

    def unchained(self: Agreement, kind: str, transfer: str, *args: Any, **options: Any) -> Decision:
        decision = decide(self, kind, transfer, *args, **options)
        return decision if kind == "open" else decision._replace(previous="")

    return [(Agreement, "_decision", unchained)]


@plant("bounds are written again", "P17", check="agreement")
def rewrite_bounds() -> Sequence[Change]:
    """Take the bounds that were reported last."""
    report = Agreement.report

    def over(self: Agreement, party_key: Any, bits: int, *, lo: int, hi: int) -> Any:
        opened = self._open.get(self._by_party.get(party_key, ""))
        if opened:
            opened.reports[party_key].lo = opened.reports[party_key].hi = None
        return report(self, party_key, bits, lo=lo, hi=hi)

    return [(Agreement, "report", over)]


@plant("a second result is taken", "P17, contract 44", check="agreement")
def second_result() -> Sequence[Change]:
    """Let a party that delivered say later that it failed, and the other way round."""
    report = Agreement.report

    def latest(self: Agreement, party_key: Any, bits: int, *, lo: int, hi: int) -> Any:
        opened = self._open.get(self._by_party.get(party_key, ""))
        if opened and bits & RESULT_BITS:
            opened.reports[party_key].bits &= ~RESULT_BITS
        return report(self, party_key, bits, lo=lo, hi=hi)

    return [(Agreement, "report", latest)]
