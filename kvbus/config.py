"""Settings: checked when they enter, frozen afterwards; and where kvbus keeps its own files.

Every limit names its source beside it. A value that does not fit is a ConfigError that names the setting.
"""

import json
import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvbus.errors import ConfigError
from kvbus.topics import escape

ENGINES = ("toy", "transformers")
"""Those that a worker starts itself."""
ATTACHING = ("vllm",)
"""Those that are started by others, and attach to a worker's socket by themselves."""
DIGESTS = ("off", "grant", "always")
UCX_TRANSPORTS = frozenset(
    "all tcp self cma sm shm mm posix sysv knem xpmem "
    "ib rc rc_v rc_x rc_verbs rc_mlx5 ud ud_v ud_x ud_verbs ud_mlx5 dc dc_x dc_mlx5 gga_mlx5 srd".split()
)
"""UCX's own words for ways to host memory. It passes over a word that it does not know, so here that is an error."""


Microseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class TransferLimits(BaseModel):
    """Admission and deadlines of one destination. The first three defaults are those of the published endpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inflight_max: Annotated[int, Field(ge=0, le=10_000)] = 4
    dedup_ttl_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    source_allow: tuple[str, ...] = ()
    """Instances from which this one may take KV. Empty: every source is refused."""
    dedup_entries_max: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """Remembered requests; at about 300 bytes each, 20,000 are 6 MB. The oldest ended one is forgotten first."""
    lend_wait_s: Annotated[float, Field(gt=0, le=2)] = 2.0
    """One long poll while the source computes; short, so that a lost answer costs little."""
    release_retry_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """Pause between repeats of an access-ended notice over the bus, doubled up to 10 s."""


class WorkerSettings(BaseModel):
    """What one member needs to start; `pages` counts pool pages per rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance: str
    member: str = "m0"
    members: tuple[str, ...] = ()
    """All members of the instance in one order, the same at each of them: a member's place is the rank that it serves,
    and its turn to lead. Empty, or itself alone: the instance has no other member."""
    nats_url: str
    nats_token: str = ""
    prefix: str = "kv"
    engine: Literal["toy", "transformers", "vllm"] = "toy"
    """`vllm` is not started here: a vLLM that has kvbus's connector attaches by itself."""
    engine_options: Mapping[str, object] = Field(default_factory=dict)
    pages: Annotated[int, Field(ge=2, le=1 << 24)] = 256
    prompt_tokens_max: Annotated[int, Field(ge=1, le=1 << 22)] = 2_048
    """The longest prompt for which the pool keeps room beside what is lent to peers (P26); the engine's own limit,
    where that is smaller."""
    backend: Literal["auto", "ucx", "memory", "socket", "ucx-py"] = "auto"
    """How pages are read. `auto`: by UCX, out of the source's mapped memory, or over a plain socket, whichever leads to
    the source and costs least for the pages in question. `ucx-py`: by UCX through that package, for who has it."""
    transport_costs: Mapping[str, tuple[Microseconds, Microseconds, Microseconds]] = Field(default_factory=dict)
    """What ways cost on this host, where it was measured: an order, each page, each MiB. `bench/ways.py --json` prints
    it; what is not named keeps the cost of the planner's own table."""
    network_devices: str = "lo"
    """UCX devices; loopback by default, since whoever reaches a UCX worker can read its process."""
    ucx_tls: str = ""
    """The transports that UCX may take, in its own words with commas between; empty: tcp, and cma on one host."""
    socket_address: str = "127.0.0.1"
    """Where the page server listens, for `socket` and `auto`; loopback by default, since pages travel unencrypted."""
    socket_port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """Its port; 0 lets the system choose, and each grant names it."""
    socket_advertise: tuple[str, ...] = ()
    """Addresses that grants name instead of `socket_address`, where that is a wildcard or behind a translation."""
    urls: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=512)], ...], Field(max_length=8)] = ()
    """Base URLs under which HTTP clients know the engine; a gateway takes one of them as a name of this instance."""
    rate_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Upper limit for pulled bytes per second, 0 for none: spares a busy host."""
    digests: Literal["off", "grant", "always"] = "off"
    """Whether pages have digests that are compared where they arrive and where the engine takes them, and from when on:
    the first grant, or the seal. Off, since generations tell of all that is written under a lease, and with them moving
    on one host takes 1.2 to 2 times as long, mostly 1.4 times (`bench/digests.py`)."""
    run_dir: Path
    limits: TransferLimits = TransferLimits()
    parent_pid: Annotated[int, Field(ge=0)] = 0
    """The process that started this worker for its own ends; when it has ended, the worker stops. 0: nobody."""

    @field_validator("instance", "member")
    @classmethod
    def _must_fit_a_subject(cls, value: str) -> str:
        escape(value)
        return value

    @field_validator("members")
    @classmethod
    def _must_all_fit_a_subject(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            escape(name)
        if twice := sorted({name for name in value if value.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} stands there twice: each member serves a rank of its own")
        return value

    @model_validator(mode="after")
    def _must_be_a_member(self) -> Self:
        if self.members and self.member not in self.members:
            raise ValueError(f"members are {', '.join(self.members)}, and member {self.member!r} is none of them")
        if len(self.members) > 1 and self.engine == "transformers":
            raise ValueError("members are several, and the transformers engine has one rank: give one member")
        return self

    @field_validator("ucx_tls")
    @classmethod
    def _must_name_transports(cls, value: str) -> str:
        if unknown := [word for word in value.split(",") if value and word not in UCX_TRANSPORTS]:
            known = ", ".join(sorted(UCX_TRANSPORTS))
            raise ValueError(f"{', '.join(map(repr, unknown))} is no transport of UCX; give some of {known}")
        return value

    @field_validator("socket_address")
    @classmethod
    def _must_be_an_address(cls, value: str) -> str:
        ip_address(value)
        return value

    @field_validator("socket_advertise")
    @classmethod
    def _must_be_reachable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if ip_address(one).is_unspecified:
                raise ValueError(f"{one} is no address that a reader can reach")
        return value

    @model_validator(mode="after")
    def _must_name_where_it_is_reached(self) -> Self:
        if ip_address(self.socket_address).is_unspecified and not self.socket_advertise:
            raise ValueError(f"socket_address {self.socket_address} is a wildcard: name addresses in socket_advertise")
        return self

    @model_validator(mode="after")
    def _must_not_be_its_own_source(self) -> Self:
        if self.instance in self.limits.source_allow:
            raise ValueError(f"source_allow names {self.instance!r} itself: an instance is not its own source")
        return self

    @property
    def ranks(self) -> dict[str, int]:
        """The rank that each member of the instance serves, in the order in which they would lead."""
        return {name: rank for rank, name in enumerate(self.members or (self.member,))}

    @property
    def options_for_engine(self) -> dict[str, object]:
        """The engine's options; a toy among several members is told which rank is its own, unless they say so."""
        options = dict(self.engine_options)
        if len(self.ranks) > 1 and self.engine == "toy":
            options = {"rank": self.ranks[self.member], "ranks": len(self.ranks)} | options
        return options

    @property
    def socket_path(self) -> Path:
        """The local socket of this member, for its engine and for local clients."""
        return socket_path(self.run_dir, self.instance, self.member)

    @property
    def lock_path(self) -> Path:
        """Held while this member runs, so that no second worker starts under the same name."""
        return self.run_dir / f"{escape(self.instance)}.{escape(self.member)}.lock"


