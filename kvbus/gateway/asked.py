"""What a caller asks for: one transfer request, read from a JSON body. Pure: it looks nothing up.

Fields that are not known are ignored, since the body of a completion request may be sent as it stands.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, get_args

from kvbus.codec import pack
from kvbus.gateway.kinds import kind_of, shown
from kvbus.names import request_hash
from kvbus.parts import OnMiss, Prompt
from kvbus.publisher import checked_prompt

NAME_LENGTH_MAX = 200
"""Characters of a model or a salt: what an event carries."""
PIN_LENGTH_MAX = 64
BUDGET_MAX_S = 3_600.0
"""As in an event."""

_ON_MISS: Final[tuple[OnMiss, ...]] = get_args(OnMiss)

Given = str | list[int] | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A transfer as asked for; `prompt` is text, token ids or chat messages, and may be empty."""

    source: str
    prompt: Given
    destination: str = ""
    model: str = ""
    salt: str = ""
    on_miss: OnMiss = "prefill"
    budget_s: float = 30.0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to transfer: such a request is legal, and has succeeded from the start."""
        return not self.prompt

    def request_hash(self, source: str) -> str:
        """Return the hash by which a repeat is known, where the source stands for this instance."""
        if self.is_empty:
            canonical = pack({"text": ""} if isinstance(self.prompt, str) else {"messages": []})
        else:
            canonical = checked_prompt(self.prompt).canonical()
        return request_hash(model=self.model, salt=self.salt, source=source, prompt=canonical)


def asked(body: Mapping[str, object]) -> Asked:
    """Return what a body asks for; ValueError names the field that does not fit.

    Messages win over a prompt where both are given. Null stands for a field that was not given.
    """
    source = _text(body, "source", 4_096)
    if not source:
        raise ValueError("source is missing: name an instance, or its base URL")
    messages, prompt = body.get("messages"), body.get("prompt")
    if messages is None and prompt is None:
        raise ValueError("messages or prompt is missing: there is nothing to transfer")
    return Asked(
        source=source,
        prompt=_prompt(prompt) if messages is None else _messages(messages),
        destination=_text(body, "destination", NAME_LENGTH_MAX),
        model=_text(body, "model", NAME_LENGTH_MAX),
        salt=_text(body, "cache_salt", NAME_LENGTH_MAX),
        on_miss=_on_miss(body.get("on_miss")),
        budget_s=_budget_s(body.get("budget_s")),
    )


@dataclass(frozen=True, slots=True)
class Held:
    """A question about a cache: a prompt, or none where it is empty or not given, and the name of a pin.

    `name` is one for the prompt itself, for a pin that is given none.
    """

    prompt: Prompt | None
    salt: str
    destination: str
    pin: str
    name: str


def held(body: Mapping[str, object]) -> Held:
    """Return what a body asks of a cache; ValueError names the field that does not fit."""
    messages, prompt = body.get("messages"), body.get("prompt")
    given = _messages(messages) if messages is not None else _prompt(prompt) if prompt is not None else ""
    checked, salt = checked_prompt(given) if given else None, _text(body, "cache_salt", NAME_LENGTH_MAX)
    canonical = checked.canonical() if checked else b""
    return Held(
        prompt=checked,
        salt=salt,
        destination=_text(body, "destination", NAME_LENGTH_MAX),
        pin=_text(body, "pin", PIN_LENGTH_MAX),
        name=request_hash(model="", salt=salt, source="", prompt=canonical),
    )


def _text(body: Mapping[str, object], field: str, length_max: int) -> str:
    value = body.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _unfit(f"{field} must be a string, got {kind_of(value)}")
    if len(value) > length_max:
        raise ValueError(f"{field} is longer than {length_max} characters")
    return _unicode(field, value)


def _prompt(value: object) -> Given:
    if isinstance(value, str):
        return _unicode("prompt", value)
    if not isinstance(value, list):
        raise _unfit(f"prompt must be a string or a list of token ids, got {kind_of(value)}")
    for place, item in enumerate(value):
        if type(item) is not int:
            raise _unfit(
                f"prompt must be one string or one list of token ids, got {shown(item)} at place {place}: "
                "send several prompts as several requests"
            )
    if value:
        checked_prompt(value)
    return value


def _messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise _unfit(f"messages must be a list, got {kind_of(value)}")
    return [_message(place, item) for place, item in enumerate(value)]


def _message(place: int, item: object) -> dict[str, str]:
    """Return one turn; what would change what the model sees, and is not carried, is refused rather than dropped."""
    if not isinstance(item, dict):
        raise _unfit(f"message {place} must be an object, got {kind_of(item)}")
    turn = {}
    for field in ("role", "content"):
        value = item.get(field)
        if not isinstance(value, str):
            got = kind_of(value) if field in item else "nothing"
            raise _unfit(f"message {place}: {field} must be a string, got {got}")
        turn[field] = _unicode(f"message {place}: {field}", value)
    for field, value in item.items():
        if field not in turn and value is not None:
            raise ValueError(f"message {place}: {field[:80]!r} is not carried: send role and content only")
    checked_prompt([turn])
    return turn


def _on_miss(value: object) -> OnMiss:
    for word in _ON_MISS:
        if value == word:
            return word
    if value is None:
        return "prefill"
    raise ValueError(f"on_miss must be one of {', '.join(_ON_MISS)}, got {shown(value)}")


def _budget_s(value: object) -> float:
    if value is None:
        return 30.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _unfit(f"budget_s must be a number, got {kind_of(value)}")
    if not 0 < value <= BUDGET_MAX_S:
        raise ValueError(f"budget_s must lie between 0 and {BUDGET_MAX_S:g}, got {shown(value)}")
    return float(value)


def _unicode(field: str, value: str) -> str:
    """Return text that can be written as UTF-8: JSON can name half of a pair, which is no character."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} holds half of a surrogate pair, which is no character") from error
    return value


def _unfit(text: str) -> ValueError:
    """A wrong type is a ValueError here too: whoever asks catches one class for every field that does not fit."""
    return ValueError(text)
