"""What a completion asks for, read from a JSON body as the OpenAI API has it. Pure: it looks nothing up.

What would change the answer and cannot be had here is refused, never ignored: sampling, several choices, tools, log
probabilities. Fields that say nothing about the answer are taken and not used, and so are fields that this does not
know.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvbus.gateway.asked import NAME_LENGTH_MAX
from kvbus.gateway.hints import BUDGET_MAX_S, BUDGET_S, Hint
from kvbus.gateway.kinds import kind_of, shown
from kvbus.parts import Prompt
from kvbus.publisher import checked_prompt

TOKENS_MAX = 2**31 - 1
"""Beyond any context; the engine ends at its own."""
COMPLETION_TOKENS: Final = 16
"""The API's own default for completions."""
CHAT_TOKENS: Final = 256
"""For a chat that names no limit. The API's default is all of the context, which takes a small host minutes."""
STOPS_MAX = 4
"""The API's own limit."""
STOP_LENGTH_MAX = 256
HINT_KEY = "kvbus"
"""Our key in `kv_transfer_params`, which other engines' connectors read as well."""
_HINT: Final = f"kv_transfer_params.{HINT_KEY}"


class UnfitError(ValueError):
    """A field does not fit: `param` is its name, as the API's errors have it."""

    def __init__(self, param: str, text: str) -> None:
        super().__init__(text)
        self.param = param


@dataclass(frozen=True, slots=True)
class Wanted:
    """One answer as asked for."""

    model: str
    prompt: Prompt
    max_tokens: int
    salt: str
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool
    is_chat: bool
    hint: Hint | None = None


def wanted(body: Mapping[str, object], *, is_chat: bool) -> Wanted:
    """Return what a body asks for; UnfitError names the first field that does not fit."""
    for field, unchanged in _REFUSED.items():
        _require_unchanged(body, field, unchanged)
    stream = _flag(body, "stream")
    return Wanted(
        model=_text(body, "model"),
        prompt=_chat_prompt(body.get("messages")) if is_chat else _prompt(body.get("prompt")),
        max_tokens=_max_tokens(body, CHAT_TOKENS if is_chat else COMPLETION_TOKENS),
        salt=_text(body, "cache_salt"),
        stops=_stops(body.get("stop")),
        stream=stream,
        with_usage=_with_usage(body.get("stream_options"), stream=stream),
        is_chat=is_chat,
        hint=_hint(body.get("kv_transfer_params")),
    )


_REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (-1, 0, 1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "use_beam_search": (False,),
}
"""Fields that would change the answer, and the values that change nothing; null is always one of them."""

_REASONS: Final[Mapping[str, str]] = dict.fromkeys(
    ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    "engines answer greedily here",
) | dict.fromkeys(("n", "best_of"), "there is one answer to a prompt here")


def _require_unchanged(body: Mapping[str, object], field: str, unchanged: tuple[object, ...]) -> None:
    value = body.get(field)
    if value is None or any(_is_same(value, one) for one in unchanged):
        return
    why = f": {_REASONS[field]}" if field in _REASONS else ""
    allowed = f", or send {json.dumps(unchanged[0])}" if unchanged else ""
    got = "" if isinstance(value, list | dict) else f" {shown(value)}"
    raise UnfitError(field, f"{field}{got} is not supported{why}; leave it out{allowed}")


