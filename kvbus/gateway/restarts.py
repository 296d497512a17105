"""Who has started anew: by the registry, for what an instance holds; by the facts, for what its last run left open.

An epoch is compared for equality only: which of two runs is the later one is told by when they spoke.
"""

from collections import OrderedDict
from collections.abc import Mapping

from kvbus.events import Header
from kvbus.roles.registry import Registered

MEMBERS_MAX = 10_000
"""Members whose run is known, as in the picture; whoever may speak on the bus may invent names."""


class Restarts:
    """Remembers which run of each member was seen last; synchronous."""

    def __init__(self, members_max: int = MEMBERS_MAX) -> None:
        self._members_max = members_max
        self._registered: dict[str, dict[str, int]] = {}
        self._spoke: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    def registered(self, instance: str, members: Mapping[str, Registered]) -> bool:
        """Take who is registered of an instance now; whether one of them is another run than before, or a new member.

        While nobody is, what was known stays: who comes back is compared with it.
        """
        epochs = {name: one.epoch for name, one in members.items()}
        before = self._registered.get(instance)
        if epochs:
            self._registered[instance] = epochs
        return before is not None and any(before.get(name) != epoch for name, epoch in epochs.items())

    def spoke(self, header: Header) -> bool:
        """Take a word of a member; whether it is the first of another run than the one that spoke before."""
        key = header.i, header.m
        epoch, last_ns = self._spoke.get(key, (header.e, -1))
        if epoch != header.e and header.t <= last_ns:
            return False  # a late word of the run before
        self._spoke[key] = header.e, max(header.t, last_ns)
        self._spoke.move_to_end(key)
        if len(self._spoke) > self._members_max:
            self._spoke.popitem(last=False)
        return epoch != header.e

    def forget(self, instance: str) -> None:
        """Forget what the registry said of an instance."""
        self._registered.pop(instance, None)
