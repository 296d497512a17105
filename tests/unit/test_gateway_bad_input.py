"""What the gateway makes of input that nobody should send: a sentence and a status, never a 500."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvbus.gateway.answers import BODY_LENGTH_MAX_BYTES
from kvbus.gateway.serving import listen
from tests.unit.gateway_parts import Stage, prompt, stage
from tests.waiting import until

PATH = "/v1/kv_transfer"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Stage]:
    async with stage() as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


# H2, H3
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"nonsense",
        b"\xff\xfe\x00",
        b"\x00" * 10,
        b"[]",
        b'["source", "prompt"]',
        b"null",
        b"true",
        b"5",
        b'"source"',
        b"1e999",
        b"9" * 10_000,
        b"NaN",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"source": "a", "prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"source": "a", "prompt": "\\ud800"}',
        b'{"source": "a\\u0000", "prompt": 1}',
        b'{"source": "a", "prompt": "x", "budget_s": NaN}',
        b'{"source": "a", "prompt": "x", "budget_s": 1e999}',
        b'{"source": "a", "prompt": "x", "budget_s": -1}',
        b'{"source": ["a"], "prompt": "x"}',
        b'{"source": {"a": "a"}, "prompt": "x"}',
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_a_body_that_is_no_request_is_400_with_a_sentence(gateway: Stage, body: bytes) -> None:
    answered = await gateway.client.post(PATH, content=body)
    assert answered.status_code == 400, answered.text
    assert len(answered.json()["error"]) > 10


async def test_unknown_fields_are_ignored_also_deep_ones(gateway: Stage) -> None:
    deep = b"[" * 400 + b"]" * 400
    body = b'{"source": "a", "destination": "b", "prompt": "' + prompt("deep").encode() + b'", "more": ' + deep + b"}"
    assert (await gateway.client.post(PATH, content=body)).json()["status"] == "accepted"


async def test_a_body_of_ten_megabytes_is_413_whether_or_not_it_says_its_length(gateway: Stage) -> None:
    body = json.dumps({"source": "a", "prompt": "x" * 10_000_000}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1 << 16):
            yield body[at : at + (1 << 16)]

    assert (await gateway.client.post(PATH, content=body)).status_code == 413
    assert (await gateway.client.post(PATH, content=chunks())).status_code == 413
    assert gateway.parts.bodies.held_bytes == 0


async def test_a_prompt_that_fits_no_request_on_the_bus_is_400_and_keeps_no_place(gateway: Stage) -> None:
    before = await gateway.stats()
    answered = await gateway.ask(prompt="x" * 1_000_000)
    assert (answered.status_code, "shorten it" in answered.json()["error"]) == (400, True)
    assert await gateway.stats() == before


async def test_all_bodies_together_have_a_bound() -> None:
    async with stage() as one:
        bodies = one.parts.bodies
        bodies.held_bytes = bodies._all_max_bytes - 10
        assert (await one.ask(prompt=prompt())).status_code == 503
        assert bodies.held_bytes == bodies._all_max_bytes - 10
        bodies.held_bytes = 0
        assert (await one.ask(prompt=prompt())).status_code == 202


async def test_a_body_that_does_not_come_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.gateway.answers.BODY_WAIT_S", 0.1)
    async with stage() as one:
        reader, writer = await connection(one)
        writer.write(b"POST /v1/kv_transfer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        assert one.parts.bodies.held_bytes == 0
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_goes_before_its_body_has_come_leaves_nothing(gateway: Stage) -> None:
    before = await gateway.stats()
    _, writer = await connection(gateway)
    writer.write(b"POST /v1/kv_transfer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\n" + b"{" * 1_000)
    await until(lambda: gateway.parts.bodies.held_bytes == 1_000)
    writer.transport.abort()
    await until(lambda: gateway.parts.bodies.held_bytes == 0)
    assert await gateway.stats() == before


# H18
async def test_a_client_that_goes_before_its_answer_stops_nothing(gateway: Stage) -> None:
    body = json.dumps({"source": "a", "destination": "b", "prompt": prompt("gone")}).encode()
    _, writer = await connection(gateway)
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    count = len(gateway.b.requests)
    writer.write(head.encode() + body)
    await writer.drain()
    request = await gateway.b.taken(count + 1)
    writer.transport.abort()
    assert (await gateway.record(request.request_hash))["status"] == "transferred"
    stats = await gateway.stats()
    assert stats["fired"] == stats["transferred"] + stats["failed"] + stats["inflight"]


async def test_what_is_no_http_is_400_or_cut_and_the_gateway_serves_on(gateway: Stage) -> None:
    for data in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A: " + b"x" * 100_000):
        reader, writer = await connection(gateway)
        writer.write(data)
        writer.write_eof()
        assert b" 200 " not in await reader.read()
        writer.close()
    assert (await gateway.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", PATH, 405),
        ("PUT", f"{PATH}/stats", 405),
        ("GET", "/v1/kv_transfer/zz", 404),
        ("GET", f"/v1/kv_transfer/{'A' * 32}", 404),
        ("DELETE", f"/v1/kv_transfer/{'0' * 31}", 404),
        ("GET", "/instances//v1/kv_transfer/stats", 404),
        ("GET", "/instances/%00/v1/kv_transfer/stats", 404),
        ("GET", f"/instances/{'x' * 500}/v1/kv_transfer/stats", 404),
        ("GET", "/instances/b/../a/v1/kv_transfer/stats", 404),
        ("GET", f"/v1/kv_transfer/{'0' * 32}?wait_s=-1", 400),
        ("GET", f"/v1/kv_transfer/{'0' * 32}?wait_s=31", 400),
        ("GET", f"/v1/kv_transfer/{'0' * 32}?wait_s=nan", 400),
        ("GET", "/page/", 404),
    ],
)
async def test_a_path_or_method_that_is_none_is_told(gateway: Stage, method: str, path: str, status: int) -> None:
    reader, writer = await connection(gateway)
    writer.write(
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode()
    )
    answer = await reader.read()
    writer.close()
    assert int(answer.split(b" ")[1]) == status, answer
    assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "[", "10.0.0.5", ""])
async def test_a_name_that_was_made_to_point_here_gets_nothing(gateway: Stage, host: str) -> None:
    answered = await gateway.client.get("/v1/kv_transfer/stats", headers={"host": host})
    assert answered.status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "127.9.9.9", "[::1]:80"])
async def test_every_name_of_this_host_is_served(gateway: Stage, host: str) -> None:
    assert (await gateway.client.get("/v1/kv_transfer/stats", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost:1", "http://[", ""])
async def test_a_page_from_elsewhere_changes_nothing(gateway: Stage, origin: str) -> None:
    before = await gateway.stats()
    body = {"source": "a", "destination": "b", "prompt": prompt("page")}
    answered = await gateway.client.post(PATH, json=body, headers={"origin": origin})
    assert answered.status_code == 403
    assert await gateway.stats() == before
    own = await gateway.client.post(PATH, json=body, headers={"origin": gateway.url})
    assert own.status_code == 202


@pytest.mark.parametrize("path", ["/metrics", "/v1/transfers/b-1/story", "/v1/cluster", "/"])
async def test_a_page_from_another_site_reads_nothing_and_a_link_from_there_opens(gateway: Stage, path: str) -> None:
    for mode, status in (("no-cors", 403), ("cors", 403), ("navigate", 200), ("", 403)):
        headers = {"sec-fetch-site": "cross-site"} | ({"sec-fetch-mode": mode} if mode else {})
        answered = await gateway.client.get(path, headers=headers)
        assert (answered.status_code == 403) == (status == 403), (mode, answered.text)
    own = await gateway.client.get(path, headers={"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"})
    assert own.status_code != 403


async def test_the_longest_token_list_of_the_bus_fits_a_body() -> None:
    longest = json.dumps({"source": "a", "prompt": [100_000] * ((768 << 10) // 4)}, separators=(",", ":"))
    assert len(longest) < BODY_LENGTH_MAX_BYTES


async def test_an_answer_waits_for_no_delayed_acknowledgement() -> None:
    with listen("127.0.0.1", 0) as listening:
        _, writer = await asyncio.open_connection(*listening.getsockname())
        accepted, _ = await asyncio.to_thread(listening.accept)
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


async def connection(gateway: Stage) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))
