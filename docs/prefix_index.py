"""A router's view: which instance already holds the longest prefix of a prompt. Needs running `kvbus bridge`s.

`kvbus bridge vllm-events` tells on the bus which blocks each vLLM server's own cache takes up and drops. This keeps an
index of them, and answers for a prompt's token ids: python docs/prefix_index.py 1 2 3 … prints one line per instance.
An index is a hint: it may be late by a moment, and a wrong one costs a prefill, never a wrong answer.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvbus.blocks import BlockChange, BlocksChanged, BlocksUnseen, prompt_names
from kvbus.commands.common import connect
from kvbus.events import Event
from kvbus.subscriber import Seen, Subscriber

READ_S = 2.0


@dataclass
class Held:
    """What one stream of one instance has said, under one epoch, up to one sequence."""

    epoch: int = 0
    sequence: int = 0
    block_tokens: int = 0
    names: dict[tuple[bytes, str, int], bytes] = field(default_factory=dict)
    counts: Counter[bytes] = field(default_factory=Counter)

    def forget(self) -> None:
        """Know nothing any more."""
        self.names.clear()
        self.counts.clear()

    def take(self, change: BlockChange) -> None:
        """Take one change."""
        if change.change == "cleared":
            self.forget()
            return
        if change.change == "stored":
            self.block_tokens = change.block_tokens
        for place, hash_ in enumerate(change.hashes):
            key = (hash_, change.medium, change.group)
            old = self.names.pop(key, b"")
            self.counts[old] -= 1
            if self.counts[old] <= 0:
                del self.counts[old]
            if change.change == "stored" and change.names and change.names[place]:
                self.names[key] = change.names[place]
                self.counts[change.names[place]] += 1


class PrefixIndex:
    """Blocks by instance and stream; `take` events in the order in which a Subscriber yields them."""

    def __init__(self, model: str = "") -> None:
        self.model = model
        self.streams: dict[tuple[str, str], Held] = {}

    def take(self, event: Event) -> None:
        """Take one event."""
        header, body = event.header, event.body
        held = self.streams.setdefault((header.i, header.m), Held())
        if header.e != held.epoch or header.s != held.sequence + 1:
            held.forget()  # another run, or something is missing: what was said before counts no more
        held.epoch, held.sequence = header.e, header.s
        if isinstance(body, BlocksUnseen):
            held.forget()
        elif isinstance(body, BlocksChanged):
            for change in body.changes:
                held.take(change)

    def prefixes(self, tokens: Sequence[int]) -> dict[str, int]:
        """Return how many tokens of the prompt's beginning each instance holds."""
        found: dict[str, int] = {}
        for (instance, _), held in self.streams.items():
            blocks = 0
            if held.block_tokens:
                for name in prompt_names(tokens, held.block_tokens, model=self.model):
                    if name not in held.counts:
                        break
                    blocks += 1
            found[instance] = max(found.get(instance, 0), blocks * held.block_tokens)
        return found


async def main() -> None:
    tokens = [int(word) for word in sys.argv[1:]]
    bus = await connect("", "", "kv", name="prefix-index")
    index = PrefixIndex()
    try:
        async with asyncio.timeout(READ_S), aclosing(Subscriber(bus).blocks()) as items:
            async for item in items:
                if isinstance(item, Seen):
                    index.take(item.event)
    except TimeoutError:  # a router would read on for as long as it lives
        pass
    finally:
        await bus.close()
    for instance, held in sorted(index.prefixes(tokens).items(), key=lambda one: -one[1]):
        print(f"{instance} holds {held} of {len(tokens)} tokens")


if __name__ == "__main__":
    asyncio.run(main())
