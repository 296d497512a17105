"""What a doctor learns of the workers that a broker's registry names, and which way pages would take between them."""

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from kvbus.bus import NatsBus
from kvbus.bus_access import DeniedError
from kvbus.commands.broker_checks import AS_OBSERVER
from kvbus.commands.findings import Notes
from kvbus.commands.wording import counted, size
from kvbus.dataplane.planner import Planner
from kvbus.errors import BusError, PeerError
from kvbus.events import Header, HeartbeatSeen, StatsAnswered, StatsAsked, decode, encode
from kvbus.names import epoch_counter
from kvbus.processes import same_host, start_ticks
from kvbus.roles.registry import Registered, lookup
from kvbus.topics import Query, Topics, unescape
from kvbus.transport import BUCKET_INSTANCES, Delivery

LISTEN_S = 2.5
"""Two heartbeats of one second each, with room."""
ASK_S = 3.0
INSTANCES_MAX = 64
"""Asked one by one; more make a screen that nobody reads."""
PAIRS_SHOWN_MAX = 16
PAGES = 32
"""For saying which way pages would take: a prompt of a thousand tokens."""

Beats = Mapping[tuple[str, str, int], tuple[float, HeartbeatSeen]]
"""By instance, member and epoch: when it was heard, in this process's monotonic seconds, and what it said."""
Counted = Mapping[str, int | float | str]


async def check_workers(notes: Notes, bus: NatsBus, prefix: str) -> None:
    """Look at every registered worker, and at each pair of instances that could exchange pages."""
    topics = Topics(prefix)
    try:
        found = await _registered(bus)
    except DeniedError:
        notes.warning("registry", "this user may not read it", AS_OBSERVER)
        return
    except (BusError, TimeoutError) as error:
        notes.wrong("registry", f"cannot be read: {str(error) or 'no answer'}", "see the server's log")
        return
    if not found:
        notes.warning(
            "registry", "no worker is registered", "start some: `kvbus up`, or `kvbus worker --instance NAME`"
        )
        return
    beats = await _heard(bus, topics)
    now = time.monotonic()
    stats = {one.instance: await _stats(bus, topics, one.instance) for one in found}
    for one in found:
        _worker(notes, one, beats, stats[one.instance], now)
    _pairs(notes, found, stats)


async def _registered(bus: NatsBus) -> list[Registered]:
    names: set[str] = set()
    for key in await bus.keys(BUCKET_INSTANCES):
        with suppress(PeerError):  # a key of somebody else's making
            names.add(unescape(key).rpartition("/")[0])
    return [one for name in sorted(names - {""})[:INSTANCES_MAX] for one in await lookup(bus, name)]


async def _heard(bus: NatsBus, topics: Topics) -> Beats:
    """Listen for heartbeats for LISTEN_S."""
    beats: dict[tuple[str, str, int], tuple[float, HeartbeatSeen]] = {}

    async def hear(delivery: Delivery) -> None:
        with suppress(PeerError):
            event = decode(delivery.data)
            if isinstance(event.body, HeartbeatSeen):
                beats[event.header.i, event.header.m, event.header.e] = (time.monotonic(), event.body)

    with suppress(BusError):
        subscription = await bus.subscribe(topics.heartbeat(), hear)
        await asyncio.sleep(LISTEN_S)
        await subscription.close()
    return beats


async def _stats(bus: NatsBus, topics: Topics, instance: str) -> Counted:
    asked = StatsAsked()
    header = Header(k=asked.KIND, i="doctor", m="", e=0, s=secrets.randbits(62), t=time.time_ns())
    with suppress(BusError, PeerError):
        data = await bus.request(topics.query(instance, Query.STATS), encode(header, asked), wait_s=ASK_S)
        if isinstance(data, bytes) and isinstance(body := decode(data).body, StatsAnswered):
            return body.counters
    return {}


