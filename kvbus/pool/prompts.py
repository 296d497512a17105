"""Prompts that were asked for here, by their page names: so that a prefix can be found by one name, and moved.

A page name says nothing of the names before it, and the reuse index keeps no order. So the chains of the prompts that
were matched here or brought here are remembered, the latest ones, and how often each was asked for.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PROMPTS_MAX = 1_024
"""Chains remembered: more prefixes than a person would move one by one; the one not asked for longest is forgotten."""
NAMES_MAX = 1 << 16
"""Names in all chains together: some 5 MB, and a look through all of them takes some milliseconds."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The names of consecutive blocks from a prompt's first one on, and the salt that they stand under."""

    names: tuple[bytes, ...]
    salt: str
    uses: int = 0

    @property
    def name(self) -> bytes:
        """Its last page's name: equal ones mean equal chains, so one name stands for all of it."""
        return self.names[-1]


class Prompts:
    """The latest chains, bounded in number and in length."""

    def __init__(self, prompts_max: int = PROMPTS_MAX, names_max: int = NAMES_MAX) -> None:
        self._prompts_max = prompts_max
        self._names_max = names_max
        self._known: OrderedDict[bytes, Prefix] = OrderedDict()
        self._names = 0

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<Prompts known={len(self._known)} names={self._names}>"

    def note(self, names: Sequence[bytes], salt: str) -> None:
        """A prompt with these blocks was asked for; one without a whole block is nothing that can be moved."""
        if not names or len(names) > self._names_max:
            return
        known = self._known.pop(names[-1], None)
        if known is None:
            self._names += len(names)
        self._known[names[-1]] = Prefix(tuple(names), salt, (known.uses if known else 0) + 1)
        while len(self._known) > self._prompts_max or self._names > self._names_max:
            _, forgotten = self._known.popitem(last=False)
            self._names -= len(forgotten.names)

    def find(self, name: bytes) -> Prefix | None:
        """Return the prefix that ends with this name; the latest prompt that has it says of which salt it is."""
        for prefix in reversed(self._known.values()):
            if name in prefix.names:
                return Prefix(prefix.names[: prefix.names.index(name) + 1], prefix.salt, prefix.uses)
        return None

    def hottest(self, most: int, held: Callable[[Sequence[bytes]], int]) -> list[Prefix]:
        """Return the prefixes that are held, those most often asked for first, the latest first among equals.

        `held` says how many leading blocks of a chain are here. What a hotter one contains is not named again.
        """
        found: list[Prefix] = []
        covered: set[bytes] = set()
        latest_last = enumerate(self._known.values())
        for _, prefix in sorted(latest_last, key=lambda known: (known[1].uses, known[0]), reverse=True):
            blocks = held(prefix.names)
            if blocks and prefix.names[blocks - 1] not in covered:
                found.append(Prefix(prefix.names[:blocks], prefix.salt, prefix.uses))
                covered.update(prefix.names[:blocks])
            if len(found) >= most:
                break
        return found
