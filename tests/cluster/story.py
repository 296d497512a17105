"""What a story is, and the steps that many of them take."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster.actors import Actors, prompt

BLOCKS = 24
"""1.5 MiB: enough that pages move in several orders."""
SLOW_BLOCKS = 40
"""2.6 MB at the 0.5 MB/s of partition.yaml: about five seconds, so that there is a middle of a transfer."""
HOLD_S = 8
"""How long a fault lasts: longer than a lost peer takes to be missed, and well within the budget of a transfer."""


@dataclass(frozen=True, slots=True)
class Story:
    """One compose file, one fault; `must_settle`: no transfer may fail, whatever the evidence.

    `workers` must have all pages home in the end. `without`: services that are not started. Stories of one scene share
    their containers while all is clean: those of one file, one overlay and one `part`. Scenes are played beside each
    other, the longest first (`about_s`: on two cores with nothing else to do), but for what needs all the processors:
    `by_itself`. `quick`: one of those that CI plays.
    """

    stack: str
    fault: str
    play: Callable[[Actors], None]
    must_settle: bool = True
    overlay: str = ""
    workers: tuple[str, ...] = ("a", "b")
    without: tuple[str, ...] = ()
    quick: bool = False
    part: str = ""
    about_s: int = 20
    by_itself: bool = False

    @property
    def title(self) -> str:
        """Its name in lists and folders."""
        return f"{self.stack}, {self.fault}"

    @property
    def scene(self) -> tuple[str, str, tuple[str, ...], str]:
        """What its containers are."""
        return self.stack, self.overlay, self.without, self.part


def hold(actors: Actors, seconds: int = HOLD_S) -> None:
    """Let a fault last, as the clock of a container counts it."""
    actors.stack.tool("sleep", str(seconds))


def goes_on(actors: Actors, text: str, source: str = "a", destination: str = "b") -> None:
    """Whatever became of the transfer: all comes home, the answer is right, and another transfer settles."""
    actors.until_home([source, destination])
    actors.compare(destination, text, from_pages=False)
    later = prompt(4)
    ended = actors.transfer(source, destination, later)
    actors.row.check(ended == "settled", f"after the fault a transfer ended {ended}")
    actors.compare(destination, later, from_pages=ended == "settled")


def in_the_middle(actors: Actors, fault: Callable[[], None], end: Callable[[], None]) -> str:
    """Let a fault begin while b reads pages of a, and end; await the transfer's end, and return its prompt."""
    actors.until_healthy(["a", "b"])
    text, before = prompt(SLOW_BLOCKS), actors.orders("b")
    asked = actors.ask("a", "b", text)
    actors.until_moving("b", before)
    fault()
    end()
    known = len(actors.row.ids)
    actors.await_end(asked)
    actors.row.shown = next(iter(actors.row.ids[known:]), "")
    return text
