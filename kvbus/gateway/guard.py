"""Keeps other people's web pages out: a browser on this host reaches loopback too, whoever wrote the page in it.

Programs are not concerned: they send no Origin and no Sec-Fetch headers. It is no substitute for a firewall where the
gateway listens elsewhere.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvbus.gateway.answers import answer

_READING = ("GET", "HEAD", "OPTIONS")


class PageGuard:
    """Answers 403 to what a browser sends for a page from elsewhere, and to what goes by a name that is not this host.

    Such a page could not read an answer, but its making costs: a story reads the logs, and metrics ask all members. So
    only a person's own step from there to here, a link, is served.

    `loopback`: the gateway listens there alone, so a Host that is another name was made to point here (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, *, loopback: bool) -> None:
        self._app = app
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and (reason := self._refusal(Request(scope))):
            await answer({"error": reason}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> str:
        host = request.headers.get("host", "")
        if self._loopback and not is_loopback(_name(f"//{host}")):
            return "this gateway listens on loopback only, and goes by no other name"
        if request.method in _READING:
            is_elsewhere = request.headers.get("sec-fetch-site") == "cross-site"
            is_step = request.headers.get("sec-fetch-mode") == "navigate"
            return "a page from another site may not read anything here" if is_elsewhere and not is_step else ""
        origin = request.headers.get("origin")
        if origin is None or _authority(origin) == host.lower():
            return ""
        return "a page from another origin may not change anything here"


def is_loopback(host: str) -> bool:
    """Whether a host's name means this host and cannot be made to mean another."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _authority(origin: str) -> str:
    """Return host and port of an origin; empty where it is none, such as `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
