"""Which rotary positions can be moved: those that give a token's key by its place alone, and alike in every engine.

Some kinds choose their frequencies by a length: of the longest prompt that an engine takes, or of the prompt at hand.
Equal tokens of equal weights have other keys then, and no page's name says so. They are refused before a page is made.
"""

from collections.abc import Mapping
from typing import Any

from kvbus.errors import ConfigError

Foreign = Any
# A model's configuration, as transformers reads it and vLLM hands it on.

KNOWN_ROPES = ("default", "linear", "llama3", "yarn")
"""Transformers and vLLM rotate by equal frequencies, which no length changes: their tables were compared."""


def require_known_rope(config: Foreign) -> None:
    """Raise ConfigError where a model's positions are of a kind whose pages could not be told apart."""
    if unknown := sorted(rope_types(config) - set(KNOWN_ROPES)):
        raise ConfigError(
            f"this model's rotary positions are of type {', '.join(unknown)}, under which equal tokens may have other "
            f"keys in another engine or beside another prompt; kvbus moves those of type {', '.join(KNOWN_ROPES)}: "
            "use another model, or run this one without kvbus",
            model_type=str(getattr(config, "model_type", "")),
        )


def rope_types(config: Foreign) -> frozenset[str]:
    """Return the kinds of rotary positions that a configuration names, `default` where it names none."""
    stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = [value for value in stated.values() if isinstance(value, Mapping)]
    kinds = {_kind(parameters) for parameters in by_layer or [stated]}
    return frozenset(kinds | {"dual_chunk"} if getattr(config, "dual_chunk_attention_config", None) else kinds)


def _kind(parameters: Mapping[str, object]) -> str:
    if parameters.get("use_fope"):
        return "fope"
    return str(parameters.get("rope_type") or parameters.get("type") or "default")  # `type` is the older spelling
