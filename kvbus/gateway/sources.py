"""Sources: what a caller may name as the place to take KV from, compared by its parts and never fetched.

A source is an instance's name or a base URL. A URL only ever stands for a registered instance, so nothing that is
written in it makes the gateway open a connection, follow a redirect or look up a name.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

from kvbus.errors import ConfigError
from kvbus.topics import escape

SOURCE_LENGTH_MAX = 512
"""Characters: eight times the longest name on the bus, enough for any base URL."""

_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"(?!-)[a-z0-9-]{1,63}(?:\.(?!-)[a-z0-9-]{1,63})*")
_PATH: Final = re.compile(r"(?:/[A-Za-z0-9_.=~-]+)*")


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """A base URL by its parts, in the one form that all its spellings share."""

    scheme: str
    host: str
    port: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class InstanceName:
    """An instance, by the name under which it speaks on the bus."""

    name: str


Source = BaseUrl | InstanceName


def source_of(text: str) -> Source:
    """Return what a source stands for; ValueError says why it cannot be one.

    Case of scheme and host, a default port, a trailing slash or dot, and an IPv4 address in IPv6 clothes are spellings
    of the same thing. Everything that could make a reader and a fetcher disagree about the host is refused.
    """
    if len(text) > SOURCE_LENGTH_MAX:
        raise ValueError(f"source is longer than {SOURCE_LENGTH_MAX} characters")
    if "://" not in text:
        if "*" in text or any(ord(sign) <= 32 for sign in text):
            raise ValueError("source is neither an instance's name nor a base URL such as http://host:port")
        escape(text)
        return InstanceName(text)
    if not text.isascii() or any(sign in text for sign in "@?#;\\%*") or any(ord(sign) <= 32 for sign in text):
        raise ValueError("source URL may have no user, query, fragment, escape, blank or sign outside of ASCII")
    parts = urlsplit(text)
    if parts.scheme not in _PORTS:
        raise ValueError("source URL must begin with http:// or https://")
    path = parts.path.rstrip("/")
    if not _PATH.fullmatch(path) or any(step in {".", ".."} for step in path.split("/")):
        raise ValueError("source URL has a path that no base URL has")
    return BaseUrl(parts.scheme, _host(parts.hostname), _port(parts.port, parts.netloc, parts.scheme), path)


def _host(host: str | None) -> str:
    if not host:
        raise ValueError("source URL names no host")
    try:
        address = ip_address(host)
    except ValueError:
        name = host.removesuffix(".")
        if not _HOST.fullmatch(name):
            raise ValueError("source URL has a host that is neither a name nor an address") from None
        return name
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(address)


def _port(port: int | None, netloc: str, scheme: str) -> int:
    if port is None:
        if netloc.endswith(":"):
            raise ValueError("source URL ends its host with a colon, and names no port")
        return _PORTS[scheme]
    if port == 0:
        raise ValueError("source URL names port 0")
    return port


@dataclass(frozen=True, slots=True)
class Allowlist:
    """The sources that may be named. An empty one allows none; an entry that cannot be read stops the start."""

    sources: frozenset[Source]

    @classmethod
    def parsed(cls, text: str) -> "Allowlist":
        """Return the list that a setting holds; ConfigError names the entry that is no source."""
        entries = [entry.strip() for entry in text.split(",")]
        return cls(frozenset(_entry(entry) for entry in entries if entry))

    def __contains__(self, source: object) -> bool:
        return source in self.sources

    def may_list(self, source: Source) -> bool:
        """Whether a source may prove to be allowed, once it is known what it stands for."""
        by_name = any(isinstance(one, InstanceName) for one in self.sources)
        return source in self.sources or (isinstance(source, BaseUrl) and by_name)

    def refusal(self, source: Source | None, names: Collection[str] = ()) -> str:
        """Return why a source is refused, or "": neither itself nor the one instance it stands for is listed."""
        if not self.sources:
            return "no source is allowed: set KV_TRANSFER_SOURCE_ALLOW to instances or base URLs, separated by commas"
        if source in self.sources:
            return ""
        if len(names) == 1 and InstanceName(next(iter(names))) in self.sources:
            return ""
        return "this source is not on the list of KV_TRANSFER_SOURCE_ALLOW"


def _entry(text: str) -> Source:
    try:
        ip_network(text, strict=False)
    except ValueError:
        pass
    else:
        raise ConfigError(
            "KV_TRANSFER_SOURCE_ALLOW holds an address or a network: name instances or base URLs", got=text[:80]
        )
    try:
        return source_of(text)
    except ValueError as error:
        raise ConfigError(
            f"KV_TRANSFER_SOURCE_ALLOW holds an entry that is no source: {error}", got=text[:80]
        ) from error
