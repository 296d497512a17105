"""`kvbus stage`: ask for a transfer, follow it, and end with one line."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from kvbus import tracing
from kvbus.bus import NatsBus
from kvbus.commands.common import (
    EXIT_BUSY,
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OPEN,
    broker_options,
    connect,
    console,
    json_option,
    print_document,
)
from kvbus.commands.completing import instance_names
from kvbus.commands.following import Followed, newest, progress_bar
from kvbus.errors import BusError, ConfigError
from kvbus.events import TransferOutcome
from kvbus.handles import LOST, UNASKED
from kvbus.patience import ask_until, ended
from kvbus.publisher import Publisher, TransferHandle, Verdict
from kvbus.roles.registry import lookup
from kvbus.topics import Topics
from kvbus.traceparent import checked_traceparent
from kvbus.transport import Bus

SLACK_S = 10.0
"""Beyond the budget and the queue: how long an outcome may take to arrive."""

Prompt = str | list[int] | list[dict[str, str]]


@click.command()
@click.argument("text", required=False)
@click.option("--from", "source", required=True, shell_complete=instance_names, help="The instance that lends.")
@click.option("--to", "destination", required=True, shell_complete=instance_names, help="The instance that takes.")
@click.option("--file", "path", type=click.Path(path_type=Path), help="Read the prompt from a file, as it stands.")
@click.option("--tokens", "tokens_path", type=click.Path(path_type=Path), help="Read token ids (a JSON list).")
@click.option("--messages", "messages_path", type=click.Path(path_type=Path), help="Read chat messages (a JSON list).")
@click.option(
    "--on-miss",
    type=click.Choice(["prefill", "partial", "fail"]),
    default="prefill",
    show_default=True,
    help="What the source does about blocks that it lacks: compute them, lend what it has, or fail.",
)
@click.option("--salt", default="", help="Cache salt: keeps tenants' pages apart.")
@click.option("--budget", default=30.0, show_default=True, help="Seconds that the transfer may take.")
@broker_options
@json_option
def stage(
    text: str | None,
    path: Path | None,
    tokens_path: Path | None,
    messages_path: Path | None,
    nats_url: str,
    token: str,
    prefix: str,
    as_json: bool,
    **request: object,
) -> int:
    """Bring the KV of a prompt from one instance to another, ahead of traffic.

    \b
    Exit status:
      0  settled: the destination holds the prompt's blocks, or the prefix that the source had
      1  failed, cancelled or refused: the line says why
      2  bad input, or the broker could not be reached
      3  no outcome came in time: the request may still be served
      4  the destination was busy and did not take it on: try again later

    While brokers elect a leader, or the destination's members do, it is asked again for as long as the budget; stderr
    says why.

    A W3C trace context in $TRACEPARENT is carried to both sides.
    """  # noqa: D301 - click reads the sign itself
    prompt = _prompt(text, path, tokens_path, messages_path)
    tracing.set_up()

    async def go() -> int:
        bus = await connect(nats_url, token, prefix, name="kvbus-stage")
        try:
            with tracing.within(checked_traceparent(os.environ.get("TRACEPARENT"))):
                return await _stage(bus, Topics(prefix), prompt, request, as_json=as_json)
        finally:
            await bus.close()

    return asyncio.run(go())


async def _stage(bus: NatsBus, topics: Topics, prompt: Prompt, request: dict[str, object], *, as_json: bool) -> int:
    screen, notes = console(as_json=as_json), Console(stderr=True, highlight=False)
    source, destination = str(request["source"]), str(request["destination"])
    budget_s = float(str(request["budget"]))
    async with Publisher(bus=bus, topics=topics) as publisher:
        after = await newest(bus, topics) if screen.is_terminal else 0
        since_ns = time.time_ns()

        def ask() -> Awaitable[TransferHandle]:
            return publisher.transfer(
                source=source,
                destination=destination,
                prompt=prompt,
                on_miss=str(request["on_miss"]),  # type: ignore[arg-type] # click.Choice allows no other
                salt=str(request["salt"]),
                budget_s=budget_s,
            )

        def say(why: str) -> None:
            # Above the bar, where there is one: another console would write into its line.
            (screen if screen.is_terminal else notes).print(f"[dim]{escape(why)}; asking again[/]", soft_wrap=True)

        ends_at = asyncio.get_running_loop().time() + budget_s
        try:
            handle = await ask_until(ask, budget_s, say)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if await _is_absent(bus, destination):
            screen.print(f"[yellow]no worker of {destination} is registered: the request waits in its queue[/]")
        async with progress_bar(bus, topics, Followed(destination, handle.request_hash, since_ns, after), screen):
            left_s = ends_at - asyncio.get_running_loop().time()
            handle, verdict, outcome = await ended(ask, handle, wait_s=left_s, outcome_s=budget_s + SLACK_S, say=say)
    if as_json:
        print_document(_document(handle, verdict, outcome))
    screen.print(closing_line(handle, verdict, outcome), soft_wrap=True, markup=False)
    return exit_status(verdict, outcome)


async def _is_absent(bus: Bus, instance: str) -> bool:
    """Whether the registry says that nobody serves an instance; a broker that cannot tell now says nothing."""
    try:
        return not await lookup(bus, instance)
    except BusError:
        return False


def exit_status(verdict: Verdict, outcome: TransferOutcome | None) -> int:
    """Return what a script can tell from: the statuses of `kvbus stage --help`."""
    if outcome is not None:
        return 0 if outcome.outcome in {"settled", "partial"} else EXIT_FAILED
    if verdict.reason == UNASKED:
        return EXIT_CONFIG
    if verdict.verdict == "skipped_busy":
        return EXIT_BUSY
    if verdict.reason == LOST:  # it may be queued all the same
        return EXIT_OPEN
    return EXIT_OPEN if verdict.hopeful else EXIT_FAILED


def closing_line(handle: TransferHandle, verdict: Verdict, outcome: TransferOutcome | None) -> str:
    """Return how it ended, in one line for a person."""
    if outcome is None:
        known = verdict.transfer or handle.request_hash[:12]
        if verdict.verdict in {"refused", "skipped_busy"}:
            return f"{verdict.verdict}: {verdict.reason}"
        if verdict.verdict == "queued":
            stays = "the request stays in its queue for up to ten minutes"
            return f"queued: {verdict.reason}; {stays} · once it is taken: kvbus story {known}"
        return f"{verdict.verdict}: no outcome came in time · kvbus story {known}"
    joined = " (joined an earlier request)" if verdict.verdict == "deduped" else ""
    why = f": {outcome.reason}" if outcome.reason else ""
    parts = [f"{outcome.outcome}{joined}{why}"]
    if outcome.pages_moved and not outcome.failure:
        missing = outcome.pages_wanted - outcome.pages_held
        speed = f"{outcome.length_bytes / 1e6:.1f} MB in {outcome.move_s * 1e3:.0f} ms"
        parts.append(f"{outcome.pages_moved} of {missing} missing pages, {speed}")
    return " · ".join([*parts, f"{outcome.total_s:.2f} s", f"kvbus story {outcome.transfer}"])


def _document(handle: TransferHandle, verdict: Verdict, outcome: TransferOutcome | None) -> dict[str, object]:
    return {
        "request_hash": handle.request_hash,
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "transfer": verdict.transfer,
        "outcome": outcome.model_dump() if outcome else None,
    }


def _prompt(text: str | None, path: Path | None, tokens_path: Path | None, messages_path: Path | None) -> Prompt:
    given = [value for value in (text, path, tokens_path, messages_path) if value is not None]
    if len(given) != 1:
        raise ConfigError("give exactly one prompt: a text, --file, --tokens or --messages", got=len(given))
    try:
        if text is not None:
            return text
        if path is not None:
            return path.read_text()
        content = json.loads((tokens_path or messages_path or Path()).read_text())
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt file cannot be read: it is no UTF-8 text from byte {error.start} on") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"the prompt file cannot be read: {error}") from error
    if not isinstance(content, list):
        raise ConfigError("the prompt file must hold a JSON list", got=type(content).__name__)
    return content
