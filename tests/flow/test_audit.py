"""The audit of what whole workers recorded: clean when all went as it should, and no changed record fools it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.commands.audit import audit_log, lines
from kvbus.commands.auditing import Audit, Verdict, audit
from kvbus.commands.recordings import Record, read_record, write_record
from kvbus.commands.rules import Rule
from kvbus.events import Event
from tests.flow.command_line import kvbus
from tests.flow.pool_eye import eye_on
from tests.flow.town import OUTCOME_S, REST_S, TOPICS, Town, prompt, town
from tests.tampering import Copy, evidence_of, frame_of, id_in, returns, with_frames
from tests.waiting import until

pytestmark = pytest.mark.slow
in_town = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 24
RATE_BYTES_S = 300_000
"""Five seconds for the transfers that are caught midway, and none of them is waited for to its end."""
DEMO_S = 250.0


@pytest.fixture(scope="module")
def recording(folder: Path) -> Path:
    """What `kvbus demo` recorded."""
    path = folder / "demo.kvbus"
    ran = kvbus("demo", "--backend", "memory", "--record", str(path), state=folder, deadline_s=DEMO_S)
    assert ran.returncode == 0, ran
    assert "audit of all facts" in ran.stdout
    return path


@pytest.fixture(scope="module")
def record(recording: Path) -> Record:
    return read_record(recording)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(running.start("a"), running.start("b", allow=["a"], rate_limit_bytes_s=RATE_BYTES_S))
        yield running


def told(result: Audit) -> str:
    return "\n".join(lines(result))


# --------------------------------------------------------------------------------------------- the demo's recording


def test_the_demo_records_a_run_from_its_first_lease_and_it_is_clean(recording: Path, folder: Path) -> None:
    ran = kvbus("audit", str(recording), state=folder)

    assert ran.returncode == 0, ran
    assert ran.stdout.splitlines()[1] == "clean"
    assert kvbus("story", "T1@b", "--file", str(recording), state=folder).returncode == 0


def test_each_return_that_stands_twice_is_named(record: Record) -> None:
    for event in returns(record):
        twice = Copy.of(record).with_second(event).record()
        result = audit(twice)
        assert result.first is not None, told(result)
        assert (result.verdict, result.first.rule) == (Verdict.REFUTED, Rule.RETURNED_ONCE)
        assert result.first.event.header.event_id == id_in(twice, event)

        frame = frame_of(record, event)
        assert f"event {event.header.event_id}" in told(audit(with_frames(record, [*record.stored, frame])))


def test_each_return_that_is_missing_is_named_by_its_lease(record: Record) -> None:
    for event in returns(record):
        result = audit(Copy.of(record).without(event).record())
        lease = returned_by(event)
        assert result.verdict is not Verdict.CLEAN
        assert f"the return of {lease} is missing" in told(result) or f"before the return of {lease}," in told(result)

        frame = frame_of(record, event)
        result = audit(with_frames(record, [one for one in record.stored if one != frame]))
        assert result.verdict is Verdict.INCOMPLETE
        assert lease in told(result)


def test_each_return_that_stands_before_its_evidence_is_named(record: Record) -> None:
    for event in returns(record):
        copy = Copy.of(record)
        moved = copy.moved(event, evidence_of(copy.events, event)).record()
        result = audit(moved)
        assert result.first is not None, told(result)
        assert (result.verdict, result.first.rule) == (Verdict.REFUTED, Rule.EVIDENCE)
        assert result.first.event.header.event_id == id_in(moved, event)

        frame = frame_of(record, event)
        rest = [one for one in record.stored if one != frame]
        place = evidence_of([one.event() for one in rest], event)
        result = audit(with_frames(record, [*rest[:place], frame, *rest[place:]]))
        assert result.verdict is Verdict.INCOMPLETE
        assert f"event {event.header.event_id}" in told(result)


def test_a_recording_that_was_cut_off_proves_nothing(recording: Path, folder: Path) -> None:
    cut = folder / "cut.kvbus"
    cut.write_bytes(recording.read_bytes()[:-100])
    ran = kvbus("audit", str(cut), state=folder)

    assert ran.returncode == 3, ran
    assert "cut off" in ran.stdout


def returned_by(event: Event) -> str:
    result = audit(Copy([event]).record())
    return str(next(one.lease for one in (*result.offences, *result.unproven)))


# ------------------------------------------------------------------------------------------------------ a busy town


@in_town
async def test_what_went_well_was_cancelled_and_died_is_clean_and_what_is_out_is_explained(pair: Town) -> None:
    eye = await eye_on(pair, "b")
    assert (await pair.stage(prompt("well", 4))).outcome == "settled"
    assert (await pair.stage(prompt("fails", 4), on_miss="fail")).outcome == "failed"
    ids = prompt("cancelled", BLOCKS)
    handle = await pair.ask(ids)
    await eye.until_row((await handle.verdict()).transfer, 4)
    assert await pair.publisher.cancel(handle.request_hash, "b")
    outcome = await handle.outcome(OUTCOME_S)
    assert outcome is not None
    assert outcome.outcome == "cancelled"
    os.kill(pair.workers["b"].engine_pid(), signal.SIGKILL)
    await pair.answer("a", prompt("stored", 3), store=True)

    _, result = await audited_at_rest(pair)
    assert (result.verdict, result.out) == (Verdict.CLEAN, ()), told(result)

    eye = eye.anew()
    handle = await pair.ask(prompt("source dies", BLOCKS))
    await eye.until_row((await handle.verdict()).transfer, 4)
    pair.workers["a"].kill()
    assert await handle.outcome(OUTCOME_S) is not None
    await pair.start_again("a")
    await pair.answer("a", prompt("successor", 2), store=True)
    record, result = await audited_at_rest(pair)
    assert result.verdict is Verdict.CLEAN, told(result)
    assert [(out.life.key.instance, out.life.direction) for out in result.out] == [("a", "read")]
    assert result.out[0].why == "a/m0 has run anew since, with an empty pool"
    write_record(pair.folder / "town.kvbus", record)
    assert audit(read_record(pair.folder / "town.kvbus")).verdict is Verdict.CLEAN


async def audited_at_rest(pair: Town) -> tuple[Record, Audit]:
    """The audit of what was recorded, once nothing of the living is out there; last returns may come a bit later."""
    await pair.at_rest()
    found: list[tuple[Record, Audit]] = []

    async def whole() -> bool:
        found.append(await audit_log(pair.bus, TOPICS))
        return all("has run anew" in out.why for out in found[-1][1].out)

    await until(whole, REST_S, what="all returns are recorded")
    return found[-1]


@in_town
async def test_watch_records_while_it_runs_until_it_is_told_to_end(pair: Town) -> None:
    path = pair.folder / "watched.kvbus"
    watching = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvbus", "watch", "--json", "--nats", pair.broker.url, "--record", str(path)),
        env={**os.environ, "KVBUS_NATS_TOKEN": pair.broker.token},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert watching.stdout is not None
        await watching.stdout.readline()  # it shows history: it is connected, and records
        transfer = (await pair.stage(prompt("watched", 3))).transfer
        await audited_at_rest(pair)
    finally:
        watching.send_signal(signal.SIGINT)
        await watching.communicate()
    await until(lambda: watching.returncode is not None, what="watch has ended")

    record = read_record(path)
    assert watching.returncode == 0
    assert audit(record).verdict is Verdict.CLEAN, told(audit(record))
    assert transfer in {getattr(event.body, "transfer", "") for event in record.events()}