def _is_same(value: object, other: object) -> bool:
    """Compare so that true is no 1: JSON tells them apart."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _text(body: Mapping[str, object], field: str) -> str:
    value = body.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnfitError(field, f"{field} must be a string, got {kind_of(value)}")
    if len(value) > NAME_LENGTH_MAX:
        raise UnfitError(field, f"{field} is longer than {NAME_LENGTH_MAX} characters")
    return _unicode(field, value)


def _flag(body: Mapping[str, object], field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise UnfitError(field, f"{field} must be true or false, got {kind_of(value)}")
    return bool(value)


def _max_tokens(body: Mapping[str, object], default: int) -> int:
    given = {field: body[field] for field in ("max_tokens", "max_completion_tokens") if body.get(field) is not None}
    for field, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnfitError(field, f"{field} must be a whole number, got {kind_of(value)}")
        if not 1 <= value <= TOKENS_MAX:
            raise UnfitError(field, f"{field} must lie in 1…{TOKENS_MAX}, got {str(value)[:20]}")
        default = value
    if len(set(given.values())) > 1:
        raise UnfitError("max_tokens", "max_tokens and max_completion_tokens differ: send one of them")
    return default


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops: Sequence[object] = value if isinstance(value, list) else [value]
    if len(stops) > STOPS_MAX:
        raise UnfitError("stop", f"stop holds {len(stops)} strings, at most {STOPS_MAX} are watched for")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= STOP_LENGTH_MAX:
            text = f"stop must be a string, or a list of them, of 1…{STOP_LENGTH_MAX} characters, got {shown(stop)}"
            raise UnfitError("stop", text)
    return tuple(str(stop) for stop in stops)


def _with_usage(value: object, *, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict):
        raise UnfitError("stream_options", f"stream_options must be an object, got {kind_of(value)}")
    if not stream:
        raise UnfitError("stream_options", "stream_options is for answers that stream: send stream as well")
    return _flag(value, "include_usage")


def _hint(value: object) -> Hint | None:
    """Return where the prompt's KV may be; what other programs put beside our key is theirs."""
    if value is None:
        return None
    ours = value.get(HINT_KEY) if isinstance(value, dict) else value
    if ours is None:
        return None
    if not isinstance(ours, dict):
        text = f"kv_transfer_params must hold {HINT_KEY!r}: an object with a source, got {kind_of(ours)}"
        raise UnfitError("kv_transfer_params", text)
    budget_s = ours.get("budget_s", BUDGET_S)
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not 0 < budget_s <= BUDGET_MAX_S:
        text = f"{_HINT}.budget_s must be a number between 0 and {BUDGET_MAX_S:g}, got {shown(budget_s)}"
        raise UnfitError("kv_transfer_params", text)
    try:
        source = _text(ours, "source")
    except UnfitError as error:  # named without the way to it
        raise UnfitError("kv_transfer_params", f"{_HINT}.{error}") from error
    return Hint(source, float(budget_s)) if source else None


def _prompt(value: object) -> Prompt:
    """Return one prompt: the API also takes a list of prompts, and here it may hold one."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if value is None:
        raise UnfitError("prompt", "prompt is missing: send a string or a list of token ids")
    if isinstance(value, str):
        return _checked("prompt", _unicode("prompt", value))
    if not isinstance(value, list):
        raise UnfitError("prompt", f"prompt must be a string or a list of token ids, got {kind_of(value)}")
    for place, item in enumerate(value):
        if type(item) is not int:
            text = f"prompt must be one string or one list of token ids, got {shown(item)} at place {place}"
            raise UnfitError("prompt", f"{text}: send several prompts one by one")
    return _checked("prompt", value)


def _chat_prompt(value: object) -> Prompt:
    if not isinstance(value, list):
        got = "nothing" if value is None else kind_of(value)
        raise UnfitError("messages", f"messages must be a list, got {got}")
    return _checked("messages", [_turn(f"messages[{place}]", item) for place, item in enumerate(value)])


def _checked(param: str, prompt: str | list[int] | list[dict[str, str]]) -> Prompt:
    if not prompt:
        raise UnfitError(param, f"{param} is empty: there is nothing to answer")
    try:
        return checked_prompt(prompt)
    except ValueError as error:
        text = str(error)
        raise UnfitError(param, text if text.startswith(param) else f"{param}: {text}") from error


def _turn(where: str, item: object) -> dict[str, str]:
    """Return one turn. Fields that an answer was given with, and that are empty, come back with it and are no harm."""
    if not isinstance(item, dict):
        raise UnfitError(where, f"{where} must be an object, got {kind_of(item)}")
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise UnfitError(where, f"{where}: role must be a string, got {kind_of(role) if 'role' in item else 'nothing'}")
    for field, value in item.items():
        if field not in {"role", "content"} and value not in (None, [], ""):
            raise UnfitError(where, f"{where}: {field[:80]!r} is not carried: send role and content only")
    return {"role": _unicode(where, role), "content": _unicode(where, _content(where, item))}


def _content(where: str, turn: Mapping[object, object]) -> str:
    value = turn.get("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        got = kind_of(value) if "content" in turn else "nothing"
        raise UnfitError(where, f"{where}: content must be a string or a list of parts, got {got}")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            got = shown(part.get("type")) if isinstance(part, dict) else kind_of(part)
            text = f"{where}: parts of content must be of type 'text', got {got}: other kinds are not supported"
            raise UnfitError(where, text)
        texts.append(text)
    return "".join(texts)


def _unicode(param: str, value: str) -> str:
    """Return text that can be written as UTF-8: JSON can name half of a pair, which is no character."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnfitError(param, f"{param} holds half of a surrogate pair, which is no character") from error
    return value
