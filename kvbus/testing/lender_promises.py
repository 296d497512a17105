"""What every lender and its leases promise, each checked on a fresh lender; `check_lender` runs them all."""

from collections.abc import Callable, Collection
from itertools import pairwise

from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import Direction, Lease, LeaseView
from kvbus.testing.cases import LenderCase, require, violated

LENDS_MAX = 64
"""Leases asked for to see pages come round again: a lender of a case has few pages, or never gives one twice."""


def changed(case: LenderCase) -> list[int]:
    """Let the lender advance; return the ids that it names."""
    return list(case.calls.ask("progress", case.lender.progress))


def lent(case: LenderCase, direction: Direction, rows: int = 2) -> tuple[Lease, LeaseView]:
    """Return a granted lease and its view."""
    lease = case.calls.ask("lend", lambda: case.lend(direction, rows))
    if case.grant is not None:
        case.grant(lease)
    changed(case)
    view = case.calls.ask("poll", lease.poll)
    if view is None:
        violated("12", f"a granted lease gives no view; its failure is {lease.failure!r}")
    require(len(view.pages) == rows, "12", f"{rows} rows were asked for, the view has {len(view.pages)}")
    return lease, view


def marked(case: LenderCase, lease: Lease, mask: tuple[bool, ...]) -> None:
    """Mark a lease that may be marked."""
    case.calls.ask("mark_arrived", lambda: lease.mark_arrived(mask))


def raises(call: Callable[[], object]) -> bool:
    """Tell whether a call that is out of turn raises."""
    try:
        call()
    except Exception:  # noqa: BLE001 - which one is the lender's choice
        return True
    return False


def state(case: LenderCase) -> object:
    """Return the lender's state, or nothing where the case cannot see it."""
    return case.state() if case.state else None


def content(case: LenderCase) -> Collection[bytes]:
    """Return the names that may be lent for reading."""
    return case.content() if case.content else ()


def a_lease_says_what_it_is(case: LenderCase) -> None:
    """Its id is its own, and direction, lender and rank are those asked for (10, 11, 16, R5)."""
    leases = [case.lend(direction, 1) for direction in (Direction.READ, Direction.WRITE, Direction.WRITE)]
    require(len({lease.lease_id for lease in leases}) == 3, "11", "two leases have one id")
    for lease, direction in zip(leases, (Direction.READ, Direction.WRITE, Direction.WRITE), strict=True):
        require(lease.direction is direction, "16", f"a lease for {direction.name} says {lease.direction!r}")
        require(lease.lender is case.lender, "10", "a lease names another lender than the one who lent it")
        require(isinstance(lease.rank, int), "R5", f"the rank is {lease.rank!r}, expected a number")


def a_view_comes_once_granted_and_stays_the_same(case: LenderCase) -> None:
    """None while waiting, one object from then on, and an error after the release (12, 47, P1)."""
    for direction in (Direction.READ, Direction.WRITE):
        if case.grant is not None:
            waiting = case.lend(direction, 1)
            require(waiting.poll() is None, "12", "a waiting lease gives a view")
        lease, view = lent(case, direction)
        require(case.calls.ask("poll again", lease.poll) is view, "12", "a second poll gives another view object")
        columns = {len(view.ordinals), len(view.names), len(view.pages), len(view.counters)}
        require(len(columns) == 1, "12", f"the columns of a view have {sorted(columns)} rows")
        require(all(a < b for a, b in pairwise(view.ordinals)), "47", f"ordinals {view.ordinals} do not ascend")
        require(len(set(view.pages)) == len(view.pages), "47", f"pages {view.pages} hold one twice")
        odd = 1 if direction is Direction.WRITE else 0
        require(all(c % 2 == odd for c in view.counters), "P1", f"{direction.name} lends generations {view.counters}")
        case.calls.ask("release", lease.release)
        require(raises(lease.poll), "12", "a released lease can be polled")


