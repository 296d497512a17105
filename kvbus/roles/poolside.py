"""The pool of this worker as its roles see it: one layout, its memory, its index, its lender, and its names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbus.errors import ConfigError
from kvbus.grants import PoolGeometry
from kvbus.ledger.types import LeaseFailure
from kvbus.names import page_names
from kvbus.pool.allocator import PageAllocator
from kvbus.pool.digests import DigestMode
from kvbus.pool.index import ReuseIndex
from kvbus.pool.layout import PageLayout
from kvbus.pool.lender import PoolLender
from kvbus.pool.memory import PoolMemory
from kvbus.pool.pins import PinSet
from kvbus.pool.prompts import Prompts
from kvbus.pool.refusals import over_cap


@dataclass(frozen=True, slots=True)
class PoolSide:
    """Everything about the pool of one rank. `tokens_max` is the longest prompt that it keeps room for."""

    layout: PageLayout
    memory: PoolMemory
    allocator: PageAllocator
    lender: PoolLender
    tokens_max: int
    vocab_size: int
    lent_cap_pages: int
    prompts: Prompts = field(default_factory=Prompts)

    @classmethod
    def create(
        cls,
        layout: PageLayout,
        *,
        pages: int,
        tokens_max: int,
        vocab_size: int,
        epoch: int,
        digests: DigestMode = DigestMode.OFF,
    ) -> "PoolSide":
        """Make the pool; ConfigError where it could not hold the engine's longest prompt beside anything lent."""
        longest = math.ceil(tokens_max / layout.block_tokens)
        cap = pages - longest
        if cap < 1:
            raise ConfigError(
                f"pool too small: {pages} pages, the longest prompt of {tokens_max} tokens alone takes {longest}; "
                f"give at least {2 * longest} (--pages), or allow shorter prompts only (--prompt-tokens-max)",
                pages=pages,
                page_bytes=layout.page_bytes,
            )
        memory = PoolMemory.create(layout, pages, epoch)
        memory.digests.turn_on(digests)
        allocator = PageAllocator(pages)
        lender = PoolLender(
            memory, allocator, ReuseIndex(), name=f"pool{layout.rank}", rank=layout.rank, lent_cap_pages=cap
        )
        return cls(layout, memory, allocator, lender, tokens_max, vocab_size, cap)

    def names(self, token_ids: Sequence[int], salt: str) -> tuple[bytes, ...]:
        """Return the page names of a prompt's whole blocks in this pool's namespace."""
        return page_names(self.layout.namespace(salt), token_ids, self.layout.block_tokens)

    def unfit(self, token_ids: Sequence[int], instance: str) -> str | None:
        """Return why a prompt cannot be taken: too long for the engine or the pool, or an id that no token has."""
        tokens = len(token_ids)
        if tokens > self.tokens_max:
            return (
                f"the prompt has {tokens} tokens, {instance} keeps room for {self.tokens_max}: shorten it, or start "
                f"{instance} with a larger --prompt-tokens-max"
            )
        blocks = tokens // self.layout.block_tokens
        if blocks > self.lent_cap_pages:
            return f"the prompt needs {blocks} pages, {instance} takes at most {self.lent_cap_pages} for peers"
        if max(token_ids, default=0) >= self.vocab_size:
            return f"token id {max(token_ids)} is out of range: {instance}'s vocabulary has {self.vocab_size} tokens"
        return None

    def kept(self, pages: Sequence[int]) -> PinSet | LeaseFailure:
        """Pin cached pages for a peer until the set is dropped; or say why not, with nothing changed.

        What is pinned for peers counts under their cap as what is lent does: the question comes before the pin (P26).
        """
        pages = tuple(dict.fromkeys(pages))  # a page that stood twice would count twice, and be let go once
        fresh = self.allocator.unclaimed(pages)
        if fresh and self.allocator.claimed + fresh > self.lent_cap_pages:
            return over_cap(fresh, self.lent_cap_pages, self.allocator.statistics())
        pins = self.lender.pin_set()
        pins.add(pages)
        return pins

    def geometry(self) -> PoolGeometry:
        """Return where things are, for grants."""
        memory = self.memory
        return PoolGeometry(
            base=memory.address,
            length_bytes=memory.length_bytes,
            generations_offset=memory.generations_offset,
            pages_offset=memory.pages_offset,
            page_stride=memory.page_stride,
            page_bytes=self.layout.page_bytes,
            page_count=memory.page_count,
        )
