"""`kvbus top`: the cluster live in a terminal, over the bus alone."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click
from rich.console import Console, Group
from rich.live import Live

from kvbus.commands.common import EXIT_FAILED, broker_options, connect, json_option, print_document
from kvbus.commands.keys import pressed
from kvbus.commands.top_screen import TopScreen
from kvbus.commands.top_view import Look, page
from kvbus.picture.following import Following, Surroundings, begin
from kvbus.picture.whole import Picture
from kvbus.topics import Topics
from kvbus.transport import Bus

ROWS_MAX = 100
"""Rows of each kind in one picture: more than a screen holds."""
FRAME_S = 0.25
"""Between two looks for something new to draw: four times a second, however many facts come."""
REDRAW_S = 1.0
"""Ages are drawn anew this often where nothing else has changed."""
ONCE_WAIT_S = 3.0
"""For every registered member's next heartbeat, which comes each second; then one picture is printed as it is."""
POLL_S = 0.05


@click.command()
@click.option("--once", is_flag=True, help="Print one picture and exit.")
@broker_options
@json_option
def top(nats_url: str, token: str, prefix: str, *, once: bool, as_json: bool) -> int:
    """Show the cluster live: instances with their pools, transfers in flight, leases, quarantine, recent outcomes.

    Keys: q ends it; the arrows choose a transfer, enter opens its story, escape closes it. It says so when the broker
    is away, and what stands there then was true before. With --once or --json, and where no terminal is written to, one
    picture is printed. Exit status 1: not every registered member was heard in time, and those are marked.
    """
    screen = Console(highlight=False)
    if once or as_json or not screen.is_terminal:
        return asyncio.run(_once(nats_url, token, prefix, screen, as_json=as_json))
    return asyncio.run(_live(nats_url, token, prefix, screen))


async def _once(nats_url: str, token: str, prefix: str, screen: Console, *, as_json: bool) -> int:
    bus = await connect(nats_url, token, prefix, name="kvbus-top")
    try:
        picture, whole = await one_picture(bus, Topics(prefix))
        shown, now_ns = picture.show(ROWS_MAX), time.time_ns()
        if as_json:
            print_document({"time_ns": now_ns, "complete": whole, **asdict(shown)})
        else:
            for line in page(shown, Look(now_ns, broker=bus.health().server), width=screen.width):
                screen.print(line, soft_wrap=True)
        return 0 if whole else EXIT_FAILED
    finally:
        await bus.close()


async def one_picture(bus: Bus, topics: Topics) -> tuple[Picture, bool]:
    """Return a picture, and whether every registered member was heard; BusError where the log cannot be read."""
    picture = Picture()
    beside = asyncio.ensure_future(Surroundings(bus, topics, picture).run())
    try:
        await begin(bus, topics, picture)
        ends_at = asyncio.get_running_loop().time() + ONCE_WAIT_S
        while True:
            if (whole := _is_whole(picture)) or asyncio.get_running_loop().time() >= ends_at:
                return picture, whole
            await asyncio.sleep(POLL_S)
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)


def _is_whole(picture: Picture) -> bool:
    return all(
        row.leases_held is not None and row.pages_quarantined is not None for row in picture.members() if row.registered
    )


async def _live(nats_url: str, token: str, prefix: str, screen: Console) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    bus = await connect(nats_url, token, prefix, name="kvbus-top")
    picture = Picture()
    following = Following(bus, Topics(prefix), picture)
    task = asyncio.ensure_future(following.run())
    try:
        with _silent():
            await _show(TopScreen(bus, Topics(prefix), picture, following), screen, task, stop)
        return 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.close()


async def _show(top_screen: TopScreen, screen: Console, task: "asyncio.Task[None]", stop: asyncio.Event) -> None:
    """Draw until told to stop; what ends the following ends this, too."""
    loop = asyncio.get_running_loop()
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        async with pressed(sys.stdin.fileno()) as keys:
            drawn_at = -REDRAW_S
            while not stop.is_set() and not task.done():
                if top_screen.has_changed() or loop.time() - drawn_at >= REDRAW_S:
                    width, height = screen.size
                    live.update(Group(*top_screen.lines(width, height, time.time_ns())), refresh=True)
                    drawn_at = loop.time()
                if not await _frame(top_screen, keys, stop):
                    break
    if task.done():
        task.result()


async def _frame(top_screen: TopScreen, keys: "asyncio.Queue[str]", stop: asyncio.Event) -> bool:
    """Wait for the next frame, or for a key; False where a key ends it all."""
    waits = {asyncio.ensure_future(keys.get()), asyncio.ensure_future(stop.wait())}
    try:
        await asyncio.wait(waits, timeout=FRAME_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            if wait.done() and isinstance(key := wait.result(), str) and not await top_screen.press(key):
                return False
        return True
    finally:
        for wait in waits:
            wait.cancel()


@contextmanager
def _silent() -> Iterator[None]:
    """Keep log lines off the screen while it is drawn on."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
