"""What OpenAPI says of `/v1/kv_transfer`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from kvbus.gateway.gate import GateStatistics

HASH: Final = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
COUNT: Final = {"type": "integer", "minimum": 0}
SECONDS: Final = {"type": "number", "minimum": 0}
TEXT: Final = {"type": "string"}


def record_of(properties: Mapping[str, object]) -> dict[str, object]:
    """Return the schema of an object that has exactly these properties, all of them."""
    return {
        "type": "object",
        "required": list(properties),
        "properties": dict(properties),
        "additionalProperties": False,
    }


def json_answer(description: str, schema: Mapping[str, object]) -> dict[str, object]:
    """Return an OpenAPI response with a JSON body."""
    return {"description": description, "content": {"application/json": {"schema": dict(schema)}}}


def problems(**descriptions: str) -> dict[str, object]:
    """Return the responses that say what is wrong, by status: `problems(s400="…")`."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {status.removeprefix("s"): json_answer(text, schema) for status, text in descriptions.items()}


PROBLEM: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": TEXT},
    "description": "What is wrong, in a sentence; some problems name more beside it.",
}

_MESSAGE: Final = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"type": "string", "minLength": 1, "maxLength": 32}, "content": TEXT},
}
MESSAGES: Final = {
    "type": ["array", "null"],
    "items": _MESSAGE,
    "description": "Chat messages; they win over prompt.",
}
PROMPT: Final = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}},
        {"type": "null"},
    ],
    "description": "Text, or token ids.",
}
_BODY: Final = {
    "type": "object",
    "required": ["source"],
    "properties": {
        "source": {
            "type": "string",
            "minLength": 1,
            "description": "The instance to take KV from: its name or base URL. It is looked up, never fetched.",
        },
        "messages": MESSAGES,
        "prompt": PROMPT,
        "model": {
            "type": ["string", "null"],
            "maxLength": 200,
            "description": "Part of what a repeat is known by; which model an instance runs is its own matter.",
        },
        "cache_salt": {"type": ["string", "null"], "maxLength": 200, "description": "Keeps tenants' pages apart."},
        "destination": {"type": ["string", "null"], "maxLength": 200, "description": "Where the path names none."},
        "on_miss": {
            "enum": ["prefill", "partial", "fail", None],
            "description": "What the source does about blocks that it lacks: compute them (the default), lend what "
            "it has, or fail.",
        },
        "budget_s": {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "maximum": 3600,
            "description": "Seconds that the transfer may take; 30 unless given.",
        },
    },
    "examples": [{"source": "a", "prompt": "Once upon a time"}],
}
_ANSWER: Final = record_of(
    {
        "status": {"enum": ["accepted", "deduped", "skipped_busy"]},
        "request_hash": HASH,
        "destination": TEXT,
        "transfer": TEXT,
        "reason": TEXT,
        "deduped": {"type": "boolean"},
    }
)
_RECORD: Final = record_of(
    {
        "request_hash": HASH,
        "status": {"enum": ["asking", "queued", "running", "transferred", "failed", "cancelled"]},
        "transfer": TEXT,
        "source": TEXT,
        "destination": TEXT,
        "model": TEXT,
        "accepted_unix_s": {"type": "number"},
        "step": TEXT,
        "reason": TEXT,
        "failure": TEXT,
        "repeats": COUNT,
        "evidence": {"type": "array", "items": TEXT},
        "prompt_tokens": COUNT,
        "pages": record_of({"wanted": COUNT, "held": COUNT, "moved": COUNT}),
        "bytes": COUNT,
        "timings": record_of({"queue_s": SECONDS, "grant_s": SECONDS, "move_s": SECONDS, "total_s": SECONDS}),
    }
)
_HASH_PARAMETER: Final = {"name": "request_hash", "in": "path", "required": True, "schema": HASH}
_GONE: Final = "Nothing is remembered of this hash, or this gateway serves no such instance."
_NOBODY: Final = "No instance is registered, or the registry of instances cannot be read."
_SEVERAL: Final = "Several instances have a request of this hash: name one in the path."

ASK: Final = {
    "operationId": "ask_transfer",
    "summary": "Ask for the KV of a prompt to be brought here from a source.",
    "requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}},
    "responses": {
        "202": json_answer("Taken on, joined to the same request, or skipped since enough is running.", _ANSWER),
        **problems(
            s400="The body is no such request.",
            s403="The source is not allowed, or several instances claim it.",
            s404="This gateway serves no such destination.",
            s408="The body came too slowly.",
            s413="The body is too long.",
            s503="The bus or the destination takes nothing now, or a source that is allowed is not registered now.",
        ),
    },
}
STATS: Final = {
    "operationId": "transfer_stats",
    "summary": "The published counters; fired = transferred + failed + inflight at every instant.",
    "responses": {
        "200": json_answer("Counters since start.", record_of({one.name: COUNT for one in fields(GateStatistics)})),
        **problems(s404="This gateway serves no such instance.", s503=_NOBODY),
    },
}
LOOK: Final = {
    "operationId": "look_at_transfer",
    "summary": "Where a transfer is, why it failed, what it moved and how long that took.",
    "parameters": [
        _HASH_PARAMETER,
        {
            "name": "wait_s",
            "in": "query",
            "schema": {"type": "number", "minimum": 0, "maximum": 30},
            "description": "Answer once it has ended, at most this much later.",
        },
    ],
    "responses": {
        "200": json_answer("The latest request of this hash.", _RECORD),
        **problems(s400="wait_s does not fit.", s404=_GONE, s409=_SEVERAL, s503=_NOBODY),
    },
}
CANCEL: Final = {
    "operationId": "cancel_transfer",
    "summary": "Ask for a transfer to stop; blocks that arrived whole are kept.",
    "parameters": [_HASH_PARAMETER],
    "responses": {
        "202": json_answer(
            "The destination knows, or will be told once it takes the request from its queue.",
            record_of({"status": {"const": "cancelling"}, "request_hash": HASH}),
        ),
        **problems(s404=_GONE, s409=f"It has ended already. {_SEVERAL}", s503="Nobody answers: nothing was stopped."),
    },
}
EVENTS: Final = {
    "operationId": "follow_transfers",
    "summary": "Steps and outcomes of all transfers as server-sent events.",
    "description": "Events are named step, outcome and lagged. The last tells that some are missing: the client read "
    "too slowly, or the log no longer holds them. Last-Event-ID, or `after`, goes on from an event.",
    "parameters": [
        {"name": "request_hash", "in": "query", "schema": HASH, "description": "Only those of one request."},
        {"name": "after", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}},
    ],
    "responses": {
        "200": {"description": "A stream that does not end.", "content": {"text/event-stream": {"schema": TEXT}}},
        **problems(s400="A parameter does not fit.", s404=_GONE, s503=f"Too many clients follow. {_NOBODY}"),
    },
}
