"""An engine without kvbus: nobody to ask, nothing cached, nothing stored, at the price of three calls a prompt (R23).

`EngineSession` stays the one flow. `NoWorker` stands where the worker would, so neither flow nor engine asks whether
there is one. Nothing is started, opened or kept for it: no thread, task, socket, descriptor or message.
"""

from collections.abc import Sequence

from kvbus.engines.base import Engine, EngineSession, PageArray
from kvbus.errors import PeerError

NO_HANDLE = 0
REFUSAL = "there is no worker: nothing is stored"


class NoWorker:
    """The null form of `WorkerCalls` and of `Pool`; each method answers in constant time and keeps nothing."""

    def match(self, ids: Sequence[int], salt: str) -> tuple[int, tuple[int, ...]]:
        """Return an empty prefix."""
        del ids, salt
        return NO_HANDLE, ()

    def alloc(self, handle: int, first_block: int, count: int) -> tuple[int, tuple[int, ...]] | str:
        """Refuse, as a full pool does."""
        del handle, first_block, count
        return REFUSAL

    def commit(self, write: int) -> None:
        """Raise PeerError: no write was given out."""
        raise PeerError("there is no worker, so no write can be committed", write=write)

    def abandon(self, write: int) -> None:
        """Raise PeerError: no write was given out."""
        raise PeerError("there is no worker, so no write can be abandoned", write=write)

    def release(self, handle: int) -> None:
        """Do nothing: the empty prefix holds nothing."""

    def forget(self) -> int:
        """Forget nothing, since nothing is stored."""
        return 0

    def page_array(self, page: int) -> PageArray:
        """Raise PeerError: no page was given out."""
        raise PeerError("there is no worker, so there are no pages", page=page)


def session_alone(engine: Engine) -> EngineSession:
    """Return a session that serves this engine without a worker."""
    nobody = NoWorker()
    return EngineSession(engine, engine.describe(), nobody, nobody)
