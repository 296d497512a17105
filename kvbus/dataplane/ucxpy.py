"""The UCX reader over ucx-py instead of our own binding, for whoever has it and wants it.

It speaks UCX's own wire, so it reads from members that run `ucx`, and lends to them; grants do not tell the two apart.
What ucx-py cannot do is end an access: it closes an endpoint by flushing, and a peer that stands still never answers a
flush. So the only evidence here is that every get of an attempt has ended by itself. Where that does not come, the
attempt is told to be uncertain, its lease stays, that peer gets no more orders from this process, and the process may
have to be killed in the end, which is evidence too. Nor are there notices in band: ucx-py has one number for messages,
which is not ours, and the bus tells sources anyway.

How far this was tested: against a stand-in with the same calls over real sockets, between processes, with peers that
stand still and die. Not against ucx-py itself, which is not to be had where kvbus is built.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvbus.dataplane.reader import Isolation, Outbox, Progress
from kvbus.dataplane.reading import LocalPool, plan
from kvbus.dataplane.ucp_context import DEFAULT_SETTINGS, PINNED_SETTINGS
from kvbus.dataplane.ucxpy_api import Api, load
from kvbus.dataplane.ucxpy_thread import UcxPyThread
from kvbus.errors import BackendError
from kvbus.grants import UcxAccess
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import Change, Order, SubmissionRejectedError
from kvbus.pool.memory import PoolMemory

LOOK_S = 0.002
"""Between two looks whether all attempts have ended, in a shutdown."""


@dataclass(frozen=True, slots=True)
class UcxPyStatistics:
    """Counters of the reader; `stuck` names the peers whose gets did not end when they were asked to."""

    gets: int
    length_bytes: int
    endpoints: int
    attempts: int
    stuck: tuple[str, ...]
    failure: str


class UcxPyReader:
    """Reads granted pages through ucx-py; a `Backend`, and what makes the pool readable for peers.

    `wake` is called from its thread: the caller makes that safe, and it must not raise. All methods belong to one
    thread, the holder's. `api` stands in for ucx-py in tests.
    """

    def __init__(
        self,
        *,
        wake: Callable[[], None],
        settings: Mapping[str, str] | None = None,
        rate_limit_bytes_s: float | None = None,
        cancel_wait_s: float = 1.0,
        api: Api | None = None,
    ) -> None:
        self._wake = wake
        self._config = {**DEFAULT_SETTINGS, **(settings or {}), **PINNED_SETTINGS}
        self._rate_limit_bytes_s = rate_limit_bytes_s
        self._cancel_wait_s = cancel_wait_s
        self._api = api
        self._outbox = Outbox(wake)
        self._isolation = Isolation()
        self._pools: dict[int, PoolMemory] = {}
        self._thread: UcxPyThread | None = None
        self._is_shut = self._has_told_failure = False

    def __repr__(self) -> str:
        return f"<UcxPyReader attempts={len(self._outbox.unfinished())} stuck={list(self.statistics().stuck)}>"

    @property
    def name(self) -> str:
        """The transport's name, as grants spell it: on the wire it is UCX like any other."""
        return "ucx"

    @property
    def failure(self) -> str:
        """What ended the thread, if anything did."""
        return self._thread.failure if self._thread else ""

    def start(self) -> None:
        """Import ucx-py and open UCX on a thread of its own; ConfigError or BackendError where that cannot be."""
        api = self._api or load()
        try:
            self._thread = UcxPyThread(
                api,
                self._outbox,
                config=self._config,
                rate_limit_bytes_s=self._rate_limit_bytes_s,
                cancel_wait_s=self._cancel_wait_s,
                wake=self._wake,
            )
            self._thread.call(self._thread.open)
        except Exception as error:
            self.release_hold()
            raise BackendError(f"ucx-py could not open UCX: {error!r}") from error

    def register(self, memory: PoolMemory, rank: int = 0) -> UcxAccess:
        """Let UCX use this rank's pool, and return what a grant needs to reach it; the mapping stays from here on."""
        if rank in self._pools:
            raise ValueError(f"rank {rank} has a pool already")
        if self._thread is None:
            raise BackendError("the ucx-py thread was not started")
        memory.export()
        thread, access = self._thread, list[UcxAccess]()
        thread.call(lambda: access.append(thread.register(memory)))
        self._pools[rank] = memory
        return access[0]

    def submit(self, order: Order) -> None:
        """Start reading the granted pages; SubmissionRejectedError where nothing has escaped yet."""
        memory, thread = self._pools.get(order.view.rank), self._thread
        if self._is_shut:
            raise SubmissionRejectedError(FailureClass.SHUTDOWN, "the reader is shut down")
        if memory is None or thread is None:
            text = f"no pool is registered for rank {order.view.rank}"
            raise SubmissionRejectedError(FailureClass.TRANSPORT, text)
        checked = plan(order, LocalPool.of(memory), self.name)
        if self._isolation.refuses(order.peer, checked.grant.lender_epoch):
            raise SubmissionRejectedError(FailureClass.PEER_LOST, f"{order.peer} is isolated in this epoch")
        progress = Progress(order, checked)
        self._outbox.open(progress.pair)
        if not thread.post(partial(thread.start, progress, memory), partial(thread.dropped, progress)):
            self._outbox.withdraw(progress.pair)
            raise SubmissionRejectedError(FailureClass.TRANSPORT, self.failure or "the ucx-py thread does not run")

    def changes(self) -> Sequence[Change]:
        """Return and forget what changed, oldest first; BackendError, once, where the thread has failed."""
        if self.failure and not self._has_told_failure:
            self._has_told_failure = True
            raise BackendError(self.failure)
        return self._outbox.drain()

    def cancel(self, ticket: int, attempt: int) -> None:
        """Post nothing more of that attempt; it ends once what is under way has ended, however long that takes."""
        pair = (ticket, attempt)
        if self._outbox.first_cancel(pair):
            self._stop(FailureClass.CANCELLED, "cancelled", pair=pair)

    def isolate(self, peer: str) -> None:
        """Refuse that peer in every epoch seen so far, and post nothing more to it; its connection stays open."""
        self._isolation.isolate(peer)
        self._stop(FailureClass.PEER_LOST, f"{peer} was isolated", peer=peer)

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """Post nothing more; return the attempts that still owe evidence. May be called again."""
        self._is_shut = True
        self._stop(FailureClass.SHUTDOWN, "the reader was shut down")
        never, ends_at = threading.Event(), time.monotonic() + budget_s
        while self._outbox.unfinished() and time.monotonic() < ends_at:
            never.wait(LOOK_S)
        return self._outbox.unfinished()

    def release_hold(self) -> None:
        """End the thread, and close UCX where every peer answers; within the thread's own bounds."""
        if self._thread is not None:
            self._thread.close()

    def statistics(self) -> UcxPyStatistics:
        """Return the counters as they stand."""
        thread = self._thread
        links = tuple(thread.links.values()) if thread else ()
        return UcxPyStatistics(
            gets=thread.gets if thread else 0,
            length_bytes=thread.length_bytes if thread else 0,
            endpoints=len(links),
            attempts=len(self._outbox.unfinished()),
            stuck=tuple(sorted({link.peer for link in links if link.is_stuck})),
            failure=self.failure,
        )

    def _stop(
        self, failure: FailureClass, text: str, *, pair: tuple[int, int] | None = None, peer: str | None = None
    ) -> None:
        if self._thread is not None:
            self._thread.post(partial(self._thread.stop, failure, text, pair=pair, peer=peer))