def progress_names_each_change_once(case: LenderCase) -> None:
    """A lease is named when it was granted, and not again (R4)."""
    lease = case.lend(Direction.WRITE, 1)
    changed(case)
    if case.grant is not None:
        case.grant(lease)
        require(changed(case) == [lease.lease_id], "R4", "a lease was granted, and progress does not name it alone")
    require(changed(case) == [], "R4", "progress names leases that have not changed since")


def a_refused_lease_stays_failed_and_changed_nothing(case: LenderCase) -> None:
    """A failure is final and leaves no trace (13)."""
    if case.refused is None:
        return
    before = state(case)
    lease = case.calls.ask("lend", case.refused)
    changed(case)
    failure = lease.failure
    require(failure is not None and failure.failure is not FailureClass.NONE, "13", f"a refusal is {failure!r}")
    require(case.calls.ask("poll", lease.poll) is None, "13", "a failed lease gives a view")
    if case.grant is not None:
        case.grant(lease)
        changed(case)
    require(case.calls.ask("poll", lease.poll) is None and lease.failure == failure, "13", "a failure was not final")
    for _ in range(2):
        case.calls.ask("release of a failed lease", lease.release)
    require(state(case) == before, "13", f"a failed lease left {state(case)!r} behind, before it was {before!r}")


def a_mark_is_for_writes_once_after_the_view(case: LenderCase) -> None:
    """Anything else raises (14)."""
    unseen = case.lend(Direction.WRITE, 2)
    require(raises(lambda: unseen.mark_arrived((True, True))), "14", "a lease is marked whose view nobody saw")
    read, _ = lent(case, Direction.READ)
    require(raises(lambda: read.mark_arrived((True, True))), "14", "a read lease can be marked")
    write, _ = lent(case, Direction.WRITE)
    marked(case, write, (True, False))
    require(raises(lambda: write.mark_arrived((True, True))), "14", "a lease can be marked twice")


def a_wrong_mask_raises_and_records_nothing(case: LenderCase) -> None:
    """After it, the right mask is still taken (14)."""
    lease, _ = lent(case, Direction.WRITE)
    for wrong in ((True,), (True, True, True), ("yes", "no"), (1, 0), "ab"):
        require(raises(lambda wrong=wrong: lease.mark_arrived(wrong)), "14", f"{wrong!r} is taken for a mask")  # type: ignore[misc]
    marked(case, lease, (True, True))
    case.calls.ask("release", lease.release)


def a_release_is_legal_in_every_state_and_happens_once(case: LenderCase) -> None:
    """A second release changes nothing (15)."""
    for _ in range(3):
        unseen = case.lend(Direction.WRITE, 1)
        read, _ = lent(case, Direction.READ, 1)
        write, _ = lent(case, Direction.WRITE, 1)
        marked(case, write, (True,))
        for lease in (unseen, read, write):
            case.calls.ask("release", lease.release)
        after = state(case)
        for lease in (unseen, read, write):
            case.calls.ask("a second release", lease.release)
        require(state(case) == after, "15", f"a second release changed {after!r} to {state(case)!r}")


def arguments_that_fit_nothing_raise_and_change_nothing(case: LenderCase) -> None:
    """ValueError or TypeError, before anything happens (16)."""
    before = state(case)
    for fault in case.faults:
        try:
            fault()
        except (ValueError, TypeError):
            continue
        except Exception as error:  # noqa: BLE001 - foreign code
            violated("16", f"arguments that fit nothing raise {error!r}, expected ValueError or TypeError")
        violated("16", "arguments that fit nothing were taken")
    require(state(case) == before, "16", f"refused arguments changed {before!r} to {state(case)!r}")


def only_rows_that_arrived_become_content(case: LenderCase) -> None:
    """And none of them before the lease is given back (17, 25)."""
    if case.content is None:
        return
    lease, view = lent(case, Direction.WRITE, 3)
    require(not set(view.names) & set(content(case)), "25", "pages that are being written are content already")
    marked(case, lease, (True, False, True))
    require(not set(view.names) & set(content(case)), "25", "marked rows are content before they are given back")
    case.calls.ask("release", lease.release)
    now = [name in content(case) for name in view.names]
    require(now == [True, False, True], "17", f"rows 0 and 2 of 3 arrived, content are {now}")


