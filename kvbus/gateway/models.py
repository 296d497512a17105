"""Which instance a model's name means: `model@instance` and the instance's own name always, the model's if one has it.

Several instances may serve the same model, and KV moves between them; so whoever cares which one answers names it, in
`model` or in the path.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvbus.gateway.answers import Problem
from kvbus.gateway.parts import Parts


@dataclass(frozen=True, slots=True)
class Served:
    """A model as one instance serves it."""

    instance: str
    model: str

    @property
    def name(self) -> str:
        """The name that no other instance shares."""
        return f"{self.model}@{self.instance}"

    @property
    def names(self) -> frozenset[str]:
        """All names that may mean it."""
        return frozenset({self.name, self.instance, self.model})


async def served_models(parts: Parts, instance: str = "") -> list[Served]:
    """Return what can be asked through this gateway, of one instance or of all."""
    if (parts.transfers.instances() or {instance}) - parts.directory.instances.keys():
        await parts.directory.refresh()
    return [one for one in _registered(parts, instance) if not parts.engines.unreachable(one.instance)]


async def meant(parts: Parts, model: str, instance: str) -> Served:
    """Return the one that a name means, with the instance that the path names, if it does.

    Problem 400 where several are meant, 404 where none is, or where its engine cannot be asked from here, 503 where
    nobody can say now: the registry cannot be read, or holds nobody of the instance that the path names.
    """
    if instance:
        instance = await parts.transfers.served(instance)
    known = _registered(parts, instance)
    if not any(not model or model in one.names for one in known):
        await parts.directory.refresh()
        known = _registered(parts, instance)
    found = [one for one in known if not model or model in one.names]
    if not known:
        parts.directory.require_fresh()
    if instance and not known:
        raise Problem(503, f"no worker of {instance} is registered", retry_after_s=1)
    if not found:
        raise _missing(f"there is no model {model!r} here", known)
    reachable = [one for one in found if not parts.engines.unreachable(one.instance)]
    if not reachable:
        raise _missing(parts.engines.unreachable(found[0].instance), ())
    if len(reachable) > 1:
        text = f"model {model!r} is served by several instances" if model else "several instances are served"
        raise Problem(400, f"{text}: name one of {_listed(reachable)}", param="model", code="model_ambiguous")
    return reachable[0]


def _registered(parts: Parts, instance: str) -> list[Served]:
    """Return one entry for each instance that is registered and that this gateway speaks for."""
    names = [instance] if instance else sorted(parts.transfers.instances())
    found: list[Served] = []
    registered: Mapping[str, Mapping[str, object]] = parts.directory.instances
    for name in names:
        if registered.get(name):
            first = next(iter(parts.directory.instances[name].values()))
            found.append(Served(name, first.record.model))
    return found


def _missing(text: str, known: Iterable[Served]) -> Problem:
    listed = _listed(known)
    return Problem(404, f"{text}; there are {listed}" if listed else text, param="model", code="model_not_found")


def _listed(some: Iterable[Served]) -> str:
    return ", ".join(one.name for one in some)
