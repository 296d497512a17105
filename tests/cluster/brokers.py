"""Faults of the broker: its leader dies, stands still, stops or is cut off; its disk is full."""

from collections.abc import Callable
from functools import partial

from tests.cluster.actors import Actors, prompt
from tests.cluster.stack import Document
from tests.cluster.story import BLOCKS, SLOW_BLOCKS, hold

NODES = ("nats-1", "nats-2", "nats-3")
QUEUE = "KVB_TRANSFER"
ELECTED_S = 30.0
"""The others miss a silent leader after some seconds, and a busy machine takes its time."""
REFUSALS = ("bus_unavailable", "no instance")
"""While a broker cannot write, nothing is asked for, and registrations lapse after ten seconds."""
FILLER = "/data/filler"


def _of_the_leader(fault: Callable[[Actors, str], Callable[[], None]]) -> Callable[[Actors], None]:
    """Return the story of a fault that meets the broker which leads the work queue while pages move."""

    def play(actors: Actors) -> None:
        """The broker that leads the work queue fails while pages move and others ask, and comes back later."""
        actors.until_healthy(["a", "b"])
        texts = [prompt(BLOCKS) for _ in range(3)]
        actors.transfer("a", "b", texts[0])
        leader = _leader(actors, QUEUE)
        texts.append(prompt(SLOW_BLOCKS))
        before = actors.orders("b")
        moving = actors.ask("a", "b", texts[-1])
        actors.until_moving("b", before)
        asked = [actors.ask("a", "b", text) for text in texts[1:-1]]
        mend = fault(actors, leader)
        known = len(actors.row.ids)
        actors.await_end(moving, again=REFUSALS)
        actors.row.shown = next(iter(actors.row.ids[known:]), "")
        for one in asked:
            actors.await_end(one, again=REFUSALS)
        actors.until(lambda: _leader(actors, QUEUE, but=leader) != leader, ELECTED_S, "another broker leads")
        later = prompt(BLOCKS)
        actors.await_end(actors.ask("b", "a", later), again=REFUSALS)
        mend()
        for text in texts:
            actors.compare("b", text, from_pages=True)
        actors.compare("a", later, from_pages=True)
        actors.until(lambda: _is_whole(actors), 2 * ELECTED_S, "all three brokers follow")
        actors.row.notes.append(f"{leader} led the work queue")

    return play


def _killed(actors: Actors, leader: str) -> Callable[[], None]:
    actors.stack.kill(leader)
    return partial(actors.stack.fault, "start", leader)


def _paused(actors: Actors, leader: str) -> Callable[[], None]:
    actors.stack.fault("pause", leader)
    return partial(actors.stack.fault, "unpause", leader)


def _stopped(actors: Actors, leader: str) -> Callable[[], None]:
    actors.stack.fault("stop", leader)
    return partial(actors.stack.fault, "start", leader)


def _cut_off(actors: Actors, leader: str) -> Callable[[], None]:
    actors.stack.cut(leader)
    return partial(actors.stack.join, leader, "")


leader_killed = _of_the_leader(_killed)
leader_paused = _of_the_leader(_paused)
leader_stopped = _of_the_leader(_stopped)
leader_cut_off = _of_the_leader(_cut_off)


def _leader(actors: Actors, stream: str, *, but: str = "") -> str:
    """Return which broker leads a stream, as one of the others (or any) tells it."""
    return str(_cluster(actors, stream, but)["leader"])


def _is_whole(actors: Actors) -> bool:
    """Whether the queue's followers are all there and up to date; only the leader knows."""
    leader = _leader(actors, QUEUE)
    return all(one["current"] for one in _told_by(actors, leader, QUEUE)["replicas"])


def _cluster(actors: Actors, stream: str, but: str) -> Document:
    (teller, *_) = (name for name in NODES if name != but)
    return _told_by(actors, teller, stream)


def _told_by(actors: Actors, teller: str, stream: str) -> Document:
    told = actors.stack.fetch(teller, 8222, "/jsz?streams=1")
    streams = [one for account in told["account_details"] for one in account["stream_detail"]]
    by_name: dict[str, Document] = {one["name"]: one["cluster"] for one in streams}
    return by_name[stream]  # KeyError: it has just started, and does not know of it yet


def disk_full(actors: Actors) -> None:
    """The disk under the broker fills up while transfers are asked for; room is made, and the broker started again.

    A broker that cannot write stops storing until it is started again. What was asked for meanwhile is refused, since
    nobody is registered any more, or waits; workers keep their facts until somebody takes them.
    """
    actors.until_healthy(["a", "b"])
    before = prompt(BLOCKS)
    actors.transfer("a", "b", before)
    _on_disk(actors, f"! head -c 64M /dev/zero >{FILLER} 2>/dev/null")  # it holds 48 MB
    asked = [actors.ask("a", "b", prompt(BLOCKS)) for _ in range(3)]
    hold(actors)
    _on_disk(actors, f"rm {FILLER}")
    actors.stack.fault("restart", "nats")
    for one in asked:
        actors.await_end(one, may_be_refused=REFUSALS)
    actors.compare("b", before, from_pages=True)
    later = prompt(BLOCKS)
    actors.row.check(actors.transfer("a", "b", later) == "settled", "with room again, a transfer did not settle")
    actors.compare("b", later, from_pages=True)


def _on_disk(actors: Actors, line: str) -> None:
    """Run a line of shell where the broker's disk is mounted too."""
    actors.stack.docker("exec", actors.stack.container("disk"), "sh", "-c", line)
