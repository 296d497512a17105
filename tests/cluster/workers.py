"""Faults of the two workers of partition.yaml, in the middle of a transfer: a lends, b reads."""

from collections.abc import Callable
from functools import partial

from tests.cluster.actors import Actors
from tests.cluster.story import goes_on, hold, in_the_middle

Fault = Callable[[Actors], None]


def cut_off(service: str) -> Fault:
    """Return the story of a worker that loses its network, and gets it back some seconds later."""

    def play(actors: Actors) -> None:
        """A worker loses its network while pages move, and gets it back some seconds later."""
        addresses: list[str] = []

        def end() -> None:
            hold(actors)
            actors.stack.join(service, addresses.pop())

        text = in_the_middle(actors, lambda: addresses.append(actors.stack.cut(service)), end)
        goes_on(actors, text)

    return play


def paused(service: str) -> Fault:
    """Return the story of a worker that stands still, all its processes at once, and goes on some seconds later."""

    def play(actors: Actors) -> None:
        """A worker stands still while pages move, all its processes at once, and goes on some seconds later."""

        def end() -> None:
            hold(actors)
            actors.stack.fault("unpause", service)

        goes_on(actors, in_the_middle(actors, partial(actors.stack.fault, "pause", service), end))

    return play


def stopped(service: str) -> Fault:
    """Return the story of a worker that is told to stop, does so in order, and is started again."""

    def play(actors: Actors) -> None:
        """A worker is told to stop while pages move, does so in order, and is started again."""
        stop, start = (partial(actors.stack.fault, verb, service) for verb in ("stop", "start"))
        text = in_the_middle(actors, stop, start)
        actors.until_healthy([service])
        goes_on(actors, text)

    return play


def killed(service: str) -> Fault:
    """Return the story of a worker that dies without a word, and is started again.

    A new run of the destination is no evidence about the old one, and the old one ended where the source cannot see it:
    so the source keeps what it lent, and says so, until it is started again itself.
    """

    def play(actors: Actors) -> None:
        """A worker dies without a word while pages move, and is started again.

        A dead reader gave no evidence: its source keeps what it lent, and says so, until it is started again itself.
        """
        kill, start = partial(actors.stack.kill, service), partial(actors.stack.fault, "start", service)
        text = in_the_middle(actors, kill, start)
        actors.until_healthy([service])
        if service == "b":
            actors.compare("b", text, from_pages=True)
            actors.check_kept("a", "b")
            actors.stack.fault("restart", "a")
            actors.until_healthy(["a"])
        goes_on(actors, text)

    return play
