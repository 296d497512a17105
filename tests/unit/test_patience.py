"""Asking again: what may pass is asked again, what cannot is not, and never for longer than the patience lasts."""

import time

import pytest

from kvbus.bus_access import DeniedError
from kvbus.errors import BusError
from kvbus.events import TransferOutcome, TransferRequested
from kvbus.handles import UNASKED, TransferHandle, Verdict
from kvbus.parts import Prompt
from kvbus.patience import NO_SUCH_STREAM, Staged, staged

REQUEST = TransferRequested(
    request_id="r.1", request_hash="0" * 32, requester="r", source="a", destination="b", prompt=Prompt(text="x")
)


def ended(outcome: str = "settled", failure: str = "") -> TransferOutcome:
    return TransferOutcome.model_validate(
        {
            "transfer": "b-1",
            "request_hash": "0" * 32,
            "source": "a",
            "destination": "b",
            "outcome": outcome,
            "failure": failure,
        }
    )


Answer = Verdict | TransferOutcome | BusError | None


async def asked(*answers: Answer, patience_s: float = 5.0, budget_s: float = 1.0) -> Staged:
    """What comes of a request that is answered so, one try after the other."""
    left = list(answers)

    async def ask() -> TransferHandle:
        handle, answer = TransferHandle(REQUEST), left.pop(0)
        if isinstance(answer, BusError):
            raise answer
        if isinstance(answer, Verdict):
            handle.hear_verdict(answer)
        elif answer is not None:
            handle.hear_verdict(Verdict("accepted", transfer="b-1"))
            handle.hear_outcome(answer)
        return handle

    return await staged(ask, budget_s=budget_s, patience_s=patience_s)


@pytest.mark.parametrize(
    "passing",
    [
        Verdict("refused", "draining: b takes nothing new; ask another instance"),
        Verdict("refused", "bus_unavailable: facts or releases wait for the broker"),
        Verdict("refused", "no instance 'a' is registered: is its worker running?"),
        Verdict("refused", "not_leading: m1 does not lead b now; ask again"),
        Verdict("refused", "waited: 31.0 s in the queue, at most 30 s allowed"),
        Verdict("skipped_busy", "4 transfers are running"),
        ended("failed", "shutdown"),
        ended("cancelled", "shutdown"),
        ended("failed", "contradiction"),  # the members of b have voided it: one of them leaves
        ended("failed", "peer_lost"),
        ended("failed", "engine_lost"),
        ended("failed", "lease_refused"),
        ended("failed", "transport"),
    ],
)
async def test_what_passes_is_asked_again_until_it_settles(passing: Verdict | TransferOutcome) -> None:
    told = await asked(passing, passing, ended())
    assert (told.settled, told.tries) == (True, 3)


@pytest.mark.parametrize(
    "final",
    [
        Verdict("refused", "source 'a' is not among those that 'b' allows (--allow a)"),
        ended("failed", "bad_request"),
        ended("failed", "source_misses"),
        ended("cancelled", "cancelled"),
    ],
)
async def test_what_cannot_pass_is_asked_once(final: Verdict | TransferOutcome) -> None:
    told = await asked(final)
    assert (told.settled, told.tries) == (False, 1)


SILENT = BusError("the broker did not confirm in time; store again with the same id")
LEADERLESS = BusError("no stream answers for this; was ensure_assets run?")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.patience.ASK_PAUSE_S", 0.01)


@pytest.mark.usefixtures("quick")
async def test_a_broker_that_takes_no_request_now_is_asked_again_until_it_does() -> None:
    told = await asked(SILENT, LEADERLESS, Verdict("refused", UNASKED), ended(), patience_s=600.0)
    assert (told.settled, told.tries) == (True, 1)
    told = await asked(Verdict("skipped_busy", "4 run"), LEADERLESS, ended(), patience_s=600.0)
    assert (told.settled, told.tries) == (True, 2)


@pytest.mark.usefixtures("quick")
async def test_a_broker_that_takes_no_request_for_as_long_as_the_patience_says_so_itself() -> None:
    with pytest.raises(BusError, match="did not confirm"):
        await asked(*[SILENT] * 1_000, patience_s=0.2)


@pytest.mark.parametrize("final", [DeniedError("no rights"), BusError("JetStream refused", code=NO_SUCH_STREAM)])
async def test_what_a_broker_will_say_again_is_said_at_once(final: BusError) -> None:
    with pytest.raises(BusError) as raised:
        await asked(final, patience_s=600.0)
    assert raised.value is final


async def test_patience_ends_with_the_last_word_that_was_heard() -> None:
    refused = Verdict("refused", "draining: b takes nothing new")
    began = time.monotonic()
    told = await asked(*[refused] * 20, patience_s=1.5)
    assert (told.verdict, told.outcome, told.settled) == (refused, None, False)
    assert 1 < told.tries < 20
    assert time.monotonic() - began < 60


async def test_a_request_that_is_only_queued_is_waited_for_and_asked_no_more_than_its_patience_lasts() -> None:
    told = await asked(None, patience_s=0.2)
    assert (told.verdict.verdict, told.tries) == ("queued", 1)


async def test_what_was_joined_is_followed_to_the_transfer_that_runs_instead() -> None:
    handle = TransferHandle(REQUEST)
    handle.hear_moved("b-0")  # it has joined nothing yet
    handle.hear_verdict(Verdict("deduped", transfer="b-1"))
    handle.hear_moved("b-2")
    handle.hear_outcome(ended().model_copy(update={"transfer": "b-1"}))
    assert await handle.outcome(0.05) is None
    handle.hear_outcome(ended().model_copy(update={"transfer": "b-2"}))
    found = await handle.outcome(5.0)
    assert found is not None
    assert found.transfer == "b-2"
