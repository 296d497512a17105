"""How modules say which routes they have: a path, its methods, and what OpenAPI says of it, in one place."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvbus.gateway.parts import Parts

Handler = Callable[[Request], Awaitable[Response]]
Operation = Mapping[str, object]
"""An OpenAPI operation: summary, parameters, responses…"""

INSTANCE_PREFIX = "/instances/{instance}"
"""Put before a path, it names the instance: so each instance has a base URL of its own at one gateway."""


@dataclass(frozen=True, slots=True)
class Door:
    """One path and method. `per_instance`: it is there below each instance's base URL as well."""

    method: str
    path: str
    handler: Handler
    operation: Operation
    per_instance: bool = True

    def routes(self) -> list[Route]:
        """Return the routes of this door."""
        paths = [self.path, *([INSTANCE_PREFIX + self.path] if self.per_instance else [])]
        return [Route(path, self.handler, methods=[self.method]) for path in paths]


class DoorModule(Protocol):
    """A module that has doors."""

    def doors(self, parts: Parts) -> list[Door]:
        """Return them, in the order in which their paths are matched."""


def instance_of(request: Request) -> str:
    """Return the instance that the path names, or "" where it names none."""
    return str(request.path_params.get("instance", ""))
