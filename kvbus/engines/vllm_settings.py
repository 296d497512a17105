"""Settings of the vLLM connector: what stands in `kv_connector_extra_config`, and which vLLM it was tested with.

Pure words: vLLM need not be installed to read or check them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from kvbus.engines.link import check_path
from kvbus.errors import ConfigError

TESTED_VERSIONS = ("0.32.",)
"""Releases whose connector interface was run against; it is labelled experimental, and changes with each release."""

PARAMS_KEY = "kvbus"
"""The one key of a request's `kv_transfer_params` that is ours."""

LOOKUP_BUDGET_S = 0.25
"""A worker answers a look-up within milliseconds; computing the prompt anew costs more than this from some 50 tokens
on, and nobody waits longer for a worker that is busy."""


class StorePolicy(StrEnum):
    """Which prompts are stored in the pool once they are computed."""

    EVERY = "every"
    ASKED = "asked"
    """Those whose request says so."""
    NONE = "none"
    """None, but for what the kvbus worker itself asks for on behalf of a reader."""


class PageForm(StrEnum):
    """How a block's KV stands in a page."""

    AUTO = "auto"
    """Canonical where the packing is known, otherwise opaque."""
    CANONICAL = "canonical"
    OPAQUE = "opaque"
    """As vLLM's kernels keep it: for instances with the same kernels only."""


Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What the connector was told. `socket` is the kvbus worker's; `server` the base URL of this vLLM's own server."""

    socket: Path
    server: str = ""
    store: StorePolicy = StorePolicy.EVERY
    model_folder: str = ""
    pages: PageForm = PageForm.AUTO
    lookup_budget_s: float = LOOKUP_BUDGET_S
    min_blocks: int = 1
    allow_untested_version: bool = False

    @classmethod
    def from_plain(cls, raw: Mapping[str, object]) -> "VllmSettings":
        """Return checked settings; ConfigError names the first that is wrong."""
        known = {field.name for field in fields(cls)}
        for name in raw:
            if name not in known:
                raise _fault(name, "is unknown", f"there are {', '.join(sorted(known))}")
        socket = raw.get("socket")
        if not isinstance(socket, str) or not socket:
            raise _fault("socket", "is missing", "name the kvbus worker's local socket")
        budget = raw.get("lookup_budget_s", LOOKUP_BUDGET_S)
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 60:
            raise _fault("lookup_budget_s", f"is {budget!r}", "seconds in 0…60")
        least = raw.get("min_blocks", 1)
        if type(least) is not int or least < 1:
            raise _fault("min_blocks", f"is {least!r}", "a whole number, at least 1")
        untested = raw.get("allow_untested_version", False)
        if type(untested) is not bool:
            raise _fault("allow_untested_version", f"is {untested!r}", "true or false")
        server = _text(raw, "server").rstrip("/")
        if server and not server.startswith(("http://", "https://")):
            raise _fault("server", f"is {server!r}", "a base URL such as http://127.0.0.1:8000")
        return cls(
            socket=check_path(Path(socket)),
            server=server,
            store=_one_of(StorePolicy, raw, "store", StorePolicy.EVERY),
            model_folder=_text(raw, "model_folder"),
            pages=_one_of(PageForm, raw, "pages", PageForm.AUTO),
            lookup_budget_s=float(budget),
            min_blocks=least,
            allow_untested_version=untested,
        )


def check_version(version: str, *, allow_untested: bool = False) -> None:
    """Raise ConfigError where the connector was not tested with this release of vLLM."""
    if allow_untested or version.startswith(TESTED_VERSIONS):
        return
    tested = ", ".join(f"{prefix}x" for prefix in TESTED_VERSIONS)
    raise ConfigError(
        f"kvbus's connector was tested with vLLM {tested}, and this is vLLM {version}: install one of those, or set "
        "allow_untested_version to true in kv_connector_extra_config and compare answers before you rely on it"
    )


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request asks of the connector; what a client sends is not trusted, and what makes no sense is ignored.

    `mark` is set by our own calls to the server, to find the stored prompt again.
    """

    given: bool = False
    store: bool | None = None
    reuse: bool = True
    mark: str = ""

    @classmethod
    def of(cls, params: object) -> "Wishes":
        """Return the wishes in a request's `kv_transfer_params`."""
        ours = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
        if not isinstance(ours, Mapping):
            return cls()
        store, reuse, mark = ours.get("store"), ours.get("reuse"), ours.get("mark")
        return cls(
            given=True,
            store=store if isinstance(store, bool) else None,
            reuse=reuse if isinstance(reuse, bool) else True,
            mark=mark[:64] if isinstance(mark, str) else "",
        )


def _text(raw: Mapping[str, object], name: str) -> str:
    value = raw.get(name, "")
    if not isinstance(value, str):
        raise _fault(name, f"is {type(value).__name__}", "a text")
    return value


def _one_of(kind: type[Choice], raw: Mapping[str, object], name: str, default: Choice) -> Choice:
    value = raw.get(name, default)
    try:
        return kind(str(value))
    except ValueError as error:
        raise _fault(name, f"is {value!r}", f"one of {', '.join(kind)}") from error


def _fault(name: str, found: str, expected: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config: {name} {found}; {expected}")
