"""What OpenAPI says of the doors of the OpenAI API."""

from collections.abc import Mapping
from typing import Final

from kvbus.gateway.transfer_words import COUNT, MESSAGES, PROMPT, TEXT, json_answer, record_of

_TEXT_OR_NULL: Final = {"type": ["string", "null"]}
_ERROR: Final = record_of(
    {"error": record_of({"message": TEXT, "type": TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL})}
)
_USAGE: Final = record_of(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": record_of({"cached_tokens": COUNT}),
    }
)
_EVENT: Final = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": TEXT},
    "description": "An event of the stream; its data is a chunk of the answer, or the API's end mark.",
}
_REASON: Final = {"enum": ["stop", "length"]}
_NOTHING: Final = {"type": "null"}
_COMMON: Final[Mapping[str, object]] = {
    "model": {
        "type": ["string", "null"],
        "maxLength": 200,
        "description": "model@instance, or an instance; a model alone where one instance serves it.",
    },
    "max_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1, "description": "Of the answer."},
    "stop": {
        "oneOf": [
            {"type": "string", "minLength": 1, "maxLength": 256},
            {"type": "array", "maxItems": 4, "items": {"type": "string", "minLength": 1, "maxLength": 256}},
            _NOTHING,
        ],
        "description": "The answer ends before these.",
    },
    "stream": {"type": ["boolean", "null"], "description": "Server-sent events, a piece of the answer each."},
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": {"type": ["boolean", "null"]}},
        "description": "With stream only: include_usage adds the usage as a last chunk.",
    },
    "temperature": {"enum": [0, None], "description": "Engines answer greedily here."},
    "n": {"enum": [1, None], "description": "One answer."},
    "kv_transfer_params": {
        "type": ["object", "null"],
        "description": "A hint: with kvbus: {source, budget_s} what that instance has of the prompt is brought first.",
    },
    "cache_salt": {"type": ["string", "null"], "maxLength": 200, "description": "Keeps tenants' pages apart."},
}


def _errors(**descriptions: str) -> dict[str, object]:
    return {status.removeprefix("s"): json_answer(text, _ERROR) for status, text in descriptions.items()}


_ERRORS: Final = _errors(
    s400="The body is no such request, asks for what is not supported, or means several instances.",
    s404="There is no such model, or its engine cannot be asked from this gateway.",
    s408="The body came too slowly.",
    s413="The body is too long.",
    s429="Too many answers wait for this engine.",
    s503="The engine is away, or failed.",
)


def _asks(required: str, fields: Mapping[str, object], example: Mapping[str, object]) -> dict[str, object]:
    schema = {"type": "object", "required": [required], "properties": {**fields, **_COMMON}, "examples": [example]}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _answers(operation: str, choice: Mapping[str, object]) -> dict[str, object]:
    record = record_of(
        {
            "id": TEXT,
            "object": {"const": operation},
            "created": COUNT,
            "model": TEXT,
            "choices": {"type": "array", "items": record_of({"index": COUNT, **choice}), "minItems": 1},
            "usage": _USAGE,
        }
    )
    content = {"application/json": {"schema": record}, "text/event-stream": {"schema": _EVENT}}
    return {"200": {"description": "The answer; with stream its pieces.", "content": content}, **_ERRORS}


_MODEL_RECORD: Final = record_of({"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT})

COMPLETE: Final = {
    "operationId": "complete",
    "summary": "Continue a text, as the OpenAI API does.",
    "description": "cached_tokens tells how much of the prompt came from pages, staged or computed before.",
    "requestBody": _asks("prompt", {"prompt": PROMPT}, {"prompt": "Once upon a time", "max_tokens": 4}),
    "responses": _answers("text_completion", {"text": TEXT, "logprobs": _NOTHING, "finish_reason": _REASON}),
}
CHAT: Final = {
    "operationId": "chat",
    "summary": "Give the next turn of a chat, as the OpenAI API does.",
    "description": "Sampling, tools, log probabilities and several choices are refused, not ignored.",
    "requestBody": _asks(
        "messages",
        {
            "messages": MESSAGES,
            "max_completion_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1},
        },
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    ),
    "responses": _answers(
        "chat.completion",
        {
            "message": record_of({"role": {"const": "assistant"}, "content": TEXT, "refusal": _NOTHING}),
            "logprobs": _NOTHING,
            "finish_reason": _REASON,
        },
    ),
}
MODELS: Final = {
    "operationId": "models",
    "summary": "What can be asked here: each instance as model@instance and under its own name.",
    "description": "An instance whose worker has no local socket on this gateway's host is not among them.",
    "responses": {
        "200": json_answer(
            "The names.", record_of({"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL_RECORD}})
        ),
        **_errors(s404="This gateway serves no such instance.", s503="The registry of instances cannot be read."),
    },
}
MODEL: Final = {
    "operationId": "model",
    "summary": "Whether a name stands for an engine that can be asked here.",
    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}],
    "responses": {
        "200": json_answer("It does.", _MODEL_RECORD),
        **_errors(
            s400="It stands for several.",
            s404="It stands for none.",
            s503="Nobody can say now: the instance is not registered, or the registry cannot be read.",
        ),
    },
}
