"""`/health` and `/ready`: does this process answer, and could it serve a request now."""

from starlette.requests import Request
from starlette.responses import Response

from kvbus.gateway.answers import answer
from kvbus.gateway.parts import Parts
from kvbus.gateway.routing import Door
from kvbus.gateway.transfer_words import TEXT, json_answer, record_of
from kvbus.version import VERSION

HEALTH = {
    "operationId": "health",
    "summary": "Whether this process answers.",
    "responses": {"200": json_answer("It does.", record_of({"status": {"const": "ok"}, "version": TEXT, "bus": TEXT}))},
}
_READY = record_of({"ready": {"type": "boolean"}, "missing": {"type": "array", "items": TEXT}})
READY = {
    "operationId": "ready",
    "summary": "Whether a transfer could be served now.",
    "responses": {"200": json_answer("It could.", _READY), "503": json_answer("What is missing.", _READY)},
}


def doors(parts: Parts) -> list[Door]:
    """Return the doors of health."""
    here = HealthDoors(parts)
    return [
        Door("GET", "/health", here.health, HEALTH, per_instance=False),
        Door("GET", "/ready", here.ready, READY, per_instance=False),
    ]


class HealthDoors:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def health(self, _request: Request) -> Response:
        """Say that this process answers."""
        bus = "connected" if self._parts.bus.health().connected else "away"
        return answer({"status": "ok", "version": VERSION, "bus": bus})

    async def ready(self, _request: Request) -> Response:
        """Say whether a transfer could be served now, and what is missing."""
        missing = self._missing()
        if missing:  # what was registered a moment ago may not be known here yet
            await self._parts.directory.refresh()
            missing = self._missing()
        return answer({"ready": not missing, "missing": missing}, 503 if missing else 200)

    def _missing(self) -> list[str]:
        parts, registered = self._parts, self._parts.directory.instances
        missing = [] if parts.bus.health().connected else ["the bus is away"]
        if not parts.feed.listening:
            missing.append("the facts are not heard yet")
        if absent := sorted(set(parts.settings.instances) - registered.keys()):
            missing.append(f"not registered: {', '.join(absent)}")
        if not registered:
            missing.append("no instance is registered")
        if leaving := self._leaving():
            missing.append(f"draining: {', '.join(leaving)}")
        return missing

    def _leaving(self) -> list[str]:
        """Return who drains of those that this gateway was told to serve; of any others, only if none is left."""
        registered, served = self._parts.directory.instances, set(self._parts.settings.instances)
        leaving = {name for name, members in registered.items() if any(one.record.state for one in members.values())}
        if served:
            return sorted(leaving & served)
        return sorted(leaving) if leaving == registered.keys() else []
