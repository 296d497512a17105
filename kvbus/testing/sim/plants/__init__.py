"""Planted faults: small changes to the real roles, ledger, pool and data plane, one at a time, each caught by a check.

Each is a mistake that somebody could make with a line or two. `planted(name)` makes it for as long as its block runs;
`kvbus.testing.sim.mutants` plants them all, and demands that each is noticed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvbus.testing.sim.plants import admission, agreement, council, evidence, fencing, lending, memory, reading
from kvbus.testing.sim.plants.plant import Plant

PLANTS: dict[str, Plant] = {
    plant.name: plant
    for module in (evidence, reading, memory, lending, fencing, agreement, council, admission)
    for plant in vars(module).values()
    if isinstance(plant, Plant)
}
"""Every planted fault, by what it does."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Make one fault, and take it out again."""
    with PLANTS[name].planted():
        yield
