"""The small server of a worker's metrics: one answer a connection, and a bound on all that a client stretches."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from kvbus.commands.worker_metrics import split_address
from kvbus.errors import ConfigError
from kvbus.metrics.serving import CONNECTIONS_MAX, HEAD_LENGTH_MAX_BYTES, WorkerMetrics, metrics_served
from tests.exposed import Exposed, well_named


@asynccontextmanager
async def server(exchange_s: float = 60.0) -> AsyncIterator[tuple[WorkerMetrics, str]]:
    metrics = WorkerMetrics("b", "m0", exchange_s=exchange_s)
    async with metrics_served(metrics, "127.0.0.1", 0) as url:
        yield metrics, url


async def raw(url: str, data: bytes, *, close: bool = True) -> bytes:
    """What a connection is answered that says this."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        writer.write(data)
        if close:
            writer.write_eof()
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_it_tells_what_is_counted_each_time_that_somebody_asks() -> None:
    counted: dict[str, int | float | str] = {"leases_held": 1}
    async with server() as (metrics, url), httpx.AsyncClient(timeout=60) as client:
        before = Exposed((await client.get(url)).text)
        assert not any(before.of("kvbus_leases_held")), "it knows of no member yet"
        metrics.follow(lambda: counted)
        answered = await client.get(url)
        assert answered.headers["content-type"].startswith("text/plain; version=0.0.4")
        told = Exposed(answered.text)
        assert told.value("kvbus_leases_held", instance="b", member="m0") == 1
        counted["leases_held"] = 5
        assert Exposed((await client.get(f"{url}?name[]=x")).text).value("kvbus_leases_held") == 5
        well_named(told)
        head = await client.head(url)
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 1_000


async def test_it_offers_nothing_else() -> None:
    async with server() as (_, url), httpx.AsyncClient(timeout=60) as client:
        for method, path, status in (("GET", "/", 404), ("GET", "/metrics/", 404), ("POST", "/metrics", 405)):
            assert (await client.request(method, url.replace("/metrics", path))).status_code == status


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        b"GET",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /metrics HTTP/1.1\r\n",
        b"x" * (HEAD_LENGTH_MAX_BYTES + 1),
    ],
    ids=["nothing", "empty line", "half a word", "tls", "half a head", "too long"],
)
async def test_what_is_no_request_gets_no_answer_and_harms_nobody(data: bytes) -> None:
    async with server() as (_, url), httpx.AsyncClient(timeout=60) as client:
        assert await raw(url, data) == b""
        assert (await client.get(url)).status_code == 200
        for odd in (b"\xff\xfe \xff\r\n\r\n", b"\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n"):
            assert (await raw(url, odd)).startswith(b"HTTP/1.1 404")


async def test_clients_that_say_nothing_are_few_and_go_in_time() -> None:
    async with server(exchange_s=2.0) as (_, url), httpx.AsyncClient(timeout=60) as client:
        at = urlsplit(url)
        silent = [await asyncio.open_connection(at.hostname, at.port) for _ in range(CONNECTIONS_MAX)]
        assert await raw(url, b"GET /metrics HTTP/1.1\r\n\r\n", close=False) == b"", "there is no place for one more"
        for reader, writer in silent:
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            writer.close()
        assert (await client.get(url)).status_code == 200


async def test_an_address_that_cannot_be_had_is_said_at_the_start() -> None:
    async with server() as (_, url):
        port = urlsplit(url).port
        assert port is not None
        with pytest.raises(ConfigError, match="metrics cannot be served"):
            async with metrics_served(WorkerMetrics("c", "m0"), "127.0.0.1", port):
                pass


def test_an_address_without_a_host_is_one_of_the_loopback() -> None:
    assert split_address("9102") == split_address(":9102") == ("127.0.0.1", 9102)
    assert split_address("10.0.0.1:9102") == ("10.0.0.1", 9102)
    assert split_address("[::1]:9102") == ("::1", 9102)
    for wrong in ("localhost", "a:b", ":", "1.2.3.4:70000", "x:²"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            split_address(wrong)
