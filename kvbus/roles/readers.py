"""Who a source's readers are: one process for each epoch of a member, fixed before anything is lent to it (P4, P6)."""

from collections.abc import Callable

from kvbus.events import LendRequested
from kvbus.ledger.facts import FailureClass
from kvbus.parts import ProcessIdentity
from kvbus.processes import ProcessWatch, same_host

READERS_KNOWN_MAX = 4_096
"""Reader processes remembered; as many as leases can be lent at once."""

Who = tuple[str, str, int]
"""Instance, member and epoch."""


class KnownReaders:
    """Remembers which process a reader is, and watches it where it is of this host.

    A reader of another host ends its leases by its own word only. `is_served` tells whether anything is lent to one;
    `on_death` hears, once, that one is proved dead.
    """

    def __init__(
        self, watch: ProcessWatch, *, is_served: Callable[[Who], bool], on_death: Callable[[Who], None]
    ) -> None:
        self._watch = watch
        self._is_served = is_served
        self._on_death = on_death
        self._known: dict[Who, ProcessIdentity] = {}

    def __repr__(self) -> str:
        return f"<KnownReaders {len(self._known)}>"

    def refusal(self, asked: LendRequested) -> tuple[FailureClass, str] | None:
        """Fix which process asks, or return why nothing can be lent to it."""
        key, process = asked.key, asked.process
        who = (key.instance, key.member, key.epoch)
        known = self._known.get(who)
        if known is not None:
            if known == process:
                return None
            return FailureClass.GRANT_REFUSED, "this epoch of yours was another process before"
        if len(self._known) >= READERS_KNOWN_MAX:
            for one in [one for one in self._known if not self._is_served(one)]:
                del self._known[one]
        if same_host(process) and not self._watch.watch(process, lambda: self._on_death(who)):
            return FailureClass.PEER_LOST, "your process is not on this host any more, or too many are watched"
        self._known[who] = process
        return None

    def forget(self, who: Who) -> None:
        """Forget a reader that has died."""
        self._known.pop(who, None)
