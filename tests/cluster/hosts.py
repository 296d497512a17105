"""What differs between hosts: lost packets, a slow wire, clocks, addresses, models, and names that are taken."""

from tests.cluster.actors import BUDGET_S, Actors, prompt
from tests.cluster.story import BLOCKS, goes_on

LOSS = "0.05"
"""A wire that loses one packet in twenty each way is broken; TCP still gets through."""
NEW_HOST = 41
"""Nobody else's number in the network of partition.yaml."""
RELAYED_S = 0.1
"""A question and its answer through the relay: 50 ms each way."""


def packets_lost(actors: Actors) -> None:
    """One packet in twenty is lost on its way into each worker: slower, and nothing else."""
    actors.until_healthy(["a", "b"])
    rule = ("INPUT", "-p", "tcp", "-m", "statistic", "--mode", "random", "--probability", LOSS, "-j", "DROP")
    for service in ("a", "b"):
        actors.stack.filter(service, "-A", *rule)
    texts = [prompt(BLOCKS) for _ in range(3)]
    for text in texts:
        actors.transfer("a", "b", text)
        actors.compare("b", text, from_pages=False)
    actors.row.check(actors.row.settled, "no transfer settled while packets were lost")
    for service in ("a", "b"):
        actors.stack.filter(service, "-D", *rule)
    goes_on(actors, texts[0])


def slow_wire(actors: Actors) -> None:
    """All that b reads of a comes through a relay that adds 50 ms each way."""
    actors.until_healthy(["a", "b"])
    for _ in range(3):
        text = prompt(BLOCKS)
        actors.transfer("a", "b", text)
        actors.compare("b", text, from_pages=True)
    moved_s = actors.row.move_s[-1]
    actors.row.check(moved_s >= RELAYED_S, f"pages came in {moved_s:.3f} s: not through the relay")
    actors.row.notes.append(f"pages through the relay in {moved_s:.2f} s")


def clocks_differ(actors: Actors) -> None:
    """Instance a lives ten minutes ahead, b half an hour behind: no request is too old, none is too new."""
    actors.until_healthy(["a", "b"])
    there, back = prompt(BLOCKS), prompt(BLOCKS)
    for source, destination, text in (("a", "b", there), ("b", "a", back)):
        actors.transfer(source, destination, text)
        actors.compare(destination, text, from_pages=True)
    clocks = [actors.stack.ask(service, "clock")["unix_s"] for service in ("a", "b")]
    actors.row.check(clocks[0] - clocks[1] > 2_000, f"the clocks of a and b show {clocks}: they do not differ")
    goes_on(actors, back, "b", "a")


def moves_house(actors: Actors) -> None:
    """Instance a ends, and comes back under its name at another address."""
    actors.until_healthy(["a", "b"])
    text = prompt(BLOCKS)
    actors.transfer("a", "b", text)
    old = actors.stack.address("a")
    actors.stack.fault("stop", "a")
    actors.stack.docker("network", "disconnect", actors.stack.network, actors.stack.container("a"))
    new = actors.stack.host(NEW_HOST)
    actors.stack.join("a", new)
    actors.stack.fault("start", "a")
    actors.until_healthy(["a"])
    actors.row.check(actors.stack.address("a") == new != old, "a has its old address")
    goes_on(actors, text)


def another_model(actors: Actors) -> None:
    """Instance a comes back with another model: b is told so and takes nothing, until the model is the old one."""
    actors.until_healthy(["a", "b"])
    text = prompt(BLOCKS)
    actors.transfer("a", "b", text)
    actors.stack.recreate("a", overlay="model")
    actors.until_healthy(["a"])
    actors.refuse("a", "b", prompt(BLOCKS), "layout")
    actors.stack.recreate("a")
    actors.until_healthy(["a"])
    goes_on(actors, text)


def name_taken_twice(actors: Actors) -> None:
    """A second container calls itself a. Nothing of the one is taken for the other's.

    It may end by itself and say why. Where both run, which of the two lends is not promised: each transfer settles, or
    fails and says why, no answer is wrong, and once the second one has gone, all is as before.
    """
    actors.until_healthy(["a", "b"])
    texts = [prompt(BLOCKS)]
    actors.transfer("a", "b", texts[0])
    actors.stack.compose("--profile", "twin", "up", "--detach", "--no-build", "--no-deps", "twin")
    actors.until(lambda: actors.stack.health("twin") in {"healthy", "exited"}, BUDGET_S, "the second a runs or ended")
    how = actors.stack.health("twin")
    actors.row.notes.append(f"the second a: {how}, status {actors.stack.inspect('twin')['State']['ExitCode']}")
    for _ in range(3):
        texts.append(prompt(BLOCKS))
        actors.transfer("a", "b", texts[-1])
        actors.compare("b", texts[-1], from_pages=False)
    if how == "healthy":
        actors.stack.kill("twin")
    actors.stack.fault("restart", "a")
    actors.until_healthy(["a"])
    goes_on(actors, texts[-1])
