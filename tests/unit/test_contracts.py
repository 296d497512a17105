"""The checkers that ship: what kvbus brings keeps the contract."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from kvbus.testing.backend_promises import Heard
from kvbus.testing.cases import BackendCase, LenderCase
from kvbus.testing.contracts import (
    BACKEND_PROMISES,
    LENDER_PROMISES,
    check_backend,
    check_backend_promise,
    check_lender,
    check_lender_promise,
)
from tests.unit.helpers.contract_makers import (
    lending_case,
    listed_case,
    local_case,
    manual_case,
    pool_case,
    reading_case,
)
from tests.unit.helpers.lending_process import LendingProcess, lending_process
from tests.unit.helpers.reader_side import MAKERS, Maker

EACH_PROMISE = pytest.mark.parametrize("promise", BACKEND_PROMISES, ids=lambda promise: promise.__name__)


@pytest.fixture(scope="module")
def lender() -> Iterator[LendingProcess]:
    with lending_process(pages=64) as process:
        yield process


@EACH_PROMISE
@pytest.mark.parametrize("reader", MAKERS.values(), ids=MAKERS.keys())
def test_a_reader_keeps_the_contract(reader: Maker, promise: Callable[[Heard], None], lender: LendingProcess) -> None:
    # contract 29, 31, 32, 34, 39, 40, 41, 43, 44, 54, 55, 56, R9, R18
    check_backend_promise(reading_case(reader, lender), promise)


@pytest.mark.parametrize("maker", [manual_case, lending_case], ids=["manual", "lending"])
def test_a_backend_that_waits_for_its_other_side_keeps_the_contract(
    maker: Callable[[], AbstractContextManager[BackendCase]],
) -> None:
    # contract 29, 31, 32, 34, 39, 40, 41, 44, 54, 55, 56
    check_backend(maker)


@EACH_PROMISE
def test_the_local_engines_backend_keeps_the_contract(promise: Callable[[Heard], None]) -> None:
    # contract 29, 31, 34, 39, 40, 41, 44, 54, 55, 56
    check_backend_promise(local_case, promise)


@pytest.mark.parametrize("maker", [pool_case, listed_case], ids=["pool", "listed"])
@pytest.mark.parametrize("promise", LENDER_PROMISES, ids=lambda promise: promise.__name__)
def test_a_lender_keeps_the_contract(
    maker: Callable[[], AbstractContextManager[LenderCase]], promise: Callable[[LenderCase], None]
) -> None:
    # contract 1, 12, 13, 14, 15, 16, 17, 18, 19, 25, 27, 28, 48, P1
    check_lender_promise(maker, promise)


def test_a_lender_is_checked_in_one_call() -> None:
    check_lender(pool_case)
