"""The gateway describes itself: every route stands in its OpenAPI document, and answers are as it says there."""

import asyncio
import html
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from starlette.routing import Route

from kvbus.gateway.app import doors, routes
from kvbus.gateway.openapi import docs_page, takes
from tests.unit.engine_parts import worker_with
from tests.unit.gateway_parts import Stage, prompt, stage
from tests.unit.openai_parts import QUICK, run_dir_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

FUZZ_S = 500.0
"""Some seven hundred requests, forty of them a second on an idle machine; a hang meets it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Stage]:
    async with stage() as running:
        yield running


async def document(gateway: Stage) -> dict[str, Any]:
    answered = await gateway.client.get("/openapi.json")
    assert answered.status_code == 200
    return dict(answered.json())


async def test_every_route_is_described_and_nothing_else(gateway: Stage) -> None:
    described = {
        (method.upper(), path) for path, methods in (await document(gateway))["paths"].items() for method in methods
    }
    served = {
        (method, route.path)
        for route in routes(doors(gateway.parts))
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert described == served


async def test_names_of_operations_are_unique_and_references_lead_somewhere(gateway: Stage) -> None:
    whole = await document(gateway)
    names = [operation["operationId"] for methods in whole["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))
    for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(whole))):
        found: Any = whole
        for step in reference.split("/"):
            found = found[step]
        assert found


async def test_each_parameter_of_a_path_is_declared(gateway: Stage) -> None:
    for path, methods in (await document(gateway))["paths"].items():
        for operation in methods.values():
            declared = {one["name"] for one in operation.get("parameters", []) if one["in"] == "path"}
            assert declared == set(re.findall(r"\{(\w+)\}", path)), path


# H29, H30
async def test_answers_are_as_described(gateway: Stage) -> None:
    whole = await document(gateway)
    asked = await gateway.ask(prompt=prompt("described"))
    request_hash = asked.json()["request_hash"]
    await gateway.record(request_hash)
    for method, path, answered in (
        ("post", "/v1/kv_transfer", asked),
        ("get", "/v1/kv_transfer/stats", await gateway.client.get("/v1/kv_transfer/stats")),
        ("get", "/v1/kv_transfer/{request_hash}", await gateway.client.get(f"/v1/kv_transfer/{request_hash}")),
        ("get", "/health", await gateway.client.get("/health")),
        ("get", "/ready", await gateway.client.get("/ready")),
        ("get", "/v1/kv_cache", await gateway.client.get("/instances/b/v1/kv_cache")),
        ("post", "/v1/kv_cache/pin", await gateway.client.post("/instances/b/v1/kv_cache/pin", json={"prompt": "x"})),
        ("post", "/v1/kv_cache/look", await gateway.client.post("/instances/b/v1/kv_cache/look", json={"prompt": "x"})),
        ("post", "/v1/kv_transfer", await gateway.ask(source="evil", prompt="x")),
    ):
        response = whole["paths"][path][method]["responses"][str(answered.status_code)]
        schema = {**response["content"]["application/json"]["schema"], "components": whole["components"]}
        jsonschema.validate(answered.json(), schema)
    for secret in ("verify_key", "rkey", "remote_key", "address", "signature"):
        assert secret not in json.dumps(whole["paths"])


async def test_the_page_for_people_needs_nothing_from_outside(gateway: Stage) -> None:
    page = await gateway.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"(?:src|href)=\"(?!/openapi\.json)", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path, methods in (await document(gateway))["paths"].items():
        if not path.startswith("/instances/"):
            assert page.text.count(path) >= len(methods), path


def _operation(summary: str) -> dict[str, object]:
    return {"operationId": "x", "summary": summary, "responses": {}}


async def test_what_stands_in_the_document_cannot_become_markup() -> None:
    info = {"title": "t", "version": "1", "description": "<script>"}
    page = docs_page({"info": info, "paths": {"/<b>": {"get": _operation("<i>")}}})
    assert "<script>" not in page
    assert "<b>" not in page
    assert "<i>" not in page


async def test_the_page_says_what_each_field_takes(gateway: Stage) -> None:
    page = html.unescape((await gateway.client.get("/docs")).text)
    assert "<code>source</code> (body, string, required)" in page
    assert '<code>on_miss</code> (body, "prefill" | "partial" | "fail")' in page
    assert "<code>prompt</code> (body, string or array of integer)" in page
    assert "<code>wait_s</code> (query, number)" in page
    assert takes({"type": "null"}) == takes({}) == ""


async def test_what_is_not_there_is_answered_with_where_to_look(gateway: Stage) -> None:
    for answered in (await gateway.client.get("/v1/nothing"), await gateway.client.put("/v1/kv_transfer")):
        assert answered.status_code in {404, 405}
        assert "/docs" in answered.json()["error"]


@pytest.mark.slow
@pytest.mark.timeout(550)
async def test_no_input_that_fits_or_misses_the_document_makes_the_gateway_fail(tmp_path: Path) -> None:
    async with (
        worker_with(tmp_path) as worker,
        stage(instances=("b",), run_dir=run_dir_of(worker, tmp_path, "b")) as one,
    ):
        await worker.start_engine(options=QUICK)
        status, said = await fuzzed(one.url, tmp_path)
        assert status == 0, said[-6_000:]
        stats = await one.stats()
        assert stats["fired"] > 0, "no example was a request that is taken on"
        assert stats["fired"] == stats["transferred"] + stats["failed"] + stats["inflight"]
        line = one.parts.engines.statistics()["b"]
        assert line.left > 0, "no example was a prompt that is answered"
        assert (line.waiting, line.running) == (0, 0)


async def fuzzed(url: str, folder: Path) -> tuple[int | None, str]:
    """The exit status of schemathesis against a gateway, and what it said."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
    command += ["--checks", "not_a_server_error,response_schema_conformance,content_type_conformance"]
    command += ["--max-examples", "15", "--phases", "examples,coverage,fuzzing", "--seed", "7"]
    command += ["--request-timeout", "60", "--no-color", "--generation-database", "none"]
    # Without the stream that has no end (test_gateway_feed.py is about it), and without a second way to each handler.
    command += ["--exclude-path-regex", "events$|^/instances/"]
    running = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "200"},
    )
    try:
        async with asyncio.timeout(FUZZ_S):
            said, _ = await running.communicate()
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    return running.returncode, said.decode()
