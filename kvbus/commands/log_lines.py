"""Log lines: one each, for people or as JSON, with the ids of the transfer, ticket and cause that they are about.

Whoever logs speaks to Python's own logging, and names ids in `extra`; structlog renders all of it here, other
libraries' lines too. A prompt is never logged: nothing that logs is given one.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Final

import click
import structlog

FORMS = ("text", "json")
IDS: Final = ("transfer", "ticket", "cause", "request_hash", "instance", "member")
"""What a line may say that it is about, in this order."""
VALUE_LENGTH_MAX = 4_000
"""Signs of one value: twice the longest reason on the wire, and enough of a trace back."""

Entry = MutableMapping[str, object]

log_option = click.option(
    "--log", "log_form", type=click.Choice(FORMS), default="text", show_default=True, help="How log lines look."
)


def set_up_logging(level: str, form: str = "text") -> None:
    """Send log lines to stderr, in one form for all commands."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(capture=True)


def say(text: str, form: str) -> None:
    """Tell a person on stderr, as a line of log where a program reads those."""
    if form == "text":
        click.echo(text, err=True)
    else:
        logging.getLogger("kvbus").info(text)


def formatter(form: str) -> logging.Formatter:
    """Return what makes a line of a record."""
    renderer = structlog.processors.JSONRenderer(default=str) if form == "json" else text_line
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(allow=IDS),
            stamp,
            structlog.processors.format_exc_info,
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, bounded, renderer],
    )


def bounded(_logger: object, _method: str, entry: Entry) -> Entry:
    """Leave out ids that are empty, and cut what is too long for a line."""
    for name, value in list(entry.items()):
        if name in IDS and not value:
            del entry[name]
        elif isinstance(value, str) and len(value) > VALUE_LENGTH_MAX:
            entry[name] = f"{value[:VALUE_LENGTH_MAX]}…"
    return entry


def text_line(_logger: object, _method: str, entry: Entry) -> str:
    """Return time, level, who and what, and then ids as key=value; a trace back follows on the same line."""
    head = f"{entry.pop('timestamp')} {entry.pop('level')!s:<7} {entry.pop('logger')}: {entry.pop('event')}"
    trace = entry.pop("exception", "")
    about = [f"{name}={_quoted(entry.pop(name))}" for name in IDS if name in entry]
    about += [f"{name}={_quoted(value)}" for name, value in entry.items()]
    line = " ".join([head, *about, *([f"exception={_quoted(trace)}"] if trace else [])])
    return "".join(sign if sign.isprintable() else "\\n" if sign == "\n" else " " for sign in line)


def _quoted(value: object) -> str:
    """Return a value such that it ends where one sees it end."""
    text = str(value)
    if text and not any(sign in ' "=' for sign in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
