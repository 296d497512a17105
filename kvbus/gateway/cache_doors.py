"""`/v1/kv_cache`: what an instance holds, and what shall be kept, let go, dropped or forgotten there."""

from collections.abc import Mapping
from typing import Final, Literal

from starlette.requests import Request
from starlette.responses import Response

from kvbus.caching import CacheAnswered, CacheAsked, CacheChangeAsked
from kvbus.gateway.answers import Problem, answer
from kvbus.gateway.asked import Held, held
from kvbus.gateway.parts import Parts
from kvbus.gateway.routing import Door, Handler, instance_of
from kvbus.gateway.transfer_words import COUNT, MESSAGES, PROMPT, SECONDS, TEXT, json_answer, problems, record_of

PATH = "/v1/kv_cache"
Action = Literal["pin", "unpin", "evict", "forget"]


def doors(parts: Parts) -> list[Door]:
    """Return the doors of caches."""
    here = CacheDoors(parts)
    return [
        Door("GET", PATH, here.show, SHOW),
        Door("POST", f"{PATH}/look", here.look, LOOK),
        Door("POST", f"{PATH}/pin", here.changer("pin"), PIN),
        Door("POST", f"{PATH}/unpin", here.changer("unpin"), UNPIN),
        Door("POST", f"{PATH}/evict", here.changer("evict"), EVICT),
        Door("POST", f"{PATH}/forget", here.changer("forget"), FORGET),
    ]


class CacheDoors:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def show(self, request: Request) -> Response:
        """Return pages and pins, member by member."""
        instance = await self._parts.transfers.served(instance_of(request))
        members = await self._parts.caches.look(instance, CacheAsked())
        return answer({"instance": instance, "members": {name: _shown(one) for name, one in members.items()}})

    async def look(self, request: Request) -> Response:
        """Return how much of a prompt is held: the fewest blocks that any member has."""
        instance, wanted, _ = await self._wanted(request, "prompt")
        members = await self._parts.caches.look(instance, CacheAsked(prompt=wanted.prompt, salt=wanted.salt))
        blocks_held = min(one.blocks_held for one in members.values())
        blocks_wanted = max(one.blocks_wanted for one in members.values())
        return answer({"instance": instance, "blocks_wanted": blocks_wanted, "blocks_held": blocks_held})

    def changer(self, action: Action) -> Handler:
        """Return the handler of one change."""
        needs = _NEEDS[action]

        async def change(request: Request) -> Response:
            instance, wanted, pin = await self._wanted(request, needs)
            asked = CacheChangeAsked(action=action, pin=pin, prompt=wanted.prompt, salt=wanted.salt)
            try:
                blocks = await self._parts.caches.change(instance, asked)
            finally:  # also where one member refuses, or is silent: others have dropped it
                if action in {"evict", "forget"}:  # it may be brought again, whatever was said of it before
                    self._parts.transfers.gate(instance).forget_ended()
            return answer({"instance": instance, "action": action, "pin": pin, "blocks": blocks})

        return change

    async def _wanted(self, request: Request, needs: str) -> tuple[str, Held, str]:
        """Return instance, prompt and pin of a body; Problem 400 where what is needed is not there."""
        body = await self._parts.bodies.json_object(request)
        try:
            wanted = held(body)
        except ValueError as error:
            raise Problem(400, str(error)) from error
        if needs == "prompt" and wanted.prompt is None:
            raise Problem(400, "prompt or messages is missing, or empty")
        if needs == "pin" and not wanted.pin:
            raise Problem(400, "pin is missing: the name that pinning gave")
        instance = await self._parts.transfers.served(instance_of(request), wanted.destination)
        return instance, wanted, wanted.pin or wanted.name


_NEEDS: Final[Mapping[Action, str]] = {"pin": "prompt", "unpin": "pin", "evict": "prompt", "forget": ""}


def _shown(one: CacheAnswered) -> dict[str, object]:
    return {
        "pages": one.pages,
        "pages_free": one.pages_free,
        "pages_cached": one.pages_cached,
        "pages_lent": one.pages_lent,
        "pages_quarantined": one.pages_quarantined,
        "pins": [row.model_dump() for row in one.pins],
    }


# ----------------------------------------------------------------------------------------------------------- OpenAPI

_PIN_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 64}
_MEMBER: Final = record_of(
    {
        "pages": COUNT,
        "pages_free": COUNT,
        "pages_cached": COUNT,
        "pages_lent": COUNT,
        "pages_quarantined": COUNT,
        "pins": {"type": "array", "items": record_of({"pin": _PIN_NAME, "blocks": COUNT, "held_s": SECONDS})},
    }
)
_CHANGED: Final = record_of({"instance": TEXT, "action": TEXT, "pin": TEXT, "blocks": COUNT})
_FIELDS: Final = {
    "prompt": PROMPT,
    "messages": MESSAGES,
    "cache_salt": {"type": ["string", "null"], "maxLength": 200},
    "destination": {"type": ["string", "null"], "maxLength": 200, "description": "Where the path names no instance."},
}
_PIN_FIELD: Final = {"pin": {"type": ["string", "null"], "maxLength": 64, "description": "The pin's name."}}
_PROBLEMS: Final = problems(
    s400="The body does not fit.",
    s404="This gateway serves no such instance.",
    s408="The body came too slowly.",
    s409="A member refuses, and says why.",
    s413="The body is too long.",
    s503="The bus is away, or a member does not answer.",
)


def _asking(name: str, summary: str, fields: Mapping[str, object], schema: Mapping[str, object]) -> dict[str, object]:
    body = {"type": "object", "properties": dict(fields)}
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": json_answer("What that came to.", schema), **_PROBLEMS},
    }


SHOW: Final = {
    "operationId": "show_cache",
    "summary": "Pages by state, and the prompts that are pinned, for each member of an instance.",
    "responses": {
        "200": json_answer(
            "The members by name.",
            record_of({"instance": TEXT, "members": {"type": "object", "additionalProperties": _MEMBER}}),
        ),
        **_PROBLEMS,
    },
}
LOOK: Final = _asking(
    "look_in_cache",
    "How many whole blocks of a prompt are held.",
    _FIELDS,
    record_of({"instance": TEXT, "blocks_wanted": COUNT, "blocks_held": COUNT}),
)
PIN: Final = _asking(
    "pin_in_cache",
    "Keep the blocks of a prompt that are held from being evicted, until they are unpinned or the worker ends.",
    _FIELDS | _PIN_FIELD,
    _CHANGED,
)
UNPIN: Final = _asking("unpin_in_cache", "Let a pin go.", {"pin": _PIN_NAME} | _FIELDS, _CHANGED)
EVICT: Final = _asking("evict_from_cache", "Drop the blocks of a prompt that nobody holds.", _FIELDS, _CHANGED)
FORGET: Final = _asking(
    "forget_cache",
    "Forget all names: for when the model's weights have changed, and the same names mean other content.",
    {"destination": _FIELDS["destination"]},
    _CHANGED,
)
