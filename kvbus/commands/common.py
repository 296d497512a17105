"""What every command shares: options for the broker, output for people or as JSON, and one way to end with an error."""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import click
from rich.console import Console

from kvbus.bus import NatsBus
from kvbus.bus_access import TlsFiles
from kvbus.bus_assets import AssetLimits
from kvbus.config import discover, discover_credentials
from kvbus.errors import BusError, ConfigError, KvbusError
from kvbus.patience import NO_SUCH_STREAM
from kvbus.topics import Topics

F = TypeVar("F", bound=Callable[..., Any])

EXIT_FAILED = 1
"""The command ran, and what it was asked for did not come about."""
EXIT_CONFIG = 2
"""The command could not run: the sentence on stderr says what to do. Click uses the same status for wrong options."""
EXIT_OPEN = 3
"""What was asked for may still come about: no end came within the wait."""
EXIT_BUSY = 4
"""It was not begun, since there was too much to do: try again later."""
EXIT_INTERRUPTED = 130


def run(command: click.Command) -> int:
    """Run a command and return its exit status; an error of ours becomes one sentence on stderr."""
    try:
        result = command.main(standalone_mode=False)
    except click.exceptions.Abort:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BusError as error:
        missing = error.details.get("code") == NO_SUCH_STREAM
        told = "this broker has no kvbus streams and buckets yet: run `kvbus init` once" if missing else str(error)
        click.echo(f"kvbus: {told}", err=True)
        return EXIT_CONFIG
    except KvbusError as error:
        click.echo(f"kvbus: {error}", err=True)
        return EXIT_CONFIG
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def _checked_prefix(_context: click.Context, _option: click.Parameter, value: str) -> str:
    try:
        return Topics(value).prefix
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def broker_options(function: F) -> F:
    """Add --nats, --token, --prefix and the files to enter with; where the broker is, `kvbus up` tells by itself."""
    for option in (
        click.option(
            "--prefix", default="kv", show_default=True, callback=_checked_prefix, help="First token of all subjects."
        ),
        click.option("--token", default="", envvar="KVBUS_NATS_TOKEN", help="The broker's token."),
        click.option("--nats", "nats_url", default="", metavar="URL", help="The broker; else the one of `kvbus up`."),
    ):
        function = option(function)
    return entering_options(function)


def entering_options(function: F) -> F:
    """Add --credentials and the files of TLS; `entering` returns what was given."""
    for option in _file_options():
        function = option(function)
    return function


def _file_options() -> tuple[Callable[[F], F], ...]:
    """Return the options whose values no command needs to know: `entering` hands them to the bus."""
    told = (
        ("--tls-key", None, "The key of that certificate."),
        ("--tls-cert", None, "Our certificate, where the broker asks for one."),
        ("--tls-ca", "KVBUS_NATS_TLS_CA", "The authority that signed the broker's certificate."),
        ("--credentials", "KVBUS_NATS_CREDENTIALS", "A credential of `kvbus auth init`."),
    )
    return tuple(
        click.option(
            name,
            type=click.Path(path_type=Path, dir_okay=False),
            envvar=variable,
            metavar="FILE",
            expose_value=False,
            callback=_keep_file,
            help=help_,
        )
        for name, variable, help_ in told
    )


def _keep_file(context: click.Context, option: click.Parameter, value: Path | None) -> None:
    context.meta[f"kvbus.{option.name}"] = value


class Entering(TypedDict):
    """What a connect takes beside an address."""

    credentials: Path | None
    tls: TlsFiles | None


def entering(*, discovered: bool = False) -> Entering:
    """Return the files to enter with, of the running command's options; `discovered`: the broker is that of `up`."""
    context = click.get_current_context(silent=True)
    given: dict[str, Path | None] = context.meta if context else {}
    credentials, ca, cert, key = (
        given.get(f"kvbus.{name}") for name in ("credentials", "tls_ca", "tls_cert", "tls_key")
    )
    if ca is None and (cert or key):
        raise ConfigError("--tls-cert and --tls-key need --tls-ca: the authority that signed the broker's certificate")
    if credentials is None and discovered:
        credentials = discover_credentials()
    return {"credentials": credentials, "tls": TlsFiles(ca, cert, key) if ca else None}


def json_option(function: F) -> F:
    """Add --json: one document on stdout instead of text for people."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(function)


async def connect(nats_url: str, token: str, prefix: str, *, name: str, limits: AssetLimits | None = None) -> NatsBus:
    """Connect to the named broker, or to the one that `kvbus up` runs here."""
    files = entering(discovered=not nats_url)
    if not nats_url:
        nats_url, found = discover()
        token = token or found
    topics = Topics(prefix)
    return await NatsBus.connect(nats_url, name=name, token=token or None, topics=topics, limits=limits, **files)


def console(*, as_json: bool) -> Console:
    """Return where text for people goes: stdout, or stderr where stdout is for a document."""
    return Console(stderr=as_json, highlight=False)


def print_document(document: Mapping[str, object]) -> None:
    """Print one JSON document on stdout."""
    json.dump(document, sys.stdout, default=_plain)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")
