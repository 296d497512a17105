"""The OpenAPI document of a gateway, made from its doors, and a page that shows it; neither needs anything else."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from kvbus.gateway.answers import answer
from kvbus.gateway.routing import INSTANCE_PREFIX, Door
from kvbus.gateway.transfer_words import PROBLEM, TEXT, problems
from kvbus.version import VERSION

_INSTANCE: Final = {
    "name": "instance",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1, "maxLength": 64},
}
OPENAPI: Final = {
    "operationId": "openapi",
    "summary": "This document.",
    "responses": {
        "200": {"description": "OpenAPI 3.1.", "content": {"application/json": {"schema": {"type": "object"}}}}
    },
}
DOCS: Final = {
    "operationId": "docs",
    "summary": "This document for people.",
    "responses": {"200": {"description": "A page.", "content": {"text/html": {"schema": TEXT}}}},
}


def description_doors(doors: Sequence[Door]) -> list[Door]:
    """Return the doors that describe these ones, and themselves."""

    async def openapi(_request: Request) -> Response:
        return answer(document)

    async def docs(_request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"})

    own = [
        Door("GET", "/openapi.json", openapi, OPENAPI, per_instance=False),
        Door("GET", "/docs", docs, DOCS, per_instance=False),
    ]
    document = openapi_document([*doors, *own])
    page = docs_page(document)
    return own


def openapi_document(doors: Iterable[Door]) -> dict[str, object]:
    """Return the document of these doors."""
    paths: dict[str, dict[str, object]] = {}
    for door in doors:
        paths.setdefault(door.path, {})[door.method.lower()] = dict(door.operation)
        if door.per_instance:
            paths.setdefault(INSTANCE_PREFIX + door.path, {})[door.method.lower()] = _below_instance(door)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvbus gateway",
            "version": VERSION,
            "description": "Moves KV-cache pages between LLM inference instances. A path below /instances/{instance} "
            "is about that instance; without it, about the only one that the gateway serves.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": {"Problem": PROBLEM}},
    }


def _below_instance(door: Door) -> dict[str, object]:
    operation = dict(door.operation)
    parameters = cast("list[object]", operation.get("parameters", []))
    responses = cast("Mapping[str, object]", operation["responses"])
    missing = problems(s404="This gateway serves no such instance.")
    return operation | {
        "operationId": f"{operation['operationId']}_of_instance",
        "parameters": [_INSTANCE, *parameters],
        "responses": missing | dict(responses),
    }


def docs_page(document: Mapping[str, object]) -> str:
    """Return the document as one page: paths, what they do, what they take and answer."""
    paths = cast("Mapping[str, Mapping[str, Mapping[str, object]]]", document["paths"])
    sections = [
        _section(path, method, operation)
        for path, methods in paths.items()
        if not path.startswith(INSTANCE_PREFIX)
        for method, operation in methods.items()
    ]
    info = cast("Mapping[str, str]", document["info"])
    return _PAGE.format(
        title=html.escape(info["title"]),
        version=html.escape(info["version"]),
        about=html.escape(info["description"]),
        sections="\n".join(sections),
    )


def _section(path: str, method: str, operation: Mapping[str, object]) -> str:
    responses = cast("Mapping[str, Mapping[str, object]]", operation["responses"])
    parameters = cast("Sequence[Mapping[str, object]]", operation.get("parameters", []))
    rows = "".join(
        f"<tr><td><code>{html.escape(status)}</code></td><td>{html.escape(str(one['description']))}</td></tr>"
        for status, one in responses.items()
    )
    named = "".join(_parameter(one) for one in parameters)
    more = html.escape(str(operation.get("description", "")))
    return (
        f"<section><h2><span>{method.upper()}</span> <code>{html.escape(path)}</code></h2>"
        f"<p>{html.escape(str(operation['summary']))} {more}</p><ul>{named}{_fields(operation)}</ul>"
        f"<table>{rows}</table></section>"
    )


def _fields(operation: Mapping[str, object]) -> str:
    match operation.get("requestBody"):
        case {"content": {"application/json": {"schema": {"properties": dict(properties), **rest}}}}:
            needed = cast("Sequence[str]", rest.get("required", []))
            return "".join(
                _item(name, "body", one, str(one.get("description", "")), needed=name in needed)
                for name, one in properties.items()
            )
        case _:
            return ""


def _parameter(one: Mapping[str, object]) -> str:
    schema = cast("Mapping[str, object]", one["schema"])
    needed = bool(one.get("required"))
    return _item(str(one["name"]), str(one["in"]), schema, str(one.get("description", "")), needed=needed)


def _item(name: str, place: str, schema: Mapping[str, object], about: str, *, needed: bool) -> str:
    facts = html.escape(", ".join(part for part in (place, takes(schema), "required" if needed else "") if part))
    return f"<li><code>{html.escape(name)}</code> ({facts}) {html.escape(about)}</li>"


def takes(schema: Mapping[str, object]) -> str:
    """Return what a schema takes, in few words; null, which stands for a field that was not given, is left out."""
    match schema:
        case {"enum": [*values]}:
            return " | ".join(json.dumps(value) for value in values if value is not None)
        case {"oneOf": [*ways]}:
            return " or ".join(word for way in ways if isinstance(way, dict) and (word := takes(way)))
        case {"type": "array" | ["array", *_], "items": dict(items)}:
            return f"array of {takes(items)}"
        case {"type": [*names]}:
            return " or ".join(str(name) for name in names if name != "null")
        case {"type": str(name)} if name != "null":
            return name
        case _:
            return ""


_PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }}
body {{ max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }}
section {{ border-top: 1px solid #8886; margin-top: 1.5rem; }}
h2 {{ font-size: 1.05rem; }} h2 span {{ font-weight: 400; }}
td {{ padding: .1rem .8rem .1rem 0; vertical-align: top; }}
</style>
<h1>{title} {version}</h1>
<p>{about}</p>
<p>For programs: <a href="/openapi.json">/openapi.json</a></p>
{sections}
</html>
"""
