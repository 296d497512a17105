"""The logs of a running cluster: JSON that a program reads, ids in it, and never a prompt."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.flow.town import Town, as_text, prompt, town
from tests.waiting import until

MARKER = "zebracrossing"
"""Stands in each prompt here; no word of ours."""
LOUD = ["--log", "json", "--log-level", "debug"]
GATEWAY_S = 100.0


@pytest.fixture
async def loud(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as built:
        quick = json.dumps({"work_rounds": 1})
        for name, allow in (("a", []), ("b", ["--allow", "a"])):
            arguments = ["--instance", name, "--engine-options", quick, "--backend", "socket", *allow]
            await built.start_again(name, [*arguments, *LOUD])
        yield built


def lines_of(log: Path) -> list[dict[str, object]]:
    """The lines of a log, each a document."""
    return [json.loads(line) for line in log.read_text().splitlines()]


async def over_http(loud: Town, text: str) -> Path:
    """Ask a gateway of its own for a transfer, in good words and in bad ones; return its log."""
    log = loud.folder / "gateway.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvbus", "gateway", "--source-allow", "a", "--json", *LOUD),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, "KVBUS_NATS_URL": loud.broker.url, "KVBUS_NATS_TOKEN": loud.broker.token},
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(GATEWAY_S):
            url = json.loads(await process.stdout.readline())["url"]
        door = f"{url}/instances/b/v1/kv_transfer"
        async with httpx.AsyncClient(timeout=60) as client:
            good = await client.post(door, json={"source": "a", "prompt": text})
            assert good.status_code == 202, good.text
            ended = await client.get(f"{door}/{good.json()['request_hash']}?wait_s=20")
            assert ended.json()["status"] == "transferred", ended.text
            for body in ({"source": "nobody", "prompt": text}, {"source": "a", "prompt": [MARKER]}):
                answer = await client.post(door, json=body)
                assert answer.status_code in {400, 403}, answer.text
    finally:
        process.terminate()
        async with asyncio.timeout(GATEWAY_S):
            await process.wait()
    return log


async def test_each_line_is_a_document_with_its_ids_and_none_holds_a_prompt(loud: Town) -> None:
    text = MARKER + as_text(prompt("logs", 3))
    settled = await loud.stage(text)
    failed = await loud.stage(MARKER + as_text(prompt("missing", 2)), on_miss="fail")
    assert (settled.outcome, failed.outcome) == ("settled", "failed")
    b, a = loud.workers["b"].log, loud.workers["a"].log
    await until(lambda: any("went back" in str(line["event"]) for line in lines_of(a)), what="a took its lease back")
    gateway = await over_http(loud, MARKER + as_text(prompt("http", 2)))

    told = lines_of(b)
    of_settled = [line for line in told if line.get("transfer") == settled.transfer]
    assert {"transfer", "cause", "request_hash", "timestamp", "level", "logger", "event"} <= set(of_settled[0])
    assert len({line["cause"] for line in of_settled if "cause" in line}) == 1
    assert any("ticket" in line for line in of_settled)
    assert any("ticket" in line for line in lines_of(a) if line.get("transfer") == settled.transfer), "on both sides"
    (told_failed,) = (line for line in told if line.get("transfer") == failed.transfer and line["level"] == "info")
    assert "source_misses" in str(told_failed["event"])

    ids = ", ".join(map(str, MARKER.encode()))
    for log in (a, b, gateway):
        said = log.read_text()
        assert MARKER not in said, log
        assert ids not in said, log
        assert MARKER.encode().hex() not in said, log
    (told_here,) = (line for line in lines_of(gateway) if line["logger"] == "kvbus.gateway.runs")
    assert str(told_here["event"]).startswith("transferred")
    assert {"transfer", "request_hash", "cause"} <= set(told_here)
