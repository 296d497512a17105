"""Every subject on the bus: built here, parsed here, and nowhere else.

A subject is `<prefix>.<family>.<instance or requester>[.<verb or hash>[.<member>]]`. Names are escaped so that one
encoding is legal in subjects, in key-value keys and in consumer names: `[A-Za-z0-9_-]` stay, every other byte becomes
`=XX`. The broker would accept a publish to `kv..b` or `kv.*` without a word; the builders here cannot make one.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from kvbus.errors import PeerError

TOKEN_LENGTH_MAX_BYTES = 64
"""A token after escaping: legal in JetStream names on every file system that the broker may store them on."""

REQUEST_HASH_PATTERN = re.compile(r"[0-9a-f]{32}")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")


class Family(StrEnum):
    """The second token of a subject: what kind of traffic it carries."""

    TRANSFER = "transfer"
    COMMAND = "cmd"
    QUERY = "query"
    FACTS = "facts"
    SETTLE = "settle"
    LIVE_FACTS = "live.facts"
    LIVE_SETTLE = "live.settle"
    RESULT = "result"
    HEARTBEAT = "hb"
    SHARES = "shares"
    BLOCKS = "blocks"
    LIVE_BLOCKS = "live.blocks"


class Command(StrEnum):
    """Verbs that an instance answers by request-reply and that are steps of a change; some go to one member of it."""

    TRANSFER = "transfer"
    LEASE = "lease"
    PLAN = "plan"
    CANCEL = "cancel"
    CACHE = "cache"
    DRAIN = "drain"


class Query(StrEnum):
    """Verbs that an instance answers by request-reply and that change nothing."""

    SNAPSHOT = "snapshot"
    REPLAY = "replay"
    STATS = "stats"


@dataclass(frozen=True, slots=True)
class Subject:
    """A parsed subject; `name` is the unescaped instance or requester, `last` the verb or request hash, or empty.

    `member` is the one member that a command is for; empty where the whole instance may answer.
    """

    family: Family
    name: str
    last: str = ""
    member: str = ""


@lru_cache(maxsize=4_096)  # the names of a large cluster; each event that is encoded or decoded asks for some
def escape(name: str) -> str:
    """Return a name as one subject token; ValueError where it is empty or longer than 64 bytes once escaped."""
    if not name:
        raise ValueError("a name on the bus must not be empty")
    token = "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in name.encode())
    if len(token) > TOKEN_LENGTH_MAX_BYTES:
        raise ValueError(
            f"name {name[:80]!r} is {len(token)} bytes once escaped, expected at most {TOKEN_LENGTH_MAX_BYTES}"
        )
    return token


@lru_cache(maxsize=4_096)
def unescape(token: str) -> str:
    """Return the name that a token stands for; PeerError where no call of `escape` gives that token."""
    if len(token) > TOKEN_LENGTH_MAX_BYTES or not _ESCAPED.fullmatch(token):
        raise PeerError("subject token is not an escaped name", token=token[:TOKEN_LENGTH_MAX_BYTES])
    raw = bytearray()
    position = 0
    while position < len(token):
        if token[position] == "=":
            raw.append(int(token[position + 1 : position + 3], 16))
            position += 3
        else:
            raw.append(ord(token[position]))
            position += 1
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise PeerError("subject token does not hold UTF-8", token=token) from error
    if escape(name) != token:  # one name has one token: `=41` for `A` would be a second one
        raise PeerError("subject token is not in its one escaped form", token=token)
    return name


@dataclass(frozen=True, slots=True)
class Topics:
    """Builds and parses the subjects of one deployment; `prefix` is the configurable first token."""

    prefix: str = "kv"

    def __post_init__(self) -> None:
        if escape(self.prefix) != self.prefix:
            raise ValueError(f"prefix must be one plain token of [A-Za-z0-9_-], got {self.prefix!r}")

    def transfer(self, destination: str, request_hash: str) -> str:
        """Where a durable transfer request for one destination goes."""
        if not REQUEST_HASH_PATTERN.fullmatch(request_hash):
            raise ValueError(f"request hash must be 32 lower-case hex characters, got {request_hash[:80]!r}")
        return self._build(Family.TRANSFER, destination, request_hash)

    def transfer_filter(self, destination: str | None = None) -> str:
        """What a destination consumes; with no destination, what the stream stores."""
        return self._filter(Family.TRANSFER, destination, depth=2)

    @lru_cache(maxsize=1_024)  # noqa: B019 - holds a prefix and no more; many times the members that one speaks to
    def command(self, instance: str, verb: Command, member: str = "") -> str:
        """Where an instance answers one command; with a member, where that member of it does."""
        return self._build(Family.COMMAND, instance, verb, *([escape(member)] if member else []))

    def query(self, instance: str, verb: Query, member: str = "") -> str:
        """Where an instance answers one query; with a member, where that member of it does."""
        return self._build(Family.QUERY, instance, verb, *([escape(member)] if member else []))

    def facts(self, instance: str) -> str:
        """Where a member publishes facts, into the stream."""
        return self._build(Family.FACTS, instance)

    def settle(self, instance: str) -> str:
        """Where the one log of an instance's transfers is kept: term, open, settle, visible, void, cancel."""
        return self._build(Family.SETTLE, instance)

    def live_facts(self, instance: str | None = None) -> str:
        """Where the broker repeats stored facts; with no instance, a filter for all."""
        return self._name_or_filter(Family.LIVE_FACTS, instance)

    def live_settle(self, instance: str | None = None) -> str:
        """Where the broker repeats stored settle decisions; with no instance, a filter for all."""
        return self._name_or_filter(Family.LIVE_SETTLE, instance)

    @lru_cache(maxsize=1_024)  # noqa: B019 - as above; requesters are few, and hear of each of their transfers
    def result(self, requester: str) -> str:
        """Where a requester hears verdicts and outcomes."""
        return self._build(Family.RESULT, requester)

    def heartbeat(self, instance: str | None = None) -> str:
        """Where an instance says each second that it lives; with no instance, a filter for all."""
        return self._name_or_filter(Family.HEARTBEAT, instance)

    def shares(self, instance: str) -> str:
        """Where the members of an instance tell each other what they hold of its transfers."""
        return self._build(Family.SHARES, instance)

    def blocks(self, instance: str) -> str:
        """Where a bridge tells which blocks an engine's own cache took up and dropped, into the stream."""
        return self._build(Family.BLOCKS, instance)

    def live_blocks(self, instance: str | None = None) -> str:
        """Where the broker repeats what was stored about an engine's blocks; with no instance, a filter for all."""
        return self._name_or_filter(Family.LIVE_BLOCKS, instance)

    def facts_filter(self) -> str:
        """What the facts stream stores."""
        return self._filter(Family.FACTS, None)

    def settle_filter(self) -> str:
        """What the settle stream stores."""
        return self._filter(Family.SETTLE, None)

    def blocks_filter(self) -> str:
        """What the blocks stream stores."""
        return self._filter(Family.BLOCKS, None)

    def parse(self, subject: str) -> Subject:
        """Return the parts of a subject; PeerError unless a builder of this class could have made it."""
        prefix, *tokens = subject.split(".")
        words = 2 if tokens[:1] == ["live"] else 1  # of the family
        family = _FAMILIES.get(".".join(tokens[:words]))
        if prefix != self.prefix or family is None or len(tokens) == words:
            raise PeerError("subject belongs to no known family", subject=subject[:200])
        return self._parse_tail(subject, family, tokens[words:])

    def _parse_tail(self, subject: str, family: Family, tail: list[str]) -> Subject:
        fewest, most, allowed = _TAILS.get(family, _NAME_ONLY)
        if not fewest <= len(tail) <= most:
            raise PeerError("subject has the wrong number of tokens", subject=subject[:200])
        if len(tail) > 1 and not allowed.fullmatch(tail[1] if len(tail) == 2 else f"{tail[1]}."):
            raise PeerError("subject has an unknown verb or hash", subject=subject[:200])
        members = [unescape(token) for token in tail[2:]]
        return Subject(family, unescape(tail[0]), *tail[1:2], *members)

    def _build(self, family: Family, name: str, *last: str) -> str:
        return ".".join((self.prefix, family, escape(name), *last))

    def _name_or_filter(self, family: Family, name: str | None) -> str:
        return self._filter(family, None) if name is None else self._build(family, name)

    def _filter(self, family: Family, name: str | None, *, depth: int = 1) -> str:
        tokens = ["*" if name is None else escape(name), *("*" for _ in range(depth - 1))]
        return ".".join((self.prefix, family, *tokens))


_FAMILIES: dict[str, Family] = {family.value: family for family in Family}
_NAME_ONLY = (1, 1, re.compile(r"(?!)"))
_TAILS: dict[Family, tuple[int, int, re.Pattern[str]]] = {
    Family.TRANSFER: (2, 2, REQUEST_HASH_PATTERN),
    Family.COMMAND: (2, 3, re.compile("|".join(rf"{verb.value}\.?" for verb in Command))),
    Family.QUERY: (2, 3, re.compile("|".join((*Query, *(rf"{verb}\." for verb in (Query.SNAPSHOT, Query.STATS)))))),
}
"""What stands after the family: how many tokens, fewest and most, and what the second may be; with a dot behind it,
where a member follows."""
