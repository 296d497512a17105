"""Traces of real transfers: one trace on both sides, each step below the one that led to it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvbus import tracing
from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.config import TransferLimits, WorkerSettings
from kvbus.events import TransferOutcome
from kvbus.gateway.serving import running, served
from kvbus.gateway.settings import checked_gateway_settings
from kvbus.publisher import Publisher
from kvbus.topics import Topics
from kvbus.worker import Worker
from tests.flow.command_line import kvbus
from tests.flow.town import OUTCOME_S, READY_S, Town, as_text, prompt, town
from tests.waiting import until

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"
EXPORTS = {"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_SCHEDULE_DELAY": "50"}
DESTINATION = ("kvbus.admit", "kvbus.transfer", "kvbus.lease", "kvbus.read", "kvbus.settle")

_MEMORY = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def _provider() -> Iterator[None]:
    """Spans of this process go to memory; a provider can be set once, so it stays, and keeps nothing afterwards."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_MEMORY))
    trace.set_tracer_provider(provider)
    yield
    _MEMORY.shutdown()
    _MEMORY.clear()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    _MEMORY.clear()
    yield _MEMORY
    _MEMORY.clear()


@asynccontextmanager
async def worker(folder: Path, broker: EmbeddedBroker, name: str, allow: tuple[str, ...]) -> AsyncIterator[Worker]:
    """A whole worker in this process, its engine in another one."""
    bus = await NatsBus.connect(broker.url, name=name, token=broker.token, limits=EMBEDDED)
    settings = WorkerSettings(
        instance=name,
        nats_url=broker.url,
        nats_token=broker.token,
        engine_options={"work_rounds": 1},
        backend="socket",
        run_dir=folder,
        limits=TransferLimits(source_allow=allow),
    )
    ready = asyncio.Event()
    made = Worker(settings, bus, lambda _text: ready.set())
    task = asyncio.ensure_future(made.run())
    try:
        await asyncio.wait(
            {task, (waits := asyncio.ensure_future(ready.wait()))}, timeout=READY_S, return_when="FIRST_COMPLETED"
        )
        waits.cancel()
        assert ready.is_set(), task
        yield made
    finally:
        made.stop()
        await task
        await bus.close()


@pytest.fixture
async def pair(folder: Path, broker: EmbeddedBroker) -> AsyncIterator[NatsBus]:
    """Two workers, a and b, and a bus for who asks."""
    async with AsyncExitStack() as ends:
        bus = await NatsBus.connect(broker.url, name="tester", token=broker.token, limits=EMBEDDED)
        ends.push_async_callback(bus.close)
        await bus.ensure_assets()
        await ends.enter_async_context(worker(folder, broker, "a", ()))
        await ends.enter_async_context(worker(folder, broker, "b", ("a",)))
        yield bus


async def stage(
    bus: NatsBus, ids: Sequence[int], traceparent: str | None, *, on_miss: str = "prefill"
) -> TransferOutcome:
    """Bring a prompt from a to b on behalf of a caller."""
    async with Publisher(bus=bus) as publisher:
        with tracing.within(traceparent):
            handle = await publisher.transfer(source="a", destination="b", prompt=ids, on_miss=on_miss)  # type: ignore[arg-type] # one of its words
        outcome = await handle.outcome(OUTCOME_S)
    assert outcome is not None
    return outcome


def named(exporter: InMemorySpanExporter) -> set[str]:
    """The names of the spans that have ended."""
    return {span.name for span in exporter.get_finished_spans()}


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """The spans that have ended; each name once."""
    found = exporter.get_finished_spans()
    names = [span.name for span in found]
    assert len(set(names)) == len(names), names
    return {span.name: span for span in found}


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Trace, own and parent's id in hexadecimal; a parent that is none is empty."""
    context = span.get_span_context()
    assert context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent else ""
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", parent


def told(span: ReadableSpan) -> Mapping[str, object]:
    return dict(span.attributes or {})


async def test_a_transfer_is_one_trace_on_both_sides_with_each_step_below_its_cause(
    pair: NatsBus, spans: InMemorySpanExporter
) -> None:
    outcome = await stage(pair, prompt("traced", 3), CALLER)
    assert outcome.outcome == "settled"
    await until(lambda: named(spans) >= {"kvbus.lend", *DESTINATION}, what="both sides have ended")

    found = by_name(spans)
    assert set(found) == {"kvbus.request", "kvbus.lend", *DESTINATION}
    at = {name: ids(span) for name, span in found.items()}
    assert {one[0] for one in at.values()} == {TRACE}
    parents = {name: one[2] for name, one in at.items()}
    assert parents == {
        "kvbus.request": "b7ad6b7169203331",
        "kvbus.admit": at["kvbus.request"][1],
        "kvbus.transfer": at["kvbus.request"][1],
        "kvbus.lease": at["kvbus.transfer"][1],
        "kvbus.read": at["kvbus.transfer"][1],
        "kvbus.settle": at["kvbus.transfer"][1],
        "kvbus.lend": at["kvbus.lease"][1],
    }
    assert (found["kvbus.request"].kind, found["kvbus.transfer"].kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)

    whole, lent = told(found["kvbus.transfer"]), told(found["kvbus.lend"])
    assert (whole["kvbus.instance"], lent["kvbus.instance"]) == ("b", "a")
    assert whole["kvbus.transfer"] == lent["kvbus.transfer"] == outcome.transfer
    assert (whole["kvbus.pages"], whole["kvbus.bytes"]) == (3, outcome.length_bytes)
    assert (lent["kvbus.pages"], lent["kvbus.bytes"]) == (3, outcome.length_bytes)
    assert (whole["kvbus.outcome"], lent["kvbus.outcome"]) == ("settled", "returned")
    assert whole["kvbus.evidence"] == ("completed",)
    assert told(found["kvbus.read"])["kvbus.evidence"] == ("completed",)
    assert lent["kvbus.evidence"] == ("peer_ack",)
    assert told(found["kvbus.admit"])["kvbus.verdict"] == "accepted"
    assert all(span.status.status_code is not StatusCode.ERROR for span in found.values())
    steps = [event.name for event in found["kvbus.transfer"].events]
    assert steps[:4] == ["accepted", "resolved", "leased", "asking"]
    assert not any(as_text(prompt("traced", 3))[:8] in span.to_json() for span in found.values())