def a_write_given_back_unseen_is_no_content(case: LenderCase) -> None:
    """Its pages come back, and nothing is named (19)."""
    before = set(content(case))
    for _ in range(LENDS_MAX):
        lease = case.lend(Direction.WRITE, 3)
        if case.grant is not None:
            case.grant(lease)
        require(lease.failure is None, "19", f"pages given back unseen do not come back: {lease.failure!r}")
        case.calls.ask("release", lease.release)
    require(set(content(case)) == before, "19", "a write whose view nobody saw became content")


def pages_out_are_not_lent_for_writing_again(case: LenderCase) -> None:
    """Nor are those of a write that was released unmarked (1, 18)."""
    read, seen = lent(case, Direction.READ)
    _, written = lent(case, Direction.WRITE)
    unmarked, unknown = lent(case, Direction.WRITE)
    case.calls.ask("release of an unmarked write", unmarked.release)
    together = seen.pages + written.pages + unknown.pages
    require(len(set(together)) == len(together), "1", f"one page is in two leases at once: {together}")
    out = dict.fromkeys(seen.pages + written.pages, "1") | dict.fromkeys(unknown.pages, "18")
    for _ in range(LENDS_MAX):
        lease = case.lend(Direction.WRITE, 1)
        if case.grant is not None:
            case.grant(lease)
        changed(case)
        view = case.calls.ask("poll", lease.poll)
        if view is None:
            break
        for page in view.pages:
            require(page not in out, out.get(page, "1"), f"page {page} is lent for writing while it is out")
            out[page] = "1"
    require(read.poll() is seen, "12", "a lease lost its view when others were lent")


def a_page_lent_again_has_another_generation(case: LenderCase) -> None:
    """A generation that was seen never comes again (48)."""
    counters: dict[int, int] = {}
    for _ in range(LENDS_MAX):
        lease, view = lent(case, Direction.WRITE, 1)
        for page, counter in zip(view.pages, view.counters, strict=True):
            before = counters.get(page, -1)
            require(counter > before, "48", f"page {page} has generation {counter} after {before}")
            counters[page] = counter
        marked(case, lease, (False,))
        case.calls.ask("release", lease.release)


def bounds_name_a_range_and_change_nothing(case: LenderCase) -> None:
    """They start within the lease and grow with what arrived (27, 28)."""
    lease, view = lent(case, Direction.WRITE, 3)
    before, ends = state(case), []
    for mask in ((False, False, False), (True, False, True), (True, True, False), (True, True, True)):
        lo, hi = case.calls.ask("bounds", lambda mask=mask: lease.bounds(mask))  # type: ignore[misc]
        require(lo <= hi, "28", f"bounds {lo}…{hi} of {mask} are no range")
        require(lo >= view.ordinals[0], "27", f"floor {lo} lies before the lease, which starts at {view.ordinals[0]}")
        ends.append(hi)
    require(ends == sorted(ends), "28", f"more rows arrived, and less can be used: {ends}")
    require(ends[0] <= view.ordinals[0], "28", f"nothing arrived, and blocks up to {ends[0]} can be used")
    require(raises(lambda: lease.bounds((True,))), "14", "a mask of one row is taken for three")
    require(state(case) == before, "28", "asking for bounds changed something")
    marked(case, lease, (True, True, True))


LENDER_PROMISES: tuple[Callable[[LenderCase], None], ...] = (
    a_lease_says_what_it_is,
    a_view_comes_once_granted_and_stays_the_same,
    progress_names_each_change_once,
    a_refused_lease_stays_failed_and_changed_nothing,
    a_mark_is_for_writes_once_after_the_view,
    a_wrong_mask_raises_and_records_nothing,
    a_release_is_legal_in_every_state_and_happens_once,
    arguments_that_fit_nothing_raise_and_change_nothing,
    only_rows_that_arrived_become_content,
    a_write_given_back_unseen_is_no_content,
    pages_out_are_not_lent_for_writing_again,
    a_page_lent_again_has_another_generation,
    bounds_name_a_range_and_change_nothing,
)
