"""The stories: what goes wrong in each, and what must be so afterwards. Each has containers and volumes of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster.actors import Actors, prompt

BLOCKS = 24
"""1.5 MiB: enough that pages move in several orders."""
SLOW_BLOCKS = 60
"""3.9 MB at the 0.5 MB/s of partition.yaml: about eight seconds, so that there is a middle of a transfer."""


@dataclass(frozen=True, slots=True)
class Story:
    """One compose file, one fault; `must_settle`: no transfer may fail, whatever the evidence."""

    stack: str
    fault: str
    play: Callable[[Actors], None]
    must_settle: bool = True


# --------------------------------------------------------------------------------------------------------- quickstart


def nothing_goes_wrong(actors: Actors) -> None:
    """What the file's header promises."""
    actors.until_healthy(["a", "b", "gateway"])
    for source, destination in (("a", "b"), ("b", "a")):
        text = prompt(BLOCKS)
        actors.transfer(source, destination, text)
        actors.compare(destination, text, from_pages=True)
    actors.row.check(actors.stack.fetch("gateway", 8080, "/ready")["ready"], "the gateway says that it is not ready")
    doctor = actors.stack.kvbus("doctor")
    actors.row.check(doctor["ok"], f"doctor in a container: {doctor['first']}")


def worker_restarts(actors: Actors) -> None:
    """The destination is killed and comes back empty under its name; what was asked for meanwhile waits for it."""
    actors.until_healthy(["a", "b"])
    text = prompt(BLOCKS)
    actors.transfer("a", "b", text)
    actors.stack.docker("kill", "--signal", "KILL", actors.stack.container("b"))
    later = prompt(BLOCKS)
    asked = actors.ask("a", "b", later)
    actors.stack.docker("start", actors.stack.container("b"))
    actors.await_end(asked)
    actors.until_healthy(["b"])
    actors.compare("b", later, from_pages=True)
    actors.compare("b", text, from_pages=False)


# ---------------------------------------------------------------------------------------------------------- partition


def source_cut_off(actors: Actors) -> None:
    """The source loses its network while its pages are read, and gets it back some seconds later."""
    _cut("a", actors)


def destination_cut_off(actors: Actors) -> None:
    """The destination loses its network while it reads pages, and gets it back some seconds later."""
    _cut("b", actors)


def _cut(service: str, actors: Actors) -> None:
    actors.until_healthy(["a", "b"])
    text, before = prompt(SLOW_BLOCKS), actors.orders("b")
    asked = actors.ask("a", "b", text)
    actors.until_moving("b", before)
    address = actors.stack.cut(service)
    _hold(actors, 8)
    actors.stack.join(service, address)
    actors.await_end(asked)
    _goes_on(actors, text)


def source_killed(actors: Actors) -> None:
    """The source dies while its pages are read, and is started again."""
    text = _kill("a", actors)
    _goes_on(actors, text)


def destination_killed(actors: Actors) -> None:
    """The destination dies while it reads pages, and is started again.

    A new run of the destination is no evidence about the old one, and the old one ended where the source cannot see it:
    so the source keeps what it lent, and says so, until it is started again itself.
    """
    text = _kill("b", actors)
    actors.compare("b", text, from_pages=True)
    actors.check_kept("a", "b")
    actors.stack.docker("restart", actors.stack.container("a"))
    actors.until_healthy(["a"])
    _goes_on(actors, text)


def _kill(service: str, actors: Actors) -> str:
    actors.until_healthy(["a", "b"])
    text, before = prompt(SLOW_BLOCKS), actors.orders("b")
    asked = actors.ask("a", "b", text)
    actors.until_moving("b", before)
    actors.stack.docker("kill", "--signal", "KILL", actors.stack.container(service))
    actors.stack.docker("start", actors.stack.container(service))
    actors.await_end(asked)
    actors.until_healthy([service])
    return text


def _goes_on(actors: Actors, text: str) -> None:
    """Whatever became of the transfer: all comes home, the answer is right, and another transfer settles."""
    actors.until_home(["a", "b"])
    actors.compare("b", text, from_pages=False)
    later = prompt(4)
    ended = actors.transfer("a", "b", later)
    actors.row.check(ended == "settled", f"after the fault a transfer ended {ended}")
    actors.compare("b", later, from_pages=ended == "settled")


def _hold(actors: Actors, seconds: int) -> None:
    """Let a fault last, as the clock of a container counts it."""
    actors.stack.docker("run", "--rm", "--entrypoint", "sleep", "kvbus", str(seconds))


# ----------------------------------------------------------------------------------------------------- broker failover


def leader_killed(actors: Actors) -> None:
    """The broker that leads the work queue is killed while transfers are asked for, and started again."""
    actors.until_healthy(["a", "b"])
    texts = [prompt(BLOCKS) for _ in range(3)]
    actors.transfer("a", "b", texts[0])
    leader = _leader(actors, "KVB_TRANSFER")
    asked = [actors.ask("a", "b", text) for text in texts[1:]]
    actors.stack.docker("kill", "--signal", "KILL", actors.stack.container(leader))
    for one in asked:
        actors.await_end(one)
    actors.row.check(_leader(actors, "KVB_TRANSFER", but=leader) != leader, f"{leader} is dead and still leads")
    later = prompt(BLOCKS)
    actors.transfer("b", "a", later)
    actors.stack.docker("start", actors.stack.container(leader))
    for text in texts:
        actors.compare("b", text, from_pages=True)
    actors.compare("a", later, from_pages=True)
    actors.row.notes.append(f"{leader} led the work queue")


def _leader(actors: Actors, stream: str, *, but: str = "") -> str:
    """Return which broker leads a stream, as one of the others (or any) tells it."""
    (teller, *_) = (name for name in ("nats-1", "nats-2", "nats-3") if name != but)
    told = actors.stack.fetch(teller, 8222, "/jsz?streams=1")
    streams = [one for account in told["account_details"] for one in account["stream_detail"]]
    (leader,) = (one["cluster"]["leader"] for one in streams if one["name"] == stream)
    return str(leader)


STORIES = (
    Story("quickstart", "none", nothing_goes_wrong),
    Story("quickstart", "destination killed", worker_restarts),
    Story("partition", "source cut off", source_cut_off, must_settle=False),
    Story("partition", "destination cut off", destination_cut_off, must_settle=False),
    Story("partition", "source killed", source_killed, must_settle=False),
    Story("partition", "destination killed", destination_killed, must_settle=False),
    Story("broker-failover", "leader killed", leader_killed),
)
