"""The application: every door of the gateway, behind one handler for problems.

A module adds doors by having `doors(parts) -> list[Door]` and by standing in MODULES; OpenAPI and /docs follow.
"""

from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from kvbus.gateway import cache_doors, health_doors, transfer_doors
from kvbus.gateway.answers import Problem, http_error_answer, internal_error_answer, problem_answer
from kvbus.gateway.guard import PageGuard, is_loopback
from kvbus.gateway.openapi import description_doors
from kvbus.gateway.parts import Parts
from kvbus.gateway.routing import DoorModule

MODULES: Final[tuple[DoorModule, ...]] = (transfer_doors, cache_doors, health_doors)
"""In the order in which their paths are matched."""


def application(parts: Parts) -> Starlette:
    """Return the ASGI application of a gateway whose parts run."""
    return Starlette(
        routes=routes(parts),
        middleware=[Middleware(PageGuard, loopback=is_loopback(parts.settings.host))],
        exception_handlers={
            Problem: problem_answer,
            HTTPException: http_error_answer,
            Exception: internal_error_answer,
        },
    )


def routes(parts: Parts) -> list[BaseRoute]:
    """Return all routes, the description of the others last."""
    doors = [door for module in MODULES for door in module.doors(parts)]
    return [route for door in (*doors, *description_doors(doors)) for route in door.routes()]
