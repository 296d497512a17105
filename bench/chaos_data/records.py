"""What a bare member is started with, and what it tells the parent."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.chaos_data.content import Window
from kvbus.parts import ProcessIdentity

Sealed = tuple[bytes, bytes, bytes]
"""A grant's bytes, their signature, and the key of who should have signed."""
TRANSPORTS: Mapping[str, str] = {"cma": "ucx", "tcp": "ucx", "posix": "ucx", "memory": "memory", "socket": "socket"}
"""Each row's transport, and the name under which grants offer it."""


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """What a bare member is started with."""

    instance: str
    epoch: int
    transport: str
    facts: Path
    page_bytes: int = 64 << 10
    pages: int = 129
    rate_limit_bytes_s: float | None = None
    cancel_wait_s: float = 1.0
    wire_up_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Described:
    """What a member tells of itself."""

    process: ProcessIdentity
    verify_key: bytes
    fingerprint: str
    window: Window
    transport: str


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended here, and when, on the clock that all processes of a host share."""

    result: str
    evidence: str
    arrived: int
    text: str
    at: float


@dataclass(frozen=True, slots=True)
class Standing:
    """A member's books at one moment. `idle` pages are content that may go; `fault` is what its own check found."""

    pages: int
    free: int
    idle: int
    held: int
    fault: str
    content: dict[bytes, int]

    @property
    def out(self) -> int:
        """How many pages are neither free nor content that nobody holds."""
        return self.pages - self.free - self.idle


@dataclass(slots=True)
class HandOver:
    """New content that waits for the pages of an attempt: it must get them when access has ended, and not before."""

    names: tuple[bytes, ...]
    looks: int = 0
    too_early: int = 0
    taken_at: float = 0.0
    refused: str = ""
