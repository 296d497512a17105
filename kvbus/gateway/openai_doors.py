"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`: engines of this host, for clients of the OpenAI API."""

import functools
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from kvbus.gateway import openai_words as words
from kvbus.gateway.answers import Problem, answer
from kvbus.gateway.models import Served, meant, served_models
from kvbus.gateway.openai_answers import Answering
from kvbus.gateway.openai_asked import UnfitError, wanted
from kvbus.gateway.openai_told import Telling, error_answer
from kvbus.gateway.parts import Parts
from kvbus.gateway.routing import Door, Handler, instance_of


def doors(parts: Parts) -> list[Door]:
    """Return the doors of the OpenAI API."""
    here = OpenaiDoors(parts)
    return [
        Door("POST", "/v1/completions", _with_errors(here.complete), words.COMPLETE),
        Door("POST", "/v1/chat/completions", _with_errors(here.chat), words.CHAT),
        Door("GET", "/v1/models", _with_errors(here.models), words.MODELS),
        Door("GET", "/v1/models/{model}", _with_errors(here.model), words.MODEL),
    ]


class OpenaiDoors:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._began_unix_s = int(time.time())

    async def complete(self, request: Request) -> Response:
        """Continue a text."""
        return await self._answer(request, is_chat=False)

    async def chat(self, request: Request) -> Response:
        """Give the next turn of a chat."""
        return await self._answer(request, is_chat=True)

    async def models(self, request: Request) -> Response:
        """List what can be asked here: each instance under its full name and its own."""
        instance = instance_of(request)
        if instance:
            instance = await self._parts.transfers.served(instance)
        served = await served_models(self._parts, instance)
        listed = [self._model(name, one) for one in served for name in (one.name, one.instance)]
        return answer({"object": "list", "data": listed})

    async def model(self, request: Request) -> Response:
        """Describe one of them."""
        name = str(request.path_params["model"])
        return answer(self._model(name, await meant(self._parts, name, instance_of(request))))

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        body = await self._parts.bodies.json_object(request)
        try:
            asked = wanted(body, is_chat=is_chat)
        except UnfitError as error:
            raise Problem(400, str(error), param=error.param) from error
        served = await meant(self._parts, asked.model, instance_of(request))
        return Answering(self._parts, asked, Telling(served, is_chat, asked.with_usage))

    def _model(self, name: str, served: Served) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._began_unix_s, "owned_by": served.instance}


def _with_errors(handler: Callable[[Request], Awaitable[Response]]) -> Handler:
    """Have a handler's problems told in the API's form."""

    @functools.wraps(handler)
    async def handled(request: Request) -> Response:
        try:
            return await handler(request)
        except Problem as problem:
            return error_answer(problem)

    return handled
