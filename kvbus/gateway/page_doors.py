"""The live page at `/`, its files, what it is fed with, and one transfer's story.

The page is plain files that ask nobody but this gateway, so it works without any other network. It may load nothing
else either: its content security policy says so to the browser.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from kvbus.commands.stories import Story
from kvbus.commands.story_documents import not_found_document, story_document
from kvbus.gateway.answers import Problem, answer
from kvbus.gateway.parts import Parts
from kvbus.gateway.routing import Door
from kvbus.gateway.streams import EventStream
from kvbus.gateway.transfer_words import TEXT, json_answer, problems

FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TRANSFER_LENGTH_MAX: Final = 200
"""As on the wire."""

_OBJECT: Final = {"type": "object"}
PAGE: Final = {
    "operationId": "page",
    "summary": "The live page: the cluster as it is now, for people.",
    "responses": {"200": {"description": "A page.", "content": {"text/html": {"schema": TEXT}}}},
}
FILE: Final = {
    "operationId": "page_file",
    "summary": "A file of the live page.",
    "parameters": [{"name": "file", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}],
    "responses": {
        "200": {"description": "The file.", "content": {kind.partition(";")[0]: {} for kind in TYPES.values()}},
        **problems(s404="There is no such file."),
    },
}
CLUSTER: Final = {
    "operationId": "cluster",
    "summary": "The cluster as it is now: members, transfers, leases, pages out of use, isolated peers, outcomes.",
    "description": "Times are unix milliseconds. Rows are bounded; the counts in `head` are not.",
    "responses": {"200": json_answer("The whole picture, as of its number.", _OBJECT)},
}
EVENTS: Final = {
    "operationId": "cluster_events",
    "summary": "The same, and then what changes: server-sent events, four each second at most.",
    "description": "`snapshot` comes first; each `update` names the number before its own. Whoever misses one asks for "
    "the whole picture again.",
    "responses": {
        "200": {"description": "Until either side goes.", "content": {"text/event-stream": {"schema": TEXT}}},
        **problems(s503="As many look already as this gateway serves."),
    },
}
STORY: Final = {
    "operationId": "story",
    "summary": "One transfer's life on both sides, from recorded events alone, as `kvbus story --json` tells it.",
    "parameters": [
        {
            "name": "transfer",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1, "maxLength": TRANSFER_LENGTH_MAX},
            "description": "A transfer's id, a request's hash, or the first characters of either.",
        }
    ],
    "responses": {
        "200": json_answer("The story. `cut`: more was recorded than is read for one.", _OBJECT),
        **problems(s404="No recorded event names it; `candidates` may have been meant.", s503="No log can be read."),
    },
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent."""

    data: bytes
    kind: str
    tag: str


def doors(parts: Parts) -> list[Door]:
    """Return the doors of the page."""
    here = PageDoors(parts, page_files())
    return [
        Door("GET", "/", here.page, PAGE, per_instance=False),
        Door("GET", "/page/{file}", here.file, FILE, per_instance=False),
        Door("GET", "/v1/cluster", here.cluster, CLUSTER, per_instance=False),
        Door("GET", "/v1/cluster/events", here.events, EVENTS, per_instance=False),
        Door("GET", "/v1/transfers/{transfer}/story", here.story, STORY, per_instance=False),
    ]


def page_files() -> dict[str, PageFile]:
    """Read the page's files, once for the life of a gateway."""
    found: dict[str, PageFile] = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            data = path.read_bytes()
            found[path.name] = PageFile(
                data, TYPES[path.suffix], f'"{hashlib.blake2b(data, digest_size=8).hexdigest()}"'
            )
    return found


class PageDoors:
    """The handlers."""

    def __init__(self, parts: Parts, files: dict[str, PageFile]) -> None:
        self._parts = parts
        self._files = files

    async def page(self, request: Request) -> Response:
        """Return the page."""
        return self._sent(request, INDEX)

    async def file(self, request: Request) -> Response:
        """Return one of its files."""
        return self._sent(request, str(request.path_params["file"]))

    async def cluster(self, _request: Request) -> Response:
        """Return the whole picture."""
        return answer(self._parts.page.snapshot(), headers={"cache-control": "no-store"})

    async def events(self, _request: Request) -> Response:
        """Follow the picture."""
        page = self._parts.page
        return EventStream(page, page.join())

    async def story(self, request: Request) -> Response:
        """Tell one transfer's life."""
        wanted = str(request.path_params["transfer"])
        if len(wanted) > TRANSFER_LENGTH_MAX:
            raise Problem(404, f"a transfer's id has at most {TRANSFER_LENGTH_MAX} characters")
        told, cut = await self._parts.stories.tell(wanted)
        if isinstance(told, Story):
            return answer(story_document(told) | {"cut": cut}, headers={"cache-control": "no-store"})
        return answer(not_found_document(told), 404)

    def _sent(self, request: Request, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            raise Problem(404, "the page has no such file")
        headers = {
            "cache-control": "no-cache",
            "content-security-policy": POLICY,
            "etag": found.tag,
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        return Response(found.data, headers=headers | {"content-type": found.kind})
