"""Whole workers over a real broker: the same deaths, where the reader's word and the facts travel over the bus.

The workers are those of the flow tests' town; pages are compared with what the toy engine computes for their prompt.
"""

import asyncio
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.chaos_data.house import FaultError
from bench.chaos_data.table import Row
from kvbus.commands.audit import audit_log, lines
from kvbus.commands.auditing import Audit, Verdict
from kvbus.engines.toy import ToyEngine
from kvbus.errors import KvbusError
from kvbus.events import LeaseGranted, OutcomeFixed, TransferOutcome
from kvbus.publisher import TransferHandle
from tests.flow.pool_eye import PoolEye, eye_on
from tests.flow.town import BLOCK, FAST, PAGE_BYTES, TOPICS, Town, prompt, town
from tests.waiting import until

BLOCKS = 36
RATE_BYTES_S = 4 << 20
"""Half a second for the 36 pages of 64 KiB."""
EVIDENCE_S = 60.0
RERUN_S = 120.0
"""The broker offers a dead worker's request again after ten seconds; several may wait for their turn then."""
DESTINATIONS = 5
HEAD_BYTES = 64

Scene = Callable[[Town, Row, random.Random, int], Awaitable[None]]


def source_killed(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """The source's worker is killed at a random moment, and comes back under its name in a new epoch."""
    _play(_source_killed, row, chance, rounds, plant)


def destination_killed(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """The destination's worker is killed at a random moment; its successor runs each request to its end."""
    _play(_destination_killed, row, chance, rounds, plant)


def _play(scene: Scene, row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    row.note = "" if not plant else "plants do not reach whole workers"
    try:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            asyncio.run(_staged(scene, Path(folder), row, chance, rounds))
    except (AssertionError, KvbusError, OSError, TimeoutError) as error:
        row.problems.append(f"{type(error).__name__}: {error}")


async def _staged(scene: Scene, folder: Path, row: Row, chance: random.Random, rounds: int) -> None:
    async with town(folder) as pair:
        await pair.start("a", backend=row.transport)
        await scene(pair, row, chance, rounds)
        await _rest(pair, row)
        result = await _audited(pair)
        row.audits += 1
        if result.verdict is not Verdict.CLEAN:
            row.audits_unclean += 1
            row.problems.append(f"audit {result.verdict.value}: " + "; ".join(list(lines(result))[:3]))
        row.aborted += sum(not worker.alive for worker in pair.workers.values())
        workers = list(pair.workers.values())
    row.check(all(worker.process.returncode == 0 for worker in workers), "a worker did not end in order")


async def _audited(pair: Town) -> Audit:
    """The audit once it is not incomplete any more: the last facts may still be on their way."""
    found: list[Audit] = []

    async def is_whole() -> bool:
        found.append((await audit_log(pair.bus, TOPICS))[1])
        return found[-1].verdict is not Verdict.INCOMPLETE

    with suppress(AssertionError):  # what it says then is the row's to tell
        await until(is_whole, EVIDENCE_S)
    return found[-1]


async def _start_readers(pair: Town, row: Row, *names: str) -> None:
    chosen = {"allow": ["a"], "backend": row.transport, "rate_limit_bytes_s": RATE_BYTES_S}
    await asyncio.gather(*(pair.start(name, **chosen) for name in names))  # type: ignore[arg-type]


async def _source_killed(pair: Town, row: Row, chance: random.Random, rounds: int) -> None:
    await _start_readers(pair, row, "b")
    for number in range(rounds):
        ids = prompt(f"{row.fault} {row.transport} {number}", BLOCKS)
        handle, transfer = await _moment(pair, "b", ids, chance)
        old, killed_ns = pair.registered["a"].epoch, _kill(pair, "a")
        outcome = await handle.outcome(EVIDENCE_S)
        row.check(outcome is not None, "no outcome came")
        await _evidence(pair, row, "b", transfer, killed_ns)
        await pair.start_again("a")
        row.check(pair.registered["a"].epoch != old, "the new run has the epoch of the old one")
        row.bytes_wrong += await _wrong_bytes(pair, "b", ids)
        fresh = prompt(f"{row.fault} {row.transport} {number} again", BLOCKS // 4)
        again = await pair.stage(fresh)
        row.check(again.outcome == "settled", f"the new run did not serve: {again}")
        row.bytes_wrong += await _wrong_bytes(pair, "b", fresh, blocks=BLOCKS // 4)
        row.runs += 1


async def _destination_killed(pair: Town, row: Row, chance: random.Random, rounds: int) -> None:
    """Several destinations take turns: the broker offers a request again after ten seconds, and three times at most."""
    names = [f"b{number}" for number in range(min(rounds, DESTINATIONS))]
    await _start_readers(pair, row, *names)
    asked: list[tuple[str, list[int], str]] = []
    for number in range(rounds):
        name = names[number % len(names)]
        ids = prompt(f"{row.fault} {row.transport} {number}", BLOCKS)
        handle, transfer = await _moment(pair, name, ids, chance)
        killed_ns = _kill(pair, name)
        await _evidence(pair, row, "a", transfer, killed_ns)
        row.bytes_wrong += await _wrong_bytes(pair, "a", ids, blocks=BLOCKS)
        await pair.start_again(name)
        asked.append((name, ids, handle.request_hash))
        row.runs += 1
    for name, ids, request_hash in asked:
        await until(partial(_settled, pair, name, request_hash), RERUN_S, what="a successor runs it to its end")
        row.bytes_wrong += await _wrong_bytes(pair, name, ids)


async def _settled(pair: Town, name: str, request_hash: str) -> bool:
    """Whether a destination's facts say that a request has settled."""
    bodies = [event.body for event in await pair.events(name)]
    ours = [body for body in bodies if isinstance(body, TransferOutcome) and body.request_hash == request_hash]
    return any(body.outcome == "settled" for body in ours)


async def _moment(pair: Town, name: str, ids: list[int], chance: random.Random) -> tuple[TransferHandle, str]:
    """Begin a transfer, and wait until a random number of its rows has begun to arrive, or it has ended."""
    heads = [page[:HEAD_BYTES] for page in _expected(ids, PAGE_BYTES)]
    eye = await eye_on(pair, name)
    handle = await pair.ask(ids, destination=name)
    verdict = await handle.verdict(EVIDENCE_S)
    if verdict.verdict != "accepted":
        raise FaultError(f"a request was not taken on: {verdict}")
    pages, wanted = await eye.pages_of(verdict.transfer), chance.randrange(1, BLOCKS)

    def begun() -> bool:
        rows = zip(pages, heads, strict=True)
        return sum(eye.page(page)[:HEAD_BYTES] == head.tobytes() for page, head in rows) >= wanted

    await until(begun, EVIDENCE_S, what=f"{wanted} rows begin to arrive")
    return handle, verdict.transfer


def _kill(pair: Town, name: str) -> int:
    """End a worker as a power cut would; return when that was."""
    killed_ns = time.time_ns()
    pair.workers[name].signal(signal.SIGKILL)
    pair.workers[name].kill()
    return killed_ns


async def _evidence(pair: Town, row: Row, name: str, transfer: str, since_ns: int) -> None:
    """Wait until an instance's facts say how access to a transfer's lease ended, and count it."""
    found: list[tuple[str, int]] = []

    async def reported() -> bool:
        events = await pair.events(name)
        bodies = [event.body for event in events]
        tickets = {body.ticket for body in bodies if isinstance(body, LeaseGranted) and body.transfer == transfer}
        epochs = {e.header.e for e in events if isinstance(e.body, LeaseGranted) and e.body.transfer == transfer}
        found[:] = [
            (event.body.evidence, event.header.t)
            for event in events
            if isinstance(event.body, OutcomeFixed) and event.body.ticket in tickets and event.header.e in epochs
        ]
        return bool(found)

    await until(reported, EVIDENCE_S, what=f"{name} reports how access to {transfer} ended")
    evidence, at_ns = found[0]
    row.ended(evidence, since_ns / 1e9, at_ns / 1e9)


async def _rest(pair: Town, row: Row) -> None:
    """All pages must come back at the instances that live."""
    try:
        await pair.at_rest()
    except AssertionError as error:
        row.problems.append(str(error))
        for name in pair.workers:
            counters = await pair.stats(name)
            out = counters["pages"] - counters["pages_free"] - counters["pages_cached"]
            row.pages_leaked += max(out, counters["pages_lent"])


async def _wrong_bytes(pair: Town, name: str, ids: list[int], *, blocks: int = 0) -> int:
    """Count the bytes of a held prompt that are not what the engine computes; at least so many blocks must be held."""
    held = await pair.held(name, ids)
    if held < blocks:
        raise FaultError(f"{name} holds {held} of {blocks} blocks")
    if not held:
        return 0
    with pair.workers[name].client() as client:
        where = client.where(ids)
    eye, expected = PoolEye(pair, name, where, ()), _expected(ids, where.page_bytes)
    found = [np.frombuffer(eye.page(page), dtype=np.uint8) for page in where.pages]
    return sum(int(np.count_nonzero(one != other)) for one, other in zip(found, expected, strict=False))


def _expected(ids: list[int], page_bytes: int) -> list[NDArray[np.uint8]]:
    """Return the pages of a prompt's whole blocks as the engine computes them."""
    engine = ToyEngine.load(FAST)
    run = engine.resume(ids, [], lambda: False)
    run.prefill()
    pages = [np.zeros(page_bytes, dtype=np.uint8) for _ in range(len(ids) // BLOCK)]
    run.export(0, [page.reshape(engine.describe().layout.shape) for page in pages])
    return pages
