"""The counter for questions about this member's cache that come over the bus: what is held, and what shall be kept.

A pin keeps blocks from eviction until it is let go or its worker ends. Pins count toward what peers may take up, so the
engine keeps room for its longest prompt whatever is pinned (P26).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbus.caching import PINS_MAX, CacheAnswered, CacheAsked, CacheChangeAsked, CacheChanged, PinRow
from kvbus.engines.desk import Refusal
from kvbus.errors import KvbusError
from kvbus.parts import Prompt
from kvbus.pool.pins import PinSet
from kvbus.prefixes import PrefixRow
from kvbus.roles.poolside import PoolSide

HELD_MAX_S = 86_400.0
"""Longer than a day is told as a day: what an event's seconds hold."""


class Tokenizer(Protocol):
    """The local engine, as far as questions about prompts need it."""

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...] | Refusal:
        """Return a prompt's token ids, or why it has none."""


@dataclass(frozen=True, slots=True)
class _Pin:
    pins: PinSet
    since: float


class CacheDesk:
    """Answers questions about one pool. `forget` forgets all names; `on_evict` hears that something was dropped."""

    def __init__(
        self,
        *,
        pool: PoolSide,
        tokenizer: Tokenizer,
        forget: Callable[[], int],
        on_evict: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._forget = forget
        self._on_evict = on_evict
        self._clock = clock
        self._pins: dict[str, _Pin] = {}

    async def look(self, asked: CacheAsked) -> CacheAnswered:
        """Say what is held; nothing is pinned by asking."""
        names = await self._names(asked.prompt, asked.salt) if asked.prompt is not None else ()
        refusal, names = (names, ()) if isinstance(names, str) else ("", names)
        pages, now = self._pool.allocator.statistics(), self._clock()
        return CacheAnswered(
            pages=pages.pages,
            pages_free=pages.free,
            pages_cached=pages.cached,
            pages_lent=pages.claimed,
            pages_quarantined=pages.quarantined,
            pins=tuple(
                PinRow(pin=name, blocks=len(pin.pins), held_s=min(now - pin.since, HELD_MAX_S))
                for name, pin in self._pins.items()
            ),
            blocks_wanted=len(names),
            blocks_held=len(self._pool.lender.pages_held(names)),
            refusal=refusal,
            prefixes=None if asked.prefixes is None else self._hottest(asked.prefixes),
        )

    async def change(self, asked: CacheChangeAsked) -> CacheChanged:
        """Do what is asked; a refusal has changed nothing."""
        if asked.action == "unpin":
            return self._unpin(asked.pin)
        if asked.action == "forget":
            return self._forget_all()
        names = await self._names(asked.prompt, asked.salt) if asked.prompt is not None else "no prompt was given"
        if isinstance(names, str):
            return CacheChanged(refusal=names)
        return self._pin(asked.pin, names) if asked.action == "pin" else self._evict(names)

    # ------------------------------------------------------------------------------------------------------- inside

    def _pin(self, name: str, names: tuple[bytes, ...]) -> CacheChanged:
        """Pin the longest prefix that is held; a pin of this name is extended, never shortened."""
        if not name:
            return CacheChanged(refusal="a pin needs a name")
        known = self._pins.get(name)
        if known is None and len(self._pins) >= PINS_MAX:
            return CacheChanged(refusal=f"{PINS_MAX} prompts are pinned already: let one go")
        pages = self._pool.lender.pages_held(names)
        if not pages:
            return CacheChanged(refusal=f"none of the {len(names)} blocks is held: bring them first")
        fresh = self._pool.allocator.unclaimed(pages)
        if self._pool.allocator.claimed + fresh > self._pool.lent_cap_pages:
            return CacheChanged(refusal=f"{fresh} pages more than may be kept: {self._pool.lent_cap_pages} in all")
        pin = known or _Pin(self._pool.lender.pin_set(for_peer=True), self._clock())
        pin.pins.add(pages)
        self._pins[name] = pin
        return CacheChanged(blocks=len(pages), pin_is_new=known is None)

    def _unpin(self, name: str) -> CacheChanged:
        pin = self._pins.pop(name, None)
        if pin is None:
            return CacheChanged(refusal="no pin of this name is held")
        blocks = len(pin.pins)
        pin.pins.drop()
        return CacheChanged(blocks=blocks)

    def _evict(self, names: tuple[bytes, ...]) -> CacheChanged:
        freed = self._pool.lender.evict(names)
        if freed:
            self._on_evict()
        return CacheChanged(blocks=freed)

    def _forget_all(self) -> CacheChanged:
        forgotten = self._forget()
        for pin in self._pins.values():  # what they kept has no name any more
            pin.pins.drop()
        self._pins.clear()
        return CacheChanged(blocks=forgotten)

    def _hottest(self, most: int) -> tuple[PrefixRow, ...]:
        pool = self._pool
        found = pool.prompts.hottest(most, lambda names: len(pool.lender.pages_held(names)))
        return tuple(PrefixRow(name=one.name, blocks=len(one.names), uses=one.uses) for one in found)

    async def _names(self, prompt: Prompt, salt: str) -> tuple[bytes, ...] | str:
        """Return the names of a prompt's whole blocks, or why it has none."""
        if prompt.prefix is not None:
            prefix = self._pool.prompts.find(prompt.prefix)
            return prefix.names if prefix is not None else "no prefix of this name is known here"
        try:
            ids = await self._tokenizer.tokenize(prompt)
        except KvbusError as error:  # the engine went away
            return str(error)[:2_000]
        if isinstance(ids, Refusal):
            return ids.text[:2_000]
        return self._pool.names(ids, salt)
