"""What kvbus calls of ucx-py, as protocols, and the import that happens only where it was asked for.

These are calls of its low level, `ucp._libs.ucx_api`, as its releases up to the last one, 0.45, have them. Two of their
habits matter here. A get that ends while it is posted returns None and calls nobody back. And an endpoint is closed by
flushing, which waits for its peer: nothing closes one by force unless its connection has broken already.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvbus.errors import ConfigError

MODULE = "ucp._libs.ucx_api"
MISSING = (
    "--transport ucx-py reads through NVIDIA's ucx-py, and its module `ucp` cannot be imported here ({error}): install "
    "the package ucx-py with conda (channels rapidsai and conda-forge); plain pip finds stubs of it only, and it gets "
    "no more releases. --transport ucx speaks UCX as well, and needs nothing but what kvbus brings"
)

Bytes = NDArray[np.uint8]
Ended = Callable[..., None]
"""Called as (request, exception, *arguments); an exception of None means that all bytes have come."""


class Closes(Protocol):
    """A part of UCX that is closed, with all that was opened on it."""

    def close(self) -> None:
        """Close it; may wait for peers."""


class Memory(Closes, Protocol):
    """Memory that UCX may write into, or let peers read."""

    def pack_rkey(self) -> bytes:
        """Return the key with which a peer reads it, as a buffer."""


class Context(Closes, Protocol):
    """One UCX."""

    def map(self, mem: Bytes) -> Memory:
        """Make memory known."""


class Worker(Closes, Protocol):
    """Connections and their progress."""

    def progress(self) -> object:
        """Work until there is nothing to be worked off; never from inside a callback."""

    def arm(self) -> bool:
        """Ask for an event before waiting; False where there is work."""

    def init_blocking_progress_mode(self) -> int:
        """Return a descriptor that becomes readable on events."""

    def get_address(self) -> bytes:
        """Return what a peer connects with, as a buffer."""


class Endpoint(Closes, Protocol):
    """A connection to one peer."""

    def is_alive(self) -> bool:
        """Whether it has not broken."""

    def unpack_rkey(self, rkey: object) -> object:
        """Make a peer's key usable."""

    def flush(self, cb_func: Ended) -> object:
        """Call back once all that was posted has ended; None where that is so already."""

    def info(self) -> str:
        """Describe the connection, its lanes among it."""


class Remote(Protocol):
    """A peer's memory under one key."""

    def get_nb(
        self,
        memory: Bytes,
        cb_func: Ended,
        *,
        cb_args: tuple[object, ...],
        cb_kwargs: dict[str, object],
        offset: int,
        size: int,
    ) -> object:
        """Read from there into memory of ours; without the callback's arguments it fails in a rare case."""


class Api(Protocol):
    """The module, by the names that are used of it."""

    UCXContext: Callable[..., Context]
    UCXWorker: Callable[[Context], Worker]
    RemoteMemory: Callable[[object, int, int], Remote]
    UCXEndpoint: "EndpointMaker"
    UCXAddress: "BufferMaker"
    PackedRemoteKey: "BufferMaker"
    Feature: "Features"


class EndpointMaker(Protocol):
    """Makes endpoints."""

    def create_from_worker_address(self, worker: Worker, address: object, *, endpoint_error_handling: bool) -> Endpoint:
        """Begin to connect."""


class BufferMaker(Protocol):
    """Makes one of UCX's objects of its bytes."""

    def from_buffer(self, buffer: bytes) -> object:
        """Return the object."""


class Features(Protocol):
    """What a context may be asked for."""

    RMA: object
    AM: object
    WAKEUP: object


def load() -> Api:
    """Import ucx-py; ConfigError, saying what to install and why, where that fails."""
    try:
        return cast("Api", importlib.import_module(MODULE))
    except (ImportError, OSError) as error:  # OSError: its UCX library lacks something
        raise ConfigError(MISSING.format(error=error)) from error


def features(api: Api) -> Iterable[object]:
    """Return what a context needs: gets, and wake-ups; messages too, so that a notice of another binding is dropped."""
    return api.Feature.RMA, api.Feature.AM, api.Feature.WAKEUP
