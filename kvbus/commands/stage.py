"""`kvbus stage`: ask for a transfer, follow it, and end with one line."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvbus.bus import NatsBus
from kvbus.commands.common import EXIT_FAILED, broker_options, connect, console, json_option, print_document
from kvbus.errors import ConfigError
from kvbus.events import TransferOutcome, TransferStep
from kvbus.publisher import Publisher, TransferHandle, Verdict
from kvbus.roles.registry import lookup
from kvbus.subscriber import Seen, Subscriber
from kvbus.topics import Topics

STAGES = ("accepted", "resolved", "leased", "asking", "granted", "moving", "access_ended")
"""The steps of a transfer that goes well, in order: what the progress bar counts."""
SLACK_S = 10.0
"""Beyond the budget and the queue: how long an outcome may take to arrive."""

Prompt = str | list[int] | list[dict[str, str]]


@click.command()
@click.argument("text", required=False)
@click.option("--from", "source", required=True, help="The instance that lends.")
@click.option("--to", "destination", required=True, help="The instance that takes.")
@click.option("--file", "path", type=click.Path(path_type=Path), help="Read the prompt from a file, as it stands.")
@click.option("--tokens", "tokens_path", type=click.Path(path_type=Path), help="Read token ids (a JSON list).")
@click.option("--messages", "messages_path", type=click.Path(path_type=Path), help="Read chat messages (a JSON list).")
@click.option("--on-miss", type=click.Choice(["prefill", "partial", "fail"]), default="prefill", show_default=True)
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

    Exit status 0: the destination holds the prompt's blocks, or the prefix that the source had. 1: it does not, and the
    line says why.
    """
    prompt = _prompt(text, path, tokens_path, messages_path)

    async def go() -> int:
        bus = await connect(nats_url, token, prefix, name="kvbus-stage")
        try:
            return await _stage(bus, Topics(prefix), prompt, request, as_json=as_json)
        finally:
            await bus.close()

    return asyncio.run(go())


async def _stage(bus: NatsBus, topics: Topics, prompt: Prompt, request: dict[str, object], *, as_json: bool) -> int:
    screen = console(as_json=as_json)
    async with Publisher(bus=bus, topics=topics) as publisher:
        budget_s = float(str(request["budget"]))
        since_ns = time.time_ns()
        try:
            handle = await publisher.transfer(
                source=str(request["source"]),
                destination=str(request["destination"]),
                prompt=prompt,
                on_miss=str(request["on_miss"]),  # type: ignore[arg-type] # click.Choice allows no other
                salt=str(request["salt"]),
                budget_s=budget_s,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not await lookup(bus, str(request["destination"])):
            screen.print(
                f"[yellow]no worker of {request['destination']} is registered: the request waits in its queue[/]"
            )
        async with followed(bus, topics, handle, screen, destination=str(request["destination"]), since_ns=since_ns):
            verdict = await handle.verdict()
            outcome = await handle.outcome(budget_s + SLACK_S) if verdict.hopeful else None
    if as_json:
        print_document(_document(handle, verdict, outcome))
    screen.print(closing_line(handle, verdict, outcome), soft_wrap=True)
    return 0 if outcome is not None and outcome.outcome in {"settled", "partial"} else EXIT_FAILED


@contextlib.asynccontextmanager
async def followed(
    bus: NatsBus, topics: Topics, handle: TransferHandle, screen: Console, *, destination: str, since_ns: int
) -> AsyncIterator[None]:
    """Show a progress bar that follows the transfer's steps for as long as the block runs."""
    if not screen.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        bar = progress.add_task("queued", total=len(STAGES))

        async def follow() -> None:
            async with contextlib.aclosing(Subscriber(bus, topics).facts(settle=False)) as events:
                async for seen in events:
                    body = seen.event.body if isinstance(seen, Seen) else None
                    ours = (
                        isinstance(seen, Seen)
                        and seen.event.header.i == destination
                        and seen.event.header.t >= since_ns
                    )
                    if ours and isinstance(body, TransferStep) and body.request_hash == handle.request_hash:
                        reached = STAGES.index(body.step) + 1 if body.step in STAGES else None
                        progress.update(bar, completed=reached, description=f"{body.step} {body.text}"[:60])

        following = asyncio.get_running_loop().create_task(follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def closing_line(handle: TransferHandle, verdict: Verdict, outcome: TransferOutcome | None) -> str:
    """Return how it ended, in one line for a person."""
    if outcome is None:
        known = verdict.transfer or handle.request_hash[:12]
        if verdict.verdict in {"refused", "skipped_busy"}:
            return f"{verdict.verdict}: {verdict.reason}"
        if verdict.verdict == "queued":
            return (
                f"queued: {verdict.reason}; the request stays in its queue for up to ten minutes · kvbus story {known}"
            )
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
    except (OSError, ValueError) as error:
        raise ConfigError(f"the prompt file cannot be read: {error}") from error
    if not isinstance(content, list):
        raise ConfigError("the prompt file must hold a JSON list", got=type(content).__name__)
    return content
