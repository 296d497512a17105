"""Prefill on behalf of a reader: the local engine computes a prompt without output, and its pages come back pinned."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from kvbus.engines.base import Prefilled
from kvbus.engines.desk import Refusal
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import LeaseFailure


class PrefillPort(Protocol):
    """The engine as the prefiller needs it."""

    async def prefill(self, ids: tuple[int, ...], salt: str, budget_s: float) -> Prefilled | Refusal:
        """Have the engine compute and store a prompt; its handle is the caller's to release."""


class HandleDesk(Protocol):
    """Where handles are released."""

    def release(self, handle: int) -> None:
        """Unpin what a handle holds."""


class Prefiller:
    """Has the engine compute prompts, and keeps each result pinned while it is used; the engine takes them in turn."""

    def __init__(self, *, port: PrefillPort, desk: HandleDesk) -> None:
        self._port = port
        self._desk = desk

    async def computed(
        self,
        token_ids: tuple[int, ...],
        salt: str,
        use: Callable[[LeaseFailure | None], Awaitable[None]],
        *,
        wait_s: float,
    ) -> None:
        """Have `use` hear None once the prompt's pages stand in the pool, pinned until it returns; else why not."""
        answer = await self._port.prefill(token_ids, salt, wait_s)
        if isinstance(answer, Refusal):  # the engine takes no such prompt: too long, or ids that it does not know
            await use(LeaseFailure(FailureClass.BAD_REQUEST, answer.text))
            return
        try:
            await use(LeaseFailure(FailureClass.LEASE_REFUSED, answer.refused) if answer.refused else None)
        finally:
            self._desk.release(answer.handle)