def _worker(notes: Notes, one: Registered, beats: Beats, counters: Counted, now: float) -> None:
    name, record = f"{one.instance}/{one.member}", one.record
    about = f"epoch {epoch_counter(one.epoch)}, {record.engine}, {record.pages} pages of {size(record.page_bytes)}"
    about += f", offers {', '.join(record.transports) or 'nothing'}"
    here = same_host(record.process)
    if here and start_ticks(record.process.pid) != record.process.start_ticks:
        notes.wrong(
            name, f"process {record.process.pid} is gone; {about}", "start it again; its record ends within 10 s"
        )
        return
    heard = beats.get((one.instance, one.member, one.epoch))
    if heard is None:
        who = f"process {record.process.pid} lives" if here else "it is registered"
        step = "see its log: it may hang, or may not publish" if here else "see whether its host and network are up"
        notes.wrong(name, f"{who}, and no heartbeat came for {LISTEN_S:g} s; {about}", step)
        return
    beat_at, load = heard
    about += f"; heartbeat {now - beat_at:.1f} s ago, {counted(load.transfers_running, 'transfer')} running"
    about += f", {load.pages_free} pages free{_lanes(counters)}"
    if broken := _broken(counters):
        notes.wrong(name, f"{'; '.join(broken)}; {about}", "see its log, and start it again")
    elif load.state:
        notes.warning(name, f"{load.state}; {about}", f"`kvbus drain {one.instance} --undo` takes it back, if it stays")
    elif load.pages_free + load.pages_cached == 0:
        notes.warning(name, about, "no page is free and none is cached: start it with more --pages")
    else:
        notes.ok(name, about)


def _broken(counters: Counted) -> list[str]:
    """Say which transports have broken down for good, and which parts take nothing any more."""
    failed = _beginning(counters, "ways_failed_")
    ways = [f"reads by {name.removeprefix('ways_failed_')} no more: {why}" for name, why in failed]
    stopped = sorted(name for name, is_stopped in counters.items() if name.endswith("_stopped") and is_stopped)
    return ways + [f"{name.removesuffix('_stopped')} is stopped: it takes no leases" for name in stopped]


def _lanes(counters: Counted) -> str:
    """Say by which ways this instance has read so far, what UCX may take, and which lanes it found."""
    ways = [f"{name.removeprefix('ways_by_')} {count}" for name, count in _beginning(counters, "ways_by_")]
    lanes = [name.removeprefix("ways_lane_").replace("_", "/", 1) for name, _ in _beginning(counters, "ways_lane_")]
    text = f"; UCX may take {counters['ways_ucx_tls']}" if "ways_ucx_tls" in counters else ""
    text += f"; has read by {', '.join(ways)}" if ways else ""
    return f"{text} (ucx lanes {', '.join(sorted(lanes))})" if lanes else text


def _beginning(counters: Counted, head: str) -> list[tuple[str, int | float | str]]:
    return sorted((name, count) for name, count in counters.items() if name.startswith(head))


# --------------------------------------------------------------------------------------------------------------- pairs


def _pairs(notes: Notes, found: Sequence[Registered], stats: Mapping[str, Counted]) -> None:
    pairs = list(_readers_and_lenders(found))
    for reader, lender in pairs[:PAIRS_SHOWN_MAX]:
        name = f"{lender.instance} → {reader.instance}"
        offered = _unbroken(lender.record.transports, stats[lender.instance])
        _pair(notes, name, reader, lender, _readable(reader, stats[reader.instance]), offered)
    if len(pairs) > PAIRS_SHOWN_MAX:
        notes.ok("more pairs", f"{len(pairs) - PAIRS_SHOWN_MAX} are not shown")
    if len({one.instance for one in found}) > 1 and not pairs:
        notes.warning(
            "pairs", "no two instances have the same layout: they exchange nothing", "use one model and engine"
        )


def _readers_and_lenders(found: Sequence[Registered]) -> Iterator[tuple[Registered, Registered]]:
    for reader in found:
        for lender in found:
            if lender.instance != reader.instance and lender.record.fingerprint == reader.record.fingerprint:
                yield reader, lender


def _readable(reader: Registered, counters: Counted) -> tuple[str, ...]:
    """Return by what an instance reads: as it says itself, else by what it offers."""
    said = tuple(name.removeprefix("ways_open_") for name, _ in _beginning(counters, "ways_open_"))
    return _unbroken(said or reader.record.transports, counters)


def _unbroken(transports: Sequence[str], counters: Counted) -> tuple[str, ...]:
    return tuple(name for name in transports if f"ways_failed_{name}" not in counters)


def _pair(
    notes: Notes,
    name: str,
    reader: Registered,
    lender: Registered,
    readable: tuple[str, ...],
    offered: tuple[str, ...],
) -> None:
    ranking = Planner(reader.record.process).rank(
        ours=readable,
        offered=offered,
        lender=lender.record.process,
        pages=PAGES,
        page_bytes=reader.record.page_bytes,
    )
    if ranking.candidates:
        notes.ok(name, f"pages would come {ranking.text(ranking.transports[0])}")
    else:
        found = f"{reader.instance} reads by {', '.join(readable) or 'nothing'}, {lender.instance} offers "
        notes.wrong(name, f"{found}{', '.join(offered) or 'nothing'}", "start both with --transport auto")
