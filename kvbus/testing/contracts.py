"""Check your own backend or lender against the ownership contract: `check_backend(maker)`, `check_lender(maker)`.

A maker is a function that returns a context: entering it makes one fresh part and its case, leaving it ends the part.
Every promise gets a part of its own, in a thread of its own, so that one that hangs is named and the others are not
kept waiting. What breaks is raised as ContractViolationError with the number of the statement, as docs/ownership.md
lists them:

    @contextmanager
    def my_backend():
        backend = MyBackend(...)
        yield BackendCase(backend, order=lambda ticket, attempt, peer: Order(...))
        backend.close()


    def test_my_backend_keeps_the_contract():
        check_backend(my_backend)

`docs/third_party_backend.md` holds a whole example. The checks see what a part says, and the pages where the case shows
them. What they cannot see is whether its evidence is true: that stays with whoever wrote it.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvbus.testing.backend_promises import BACKEND_PROMISES, Heard
from kvbus.testing.cases import BackendCase, Calls, ContractViolationError, LenderCase, violated
from kvbus.testing.lender_promises import LENDER_PROMISES

__all__ = [
    "BACKEND_PROMISES",
    "LENDER_PROMISES",
    "BackendCase",
    "ContractViolationError",
    "LenderCase",
    "check_backend",
    "check_backend_promise",
    "check_lender",
    "check_lender_promise",
]

BackendMaker = Callable[[], AbstractContextManager[BackendCase]]
LenderMaker = Callable[[], AbstractContextManager[LenderCase]]

PROMISE_MAX_S = 90.0
"""A promise waits for at most four attempts, each within its case's deadline (10 s unless said otherwise), and starts
one part; only a call that does not return meets this."""


def check_backend(maker: BackendMaker, *, within_s: float = PROMISE_MAX_S) -> None:
    """Check every promise of a backend; ContractViolationError at the first that it breaks.

    A promise that is not through within `within_s` is a violation of statement 29, named by the call that has not
    returned; the thread that hangs in it is left behind.
    """
    for promise in BACKEND_PROMISES:
        check_backend_promise(maker, promise, within_s=within_s)


def check_backend_promise(
    maker: BackendMaker, promise: Callable[[Heard], None], *, within_s: float = PROMISE_MAX_S
) -> None:
    """Check one of BACKEND_PROMISES on a fresh backend."""

    def check(running: list[Calls]) -> None:
        with maker() as case:
            running.append(case.calls)
            promise(Heard(case))

    _run(promise.__name__, check, within_s)


def check_lender(maker: LenderMaker, *, within_s: float = PROMISE_MAX_S) -> None:
    """Check every promise of a lender and its leases; ContractViolationError at the first that it breaks."""
    for promise in LENDER_PROMISES:
        check_lender_promise(maker, promise, within_s=within_s)


def check_lender_promise(
    maker: LenderMaker, promise: Callable[[LenderCase], None], *, within_s: float = PROMISE_MAX_S
) -> None:
    """Check one of LENDER_PROMISES on a fresh lender."""

    def check(running: list[Calls]) -> None:
        with maker() as case:
            running.append(case.calls)
            promise(case)

    _run(promise.__name__, check, within_s)


def _run(name: str, check: Callable[[list[Calls]], None], within_s: float) -> None:
    running: list[Calls] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            check(running)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asked
            raised.append(error)

    thread = threading.Thread(target=run, name=f"check {name}", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        calling = (running[0].running if running else "") or "the maker, or a call that is not the protocol's"
        violated("29", f"{name}: {calling} has not returned after {within_s:g} s; no call may block")
    if raised:
        if isinstance(raised[0], ContractViolationError):
            raised[0].add_note(f"promise: {name}")
        raise raised[0]
