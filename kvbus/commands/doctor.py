"""`kvbus doctor`: what is wrong with this host, the broker or the workers, and what to do first."""

import asyncio
import os
from collections.abc import Callable

import click

from kvbus.bus import NatsBus
from kvbus.commands.broker_checks import check_assets, check_round_trip, check_server, connected
from kvbus.commands.common import EXIT_FAILED, broker_options, console, json_option, print_document
from kvbus.commands.findings import Finding, Notes, address_of, document_of, is_well, show
from kvbus.commands.host_checks import check_files, check_kernel, check_python
from kvbus.commands.transport_checks import check_transports
from kvbus.commands.worker_checks import check_workers
from kvbus.config import discover, state_file
from kvbus.errors import BusError, ConfigError

BUS_S = 60.0
"""All that is asked over the bus; each question has its own, shorter bound."""


@click.command()
@broker_options
@json_option
def doctor(nats_url: str, token: str, prefix: str, as_json: bool) -> int:
    """Look at this host, at the broker, and at the workers; say what is wrong and what to do first.

    Nothing is changed. Ends with status 0, or 1 where something is wrong; warnings do not count.
    """
    screen = console(as_json=as_json)
    findings = asyncio.run(examine(nats_url, token, prefix, lambda text: screen.print(f"[dim]{text} …[/]")))
    if as_json:
        print_document(document_of(findings))
    else:
        show(findings, screen)
    return 0 if is_well(findings) else EXIT_FAILED


async def examine(nats_url: str, token: str, prefix: str, progress: Callable[[str], None]) -> list[Finding]:
    """Look at everything, telling what is being looked at; nothing is changed."""
    progress("looking at this host")
    findings = [*check_python(), *check_kernel(), *check_files(os.environ)]
    progress("reading between two processes")
    findings += await check_transports(os.environ)
    return findings + await _examine_bus(nats_url, token, prefix, progress)


async def _examine_bus(nats_url: str, token: str, prefix: str, progress: Callable[[str], None]) -> list[Finding]:
    server, workers = Notes("broker"), Notes("workers")
    discovered = not nats_url
    if discovered:
        try:
            nats_url, found = discover()
        except ConfigError as error:
            if state_file().exists():  # what is wrong with it stands with the files
                return []
            server.warning("server", str(error).split(":")[0], "`kvbus up` starts one; or name yours with --nats URL")
            return server.findings
        token = token or found
    progress(f"asking the broker at {address_of(nats_url)}")
    try:
        async with asyncio.timeout(BUS_S):
            if await check_server(server, nats_url):
                bus = await connected(server, nats_url, token, prefix, discovered=discovered)
                if bus is not None:
                    await _ask(server, workers, bus, prefix)
    except TimeoutError:
        workers.wrong("answers", f"not all within {BUS_S:g} s", "see the broker's log")
    except BusError as error:
        server.wrong("connection", str(error), "see the broker's log")
    return server.findings + workers.findings


async def _ask(server: Notes, workers: Notes, bus: NatsBus, prefix: str) -> None:
    try:
        await check_round_trip(server, bus)
        if await check_assets(server, bus, prefix):
            await check_workers(workers, bus, prefix)
    finally:
        await bus.close()
