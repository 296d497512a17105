"""Faults of whoever asks: a transfer is its destination's, and ends whether its requester lives or not."""

import json

from tests.cluster.actors import Actors, prompt
from tests.cluster.stack import StackError
from tests.cluster.story import SLOW_BLOCKS

ASKER = "asker"


def _ask_apart(actors: Actors, name: str) -> tuple[str, int]:
    """Ask for a slow transfer from a container of its own; return once pages move."""
    actors.until_healthy(["a", "b"])
    settled = actors.counter("b", "transfers_settled")
    text, before = prompt(SLOW_BLOCKS), actors.orders("b")
    actors.stack.start_apart(name, "stage", "--from", "a", "--to", "b", "--budget", "60", text)
    actors.until_moving("b", before)
    return text, settled


def killed(actors: Actors) -> None:
    """The requester is killed while pages move: the transfer settles, and a later request for the same is told so."""
    text, settled = _ask_apart(actors, f"{ASKER}-killed")
    actors.stack.kill(f"{ASKER}-killed")
    actors.until_settled_unheard("b", settled)
    actors.compare("b", text, from_pages=True)
    ended = actors.transfer("a", "b", text)
    actors.row.check(ended == "settled", f"the same request again ended {ended}")


def paused(actors: Actors) -> None:
    """The requester stands still while its transfer ends, and hears of it when it goes on."""
    name = f"{ASKER}-paused"
    text, settled = _ask_apart(actors, name)
    actors.stack.fault("pause", name)
    actors.until_settled_unheard("b", settled)
    actors.stack.fault("unpause", name)
    _heard(actors, name)
    actors.compare("b", text, from_pages=True)


def stopped(actors: Actors) -> None:
    """The requester is told to stop while pages move: the transfer settles all the same."""
    text, settled = _ask_apart(actors, f"{ASKER}-stopped")
    actors.stack.fault("stop", f"{ASKER}-stopped")
    actors.until_settled_unheard("b", settled)
    actors.compare("b", text, from_pages=True)


def cut_off(actors: Actors) -> None:
    """The requester loses its network for good: the transfer settles, and a later request for the same is told so."""
    name = f"{ASKER}-cut"
    text, settled = _ask_apart(actors, name)
    actors.stack.cut(name)
    actors.until_settled_unheard("b", settled)
    actors.compare("b", text, from_pages=True)
    ended = actors.transfer("a", "b", text)
    actors.row.check(ended == "settled", f"the same request again ended {ended}")
    actors.stack.docker("rm", "--force", actors.stack.container(name))  # it may have ended by itself


def _heard(actors: Actors, name: str) -> None:
    try:
        outcome = json.loads(actors.stack.said(name).strip().splitlines()[-1])["outcome"]
    except (StackError, ValueError, IndexError) as error:
        actors.row.problems.append(f"the requester ended without a document: {error}")
        return
    actors.row.check(outcome and outcome["outcome"] == "settled", f"the requester heard {outcome}")
