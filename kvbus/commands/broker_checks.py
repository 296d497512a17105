"""What a doctor asks a broker: whether it answers, which version it is, and whether its streams are as they should be.

Nothing is created or changed. A server says which one it is before anybody logs in, so that a wrong token and an old
version are told apart.
"""

import asyncio
import json
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvbus.bus import NatsBus
from kvbus.bus_access import DeniedError
from kvbus.bus_assets import AssetLimits, Assets, drift
from kvbus.bus_guards import SERVER_FLOOR, nodes
from kvbus.commands.common import entering
from kvbus.commands.findings import Notes, address_of
from kvbus.commands.wording import counted
from kvbus.errors import BusError, ConfigError
from kvbus.topics import Topics

HELLO_S = 3.0
"""A server greets within a round trip; this is for one across an ocean."""
CONNECT_S = 12.0
"""The bus gives up by itself within ten seconds."""
ASK_S = 3.0
ROUND_TRIPS = 9
SLOW_S = 0.010
"""Above this a transfer's own cost, some five round trips, is more than moving a prompt of 1,000 tokens."""
NO_STREAM = 10059
AS_OBSERVER = "come with --credentials of an observer: `kvbus auth init --observers` writes them"
NATS_PORT = 4222


@dataclass(frozen=True, slots=True)
class Hello:
    """What a server says of itself before anybody has logged in."""

    version: str
    has_jetstream: bool
    needs_login: bool


async def hello(url: str) -> Hello | str:
    """Return one server's greeting, or why there is none."""
    parts = urlsplit(url if "//" in url else f"nats://{url}")
    try:
        host, port = parts.hostname or "", parts.port or NATS_PORT
    except ValueError:
        return "the address has no port that is a number"
    try:
        async with asyncio.timeout(HELLO_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                line = await reader.readline()
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        return f"no greeting within {HELLO_S:g} s"
    except ConnectionRefusedError:
        return "nothing listens there"
    except (OSError, ValueError) as error:
        return str(error)
    return _greeting(line)


def _greeting(line: bytes) -> Hello | str:
    word, _, rest = line.partition(b" ")
    try:
        said = json.loads(rest) if word == b"INFO" else None
    except ValueError:
        said = None
    if not isinstance(said, dict):
        return "something answers there, and it is no NATS server"
    return Hello(str(said.get("version", "")), bool(said.get("jetstream")), bool(said.get("auth_required")))


async def check_server(notes: Notes, url: str) -> bool:
    """Look at the server itself, or at each that a URL names; False where nothing further can be asked.

    One node of several may be away: the others serve.
    """
    found = [(address_of(node), node) for node in nodes(url)]
    greetings = await asyncio.gather(*(hello(node) for _, node in found))
    serve = [one for one in greetings if isinstance(one, Hello)]
    well = bool(serve)
    for (where, _), said in zip(found, greetings, strict=True):
        if isinstance(said, Hello):
            well &= _is_fit(notes, where, said)
        elif serve:
            notes.warning("server", f"{where}: {said}", "start this node again; the others serve meanwhile")
        else:
            step = "start it, or name another with --nats URL; a stale state file goes away with the next `kvbus up`"
            notes.wrong("server", f"{where}: {said}", step)
    if well:
        notes.ok("jetstream", "on")
    return well


def _is_fit(notes: Notes, where: str, said: Hello) -> bool:
    login = ", asks for credentials" if said.needs_login else ", lets everybody in"
    if _version(said.version) < SERVER_FLOOR:
        floor = ".".join(map(str, SERVER_FLOOR))
        notes.wrong("server", f"{where}: nats-server {said.version}", f"upgrade it to {floor} or newer")
        return False
    notes.ok("server", f"{where}: nats-server {said.version}{login}")
    if not said.has_jetstream:
        notes.wrong("jetstream", f"off at {where}", "start the server with JetStream (nats-server -js)")
    return said.has_jetstream


def _version(text: str) -> tuple[int, ...]:
    parts = text.partition("-")[0].split(".")[:2]
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


async def connected(notes: Notes, url: str, token: str, prefix: str, *, discovered: bool = False) -> NatsBus | None:
    """Log in as every command does; None, with a finding, where that does not work."""
    topics = Topics(prefix)
    try:
        files = entering(discovered=discovered)
        async with asyncio.timeout(CONNECT_S):
            return await NatsBus.connect(url, name="kvbus-doctor", token=token or None, topics=topics, **files)
    except TimeoutError:
        notes.wrong("login", f"not within {CONNECT_S:g} s", "see the server's log")
    except (BusError, ConfigError) as error:
        notes.wrong("login", str(error), "give the right --credentials or --token, or a --nats URL with a user in it")
    return None


async def check_round_trip(notes: Notes, bus: NatsBus) -> None:
    """Measure some round trips to JetStream."""
    spent: list[float] = []
    try:
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            await bus.ask("$JS.API.INFO", b"", wait_s=ASK_S)
            spent.append(time.perf_counter() - began)
    except DeniedError:
        notes.warning("round trip", "this user may not ask for it", AS_OBSERVER)
        return
    except (BusError, TimeoutError) as error:
        notes.wrong("round trip", str(error) or f"none within {ASK_S:g} s", "see the server's log")
        return
    middle = statistics.median(spent)
    text = f"{middle * 1e3:.2f} ms (median of {ROUND_TRIPS}, longest {max(spent) * 1e3:.1f} ms)"
    if middle > SLOW_S:
        notes.warning("round trip", text, "run the broker nearer to the workers: a transfer takes some five of these")
    else:
        notes.ok("round trip", text)


async def check_assets(notes: Notes, bus: NatsBus, prefix: str) -> bool:
    """Compare streams and buckets with what kvbus needs, without touching them; False where some are missing."""
    missing: list[str] = []
    for wanted in Assets(Topics(prefix), AssetLimits()).all():
        name = str(wanted["name"])
        try:
            answer = json.loads(await bus.ask(f"$JS.API.STREAM.INFO.{name}", b"", wait_s=ASK_S))
        except DeniedError:
            notes.warning(name, "this user may not look at it", AS_OBSERVER)
            continue
        except (BusError, TimeoutError, ValueError) as error:
            notes.wrong(name, f"cannot be looked at: {str(error) or 'no answer'}", "see the server's log")
            continue
        if problem := answer.get("error"):
            if problem.get("err_code") == NO_STREAM:
                missing.append(name)
            else:
                notes.wrong(name, str(problem.get("description")), "see the server's log")
            continue
        _compare(notes, wanted, answer)
    if missing:
        named = "" if prefix == Topics().prefix else f" --prefix {prefix}"
        notes.wrong("streams", f"missing: {', '.join(missing)}", f"kvbus init{named}")
    return not missing


def _compare(notes: Notes, wanted: dict[str, object], answer: dict[str, object]) -> None:
    name, config, state = str(wanted["name"]), answer.get("config"), answer.get("state")
    differs = [
        f"{field} is {found!r}, needed {expected!r}"
        for field, found, expected in drift(wanted, config if isinstance(config, dict) else {})
    ]
    if differs:
        notes.wrong(
            name, "; ".join(differs), "use another --prefix, or remove it if nobody needs it and run kvbus init"
        )
        return
    held = state.get("messages", 0) if isinstance(state, dict) else 0
    replicas = config.get("num_replicas", 1) if isinstance(config, dict) else 1
    notes.ok(name, f"as it should be; {counted(held, 'message')}, {counted(replicas, 'replica')}")
