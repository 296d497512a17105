"""Questions that no honest reader asks: a source refuses them, keeps no lease for them, and goes on lending."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.engines.toy import ToyEngine
from kvbus.events import LeaseReleased, LendAnswered, LendRequested, ReaderKey, decode
from kvbus.names import page_names, token_bytes
from kvbus.parts import Body
from kvbus.processes import identity
from kvbus.topics import Command
from kvbus.transport import NoAnswer
from tests.flow.town import ANSWER_S, FAST, TOPICS, Town, prompt, town
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_SUBJECT = TOPICS.command("a", Command.LEASE, "m0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crowd(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await running.start("a")
        yield running


def key_of_tester(transfer: str, *, epoch: int = 77) -> ReaderKey:
    return ReaderKey(instance="tester", member="m0", epoch=epoch, transfer=transfer, attempt=1, rank=0)


def question(crowd: Town, ids: list[int], **changed: object) -> LendRequested:
    """A question of a reader that is this test's own process."""
    fields: dict[str, object] = {
        "key": key_of_tester(f"t-{time.time_ns()}"),
        "nonce": b"n" * 16,
        "fingerprint": crowd.registered["a"].record.fingerprint,
        "names": b"m" * 16 + b"n" * 16,
        "first_block": 0,
        "tokens": token_bytes(ids),
        "on_miss": "prefill",
        "budget_s": 60.0,
        "wait_s": 0.5,
        "process": identity(),
        "transports": ("ucx",),
    }
    return LendRequested.model_validate(fields | changed)


async def asked(
    crowd: Town, body: Body, speaker: str = "tester", *, wait_s: float = ANSWER_S
) -> LendAnswered | NoAnswer:
    """What source a says to a message on its lease subject."""
    data = await crowd.bus.request(
        LEASE_SUBJECT, crowd.encoded(body, speaker=speaker, member="m0", epoch=77), wait_s=wait_s
    )
    if isinstance(data, NoAnswer):
        return data
    answer = decode(data).body
    assert isinstance(answer, LendAnswered)
    return answer


async def until_decided(crowd: Town, body: LendRequested) -> LendAnswered | NoAnswer:
    """The source's last word: a question is repeated while it says that it computes."""
    answers: list[LendAnswered | NoAnswer] = []

    async def decided() -> bool:
        answers.append(await asked(crowd, body))
        last = answers[-1]
        return isinstance(last, NoAnswer) or last.status != "computing"

    await until(decided, what="the source decides")
    return answers[-1]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fingerprint": "another"}, "layout fingerprints differ"),
        ({"names": b""}, "whole names of 16 bytes"),
        ({"names": b"n" * 17}, "whole names of 16 bytes"),
        ({"names": b"n" * 32}, "stands twice"),
        ({"tokens": b"\x01\x00\x00"}, "multiple of 4"),
        ({"tokens": b""}, "a"),
        ({"first_block": 2**62}, ""),
        ({"on_miss": "fail"}, "a holds 0 of the 2 blocks"),
        ({"tokens": token_bytes([4_000_000] * 64)}, "4000000"),
        (
            {"process": identity().model_copy(update={"start_ticks": 1}), "key": key_of_tester("gone", epoch=78)},
            "not on this host any more",
        ),
    ],
)
async def test_a_bad_question_is_refused_and_leaves_nothing_lent(
    crowd: Town, changed: dict[str, object], words: str
) -> None:
    body = question(crowd, prompt("question", 2), **changed)

    answer = await until_decided(crowd, body)

    assert isinstance(answer, LendAnswered)
    assert answer.status == "refused"
    assert words in answer.reason
    await crowd.at_rest("a")


async def test_names_that_the_tokens_do_not_have_are_refused_after_the_prefill(crowd: Town) -> None:
    answer = await until_decided(crowd, question(crowd, prompt("others", 2)))

    assert isinstance(answer, LendAnswered)
    assert (answer.status, answer.failure) == ("refused", "lease_refused")
    await crowd.at_rest("a")


async def test_a_question_in_anothers_name_is_not_answered(crowd: Town) -> None:
    assert isinstance(await asked(crowd, question(crowd, [1]), speaker="somebody", wait_s=0.5), NoAnswer)
    await crowd.at_rest("a")


