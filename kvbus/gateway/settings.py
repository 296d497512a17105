"""What a gateway needs to start, checked when it enters; the first three settings are those of the published endpoint.

Every limit names its source beside it.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvbus.errors import ConfigError
from kvbus.topics import escape


class GatewaySettings(BaseModel):
    """Settings of one gateway process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inflight_max: Annotated[int, Field(ge=0, le=10_000)] = 4
    """KV_TRANSFER_MAX_INFLIGHT: transfers at a time into one instance; 0 takes none."""
    dedup_ttl_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 300.0
    """KV_TRANSFER_DEDUP_TTL: for how long after its acceptance a repeat joins; 0: only while the first one runs."""
    source_allow: str = ""
    """KV_TRANSFER_SOURCE_ALLOW: names of instances and base URLs, separated by commas. Empty: all are refused."""
    instances: tuple[str, ...] = ()
    """The instances that this gateway speaks for; empty: all that are registered."""
    host: str = "127.0.0.1"
    """Loopback by default: whoever reaches the gateway may move and forget caches."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    entries_max: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """Requests remembered for one instance; the published endpoint begins to prune at this number. About 1 KiB each."""

    run_dir: Path | None = None
    """Where workers of this host have their local sockets; None: no engine can be asked from here."""

    @field_validator("instances")
    @classmethod
    def _must_fit_a_subject(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            escape(name)
        return tuple(dict.fromkeys(value))


def checked_gateway_settings(**values: object) -> GatewaySettings:
    """Return gateway settings; ConfigError names the first one that does not fit."""
    try:
        return GatewaySettings.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "settings"
        raise ConfigError(f"setting {where} does not fit: {problem['msg']}", got=repr(problem["input"])[:80]) from error