def socket_path(run_dir: Path, instance: str, member: str) -> Path:
    """Return where a member's worker listens for its engine and for local clients."""
    return run_dir / f"{escape(instance)}.{escape(member)}.sock"


def checked_settings(**values: object) -> WorkerSettings:
    """Return worker settings; ConfigError names the first setting that does not fit."""
    try:
        return WorkerSettings.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "settings"
        got = problem["input"]
        # A whole map is what pydantic shows for a missing setting, and it may hold the broker's token.
        shown = type(got).__name__ if isinstance(got, Mapping) or where == "nats_token" else repr(got)[:80]
        raise ConfigError(f"setting {where} does not fit: {problem['msg']}", got=shown) from error


def state_dir() -> Path:
    """Return the folder for what kvbus writes: $KVBUS_STATE, else $XDG_STATE_HOME/kvbus, else ~/.local/state/kvbus."""
    explicit = os.environ.get("KVBUS_STATE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "kvbus"


def state_file() -> Path:
    """Return the 0600 file in which `kvbus up` leaves its broker's URL and token for other commands to find."""
    return state_dir() / "up.json"


def write_state(document: Mapping[str, object]) -> Path:
    """Write the state file, readable by its owner only, whole or not at all; return its path."""
    path = state_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(dict(document), file, indent=1)
    partial.replace(path)
    return path


def read_state() -> dict[str, object]:
    """Return what `kvbus up` left; ConfigError says what to do where nothing is there or it is unreadable."""
    path = state_file()
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no running kvbus found at {path}: start one with `kvbus up`, or give --nats URL") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is unreadable: {error}; stop kvbus, remove the file, start again") from error
    if not isinstance(document, dict) or not isinstance(document.get("nats_url"), str):
        raise ConfigError(f"{path} does not name a nats_url; stop kvbus, remove the file, start again")
    return document


def ucx_library() -> str | None:
    """Return the UCX library that the operator named in $KVBUS_UCX_LIBRARY, or None for that of the wheel."""
    return os.environ.get("KVBUS_UCX_LIBRARY") or None


def named_credentials() -> Path | None:
    """Return the credential that the operator named in $KVBUS_NATS_CREDENTIALS, or None."""
    named = os.environ.get("KVBUS_NATS_CREDENTIALS")
    return Path(named) if named else None


def discover_credentials() -> Path | None:
    """Return the credential for the broker that `discover` finds: the one named, else the one that `kvbus up` left."""
    named = named_credentials()
    if named or os.environ.get("KVBUS_NATS_URL"):
        return named
    left = read_state().get("credentials")
    return Path(str(left)) if left else None


def discover() -> tuple[str, str]:
    """Return (broker URL, token): from $KVBUS_NATS_URL and $KVBUS_NATS_TOKEN, else from the state file."""
    url = os.environ.get("KVBUS_NATS_URL")
    if url:
        return url, os.environ.get("KVBUS_NATS_TOKEN", "")
    document = read_state()
    return str(document["nats_url"]), str(document.get("token", ""))