@pytest.mark.parametrize("member", ["", "m1"])
async def test_a_question_reaches_only_the_member_that_it_names(crowd: Town, member: str) -> None:
    data = crowd.encoded(question(crowd, [1]), speaker="tester", member="m0", epoch=77)
    answer = await crowd.bus.request(TOPICS.command("a", Command.LEASE, member), data, wait_s=ANSWER_S)
    assert answer == NoAnswer("nobody_listens")


@pytest.mark.contract("P18")
async def test_a_repeated_question_lends_once_and_only_its_nonce_ends_the_lease(crowd: Town) -> None:
    ids = prompt("repeated", 2)
    await crowd.answer("a", ids, store=True)
    layout_names = await names_at_source(crowd, ids)
    body = question(crowd, ids, names=layout_names)
    first, second = await asked(crowd, body), await asked(crowd, body)
    assert isinstance(first, LendAnswered)
    assert first.status == "granted"
    assert second == first
    assert (await crowd.stats("a"))["leases_held"] == 1

    stranger = await asked(crowd, body.model_copy(update={"nonce": b"x" * 16}))
    assert isinstance(stranger, LendAnswered)  # the grant would hand it the nonce that ends the lease
    assert (stranger.status, stranger.grant) == ("refused", b"")

    for nonce, held in ((b"x" * 16, 1), (b"n" * 16, 0)):
        released = LeaseReleased(key=body.key, nonce=nonce)
        await crowd.bus.request(LEASE_SUBJECT, crowd.encoded(released, speaker="tester"), wait_s=ANSWER_S)
        assert (await crowd.stats("a"))["leases_held"] == held

    far = question(crowd, ids, names=layout_names, first_block=2**62)
    misplaced = await asked(crowd, far)
    assert isinstance(misplaced, LendAnswered)
    assert (misplaced.status, misplaced.failure) == ("refused", "bad_request")

    late = await asked(crowd, body)  # a repeat that was long under way lends nothing
    assert isinstance(late, LendAnswered)
    assert late.status == "refused"
    await crowd.at_rest("a")


@pytest.mark.contract("P4, P6")
async def test_an_epoch_is_one_process_for_good(crowd: Town) -> None:
    # Else a second question could name another process, whose death would end what the first one still reads.
    ids = prompt("one process", 2)
    await crowd.answer("a", ids, store=True)
    names = await names_at_source(crowd, ids)
    reader = question(crowd, ids, names=names, key=key_of_tester("first", epoch=79))
    first = await asked(crowd, reader)
    assert isinstance(first, LendAnswered)
    assert first.status == "granted"

    for other in ({"pid": 1}, {"boot_id": "of another host"}):
        changed = reader.process.model_copy(update=other)
        again = await asked(
            crowd, question(crowd, ids, names=names, key=key_of_tester("second", epoch=79), process=changed)
        )
        assert isinstance(again, LendAnswered)
        assert (again.status, again.failure) == ("refused", "grant_refused")
        assert "another process before" in again.reason

    released = LeaseReleased(key=reader.key, nonce=reader.nonce)
    await crowd.bus.request(LEASE_SUBJECT, crowd.encoded(released, speaker="tester"), wait_s=ANSWER_S)
    await crowd.at_rest("a")


@pytest.mark.contract("P18")
async def test_a_question_for_another_run_of_the_source_lends_nothing(crowd: Town) -> None:
    ids = prompt("another run", 2)
    await crowd.answer("a", ids, store=True)
    epoch = crowd.registered["a"].epoch
    answer = await asked(crowd, question(crowd, ids, names=await names_at_source(crowd, ids), source_epoch=epoch + 1))
    assert isinstance(answer, LendAnswered)
    assert (answer.status, answer.failure) == ("refused", "peer_lost")
    await crowd.at_rest("a")


async def names_at_source(crowd: Town, ids: list[int]) -> bytes:
    """The names of a prompt's blocks, as the toy's layout makes them."""
    layout = ToyEngine.load(FAST).describe().layout
    return b"".join(page_names(layout.namespace(""), ids, layout.block_tokens))