async def test_a_transfer_that_fails_is_an_error_and_says_why_on_both_sides(
    pair: NatsBus, spans: InMemorySpanExporter
) -> None:
    outcome = await stage(pair, prompt("missing", 2), CALLER, on_miss="fail")
    assert outcome.outcome == "failed"
    await until(lambda: named(spans) >= {"kvbus.transfer", "kvbus.lend"}, what="both sides have ended")

    found = by_name(spans)
    for name in ("kvbus.transfer", "kvbus.lend"):
        assert found[name].status.status_code is StatusCode.ERROR, name
        assert "a holds 0 of the 2 blocks" in str(found[name].status.description)
        assert told(found[name])["kvbus.failure"] == "source_misses"


async def test_a_malformed_traceparent_fails_no_request_and_belongs_to_no_trace(
    pair: NatsBus, spans: InMemorySpanExporter
) -> None:
    for traceparent in ("garbage", f"00-{'0' * 32}-b7ad6b7169203331-01", f"ff{CALLER[2:]}"):
        spans.clear()
        outcome = await stage(pair, prompt(traceparent, 1), traceparent)

        assert outcome.outcome == "settled", traceparent
        await until(lambda: named(spans) >= {"kvbus.lend", *DESTINATION}, what="both sides have ended")
        found = by_name(spans)
        assert ids(found["kvbus.request"])[2] == "", "the first of a trace of its own"
        assert len({ids(span)[0] for span in found.values()}) == 1
        assert ids(found["kvbus.request"])[0] not in {TRACE, "0" * 32}


async def test_a_caller_over_http_finds_its_trace_on_both_sides(pair: NatsBus, spans: InMemorySpanExporter) -> None:
    settings = checked_gateway_settings(source_allow="a", instances=("b",))
    async with (
        running(settings, pair, Topics()) as parts,
        served(parts) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        body = {"source": "a", "prompt": as_text(prompt("http", 2))}
        answer = await client.post(f"{url}/v1/kv_transfer", json=body, headers={"traceparent": CALLER})
        assert answer.status_code == 202, answer.text
        wanted = f"{url}/v1/kv_transfer/{answer.json()['request_hash']}?wait_s=20"
        looked = await client.get(wanted, headers={"traceparent": "malformed"})
        assert looked.json()["status"] == "transferred", looked.text
        await until(lambda: named(spans) >= {"kvbus.lend", *DESTINATION}, what="both sides have ended")

    found = by_name(spans)
    post, get = found["HTTP POST"], found["HTTP GET"]
    assert ids(post)[::2] == (TRACE, "b7ad6b7169203331")
    assert ids(found["kvbus.request"])[::2] == (TRACE, ids(post)[1])
    assert {ids(found[name])[0] for name in ("kvbus.lend", *DESTINATION)} == {TRACE}
    assert (told(post)["http.route"], told(post)["http.response.status_code"]) == ("/v1/kv_transfer", 202)
    assert told(get)["http.route"] == "/v1/kv_transfer/{request_hash}"
    assert ids(get)[2] == "", "a malformed header is as good as none"


# ------------------------------------------------------------------------------------------------ between processes


@pytest.fixture
async def processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Town]:
    for name, value in EXPORTS.items():
        monkeypatch.setenv(name, value)
    async with town(folder) as built:
        await built.start("a")
        await built.start("b", allow=("a",))
        yield built


def printed(log: Path) -> list[dict[str, object]]:
    """The spans that a worker printed among its other lines."""
    text, decoder, found = log.read_text(), json.JSONDecoder(), []
    place = text.find('{\n    "name"')
    while place >= 0:
        try:
            span, length = decoder.raw_decode(text[place:])
        except ValueError:  # it is being written
            break
        found.append(span)
        place = text.find('{\n    "name"', place + length)
    return found


@pytest.mark.slow
async def test_workers_that_are_told_to_export_spans_do_and_stage_begins_the_trace(processes: Town) -> None:
    here = {"KVBUS_NATS_URL": processes.broker.url, "KVBUS_NATS_TOKEN": processes.broker.token}
    environment = {**here, "TRACEPARENT": CALLER, "OTEL_TRACES_EXPORTER": "none"}
    text = as_text(prompt("processes", 2))
    ran = await asyncio.to_thread(
        kvbus, "stage", "--from", "a", "--to", "b", text, state=processes.folder, env=environment
    )
    assert ran.returncode == 0, ran
    logs = {name: processes.workers[name].log for name in ("a", "b")}
    await until(lambda: [span["name"] for span in printed(logs["a"])] == ["kvbus.lend"])
    await until(lambda: {span["name"] for span in printed(logs["b"])} == set(DESTINATION))

    b = {span["name"]: span for span in printed(logs["b"])}
    (lend,) = printed(logs["a"])
    assert lend["parent_id"] == b["kvbus.lease"]["context"]["span_id"]  # type: ignore[index] # of a document
    assert b["kvbus.transfer"]["parent_id"] == "0xb7ad6b7169203331", "stage itself exports nothing, and carries it on"
    assert {span["context"]["trace_id"] for span in (lend, *b.values())} == {f"0x{TRACE}"}  # type: ignore[index] # as above
