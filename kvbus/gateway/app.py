"""The application: every door of the gateway, behind one handler for problems.

A module adds doors by having `doors(parts) -> list[Door]` and by standing in MODULES; OpenAPI and /docs follow.
"""

from collections.abc import Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from kvbus.gateway import cache_doors, health_doors, metrics_doors, openai_doors, page_doors, transfer_doors
from kvbus.gateway.answers import Problem, http_error_answer, internal_error_answer, problem_answer
from kvbus.gateway.guard import PageGuard, is_loopback
from kvbus.gateway.metering import Metering
from kvbus.gateway.openapi import description_doors
from kvbus.gateway.parts import Parts
from kvbus.gateway.routing import Door, DoorModule
from kvbus.gateway.traced import Traced

MODULES: Final[tuple[DoorModule, ...]] = (
    transfer_doors,
    cache_doors,
    health_doors,
    metrics_doors,
    openai_doors,
    page_doors,
)
"""In the order in which their paths are matched."""


def application(parts: Parts) -> Starlette:
    """Return the ASGI application of a gateway whose parts run."""
    every = doors(parts)
    paths: dict[object, str] = {door.handler: door.path for door in every}
    return Starlette(
        routes=routes(every),
        middleware=[
            Middleware(Traced, routes=paths),
            Middleware(Metering, counts=parts.requests, routes=paths),
            Middleware(PageGuard, loopback=is_loopback(parts.settings.host)),
        ],
        exception_handlers={
            Problem: problem_answer,
            HTTPException: http_error_answer,
            Exception: internal_error_answer,
        },
    )


def doors(parts: Parts) -> list[Door]:
    """Return all doors, the description of the others last."""
    described = [door for module in MODULES for door in module.doors(parts)]
    return [*described, *description_doors(described)]


def routes(every: Sequence[Door]) -> list[BaseRoute]:
    """Return the routes of doors, in their order."""
    return [route for door in every for route in door.routes()]
