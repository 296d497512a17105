"""`/metrics`: this gateway's own numbers, and those of all members, so that one scrape shows the cluster.

prometheus-client is imported at the first scrape: a gateway that nobody scrapes does not have it, asks nobody for
counters, and hears no heartbeat for it (R23).
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec

from starlette.requests import Request
from starlette.responses import Response

from kvbus.gateway.answers import Problem
from kvbus.gateway.parts import Parts
from kvbus.gateway.roll import Member, Roll
from kvbus.gateway.routing import Door
from kvbus.gateway.transfer_words import TEXT, problems
from kvbus.metrics import table
from kvbus.metrics.reading import Counted, Reading, Section
from kvbus.version import VERSION

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METRICS = {
    "operationId": "metrics",
    "summary": "Metrics for Prometheus: this gateway's, and those of all members that are registered.",
    "description": "Members are told apart by `instance` and `member`, so scrape with `honor_labels: true`.",
    "responses": {
        "200": {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": TEXT}}},
        **problems(s501="prometheus-client is not installed here."),
    },
}


def doors(parts: Parts) -> list[Door]:
    """Return the door of metrics."""
    return [Door("GET", PATH, MetricsDoor(parts).metrics, METRICS, per_instance=False)]


class MetricsDoor:
    """The handler. Scrapes come one after the other, so that many of them cost no more than one."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._one = asyncio.Lock()
        self._render: Callable[[Sequence[Section]], bytes] | None = None
        self._roll = Roll(
            bus=parts.bus,
            topics=parts.topics,
            directory=parts.directory,
            asker=parts.publisher.requester,
            only=frozenset(parts.settings.instances),
        )

    async def metrics(self, _request: Request) -> Response:
        """Return all metrics."""
        async with self._one:
            render = self._renderer()
            members = await self._roll.call()
            # On a thread: a hundred members make 20,000 lines, and the loop has transfers to answer meanwhile.
            body = await asyncio.to_thread(render, [*own_sections(self._parts), *member_sections(members, self._roll)])
        return Response(body, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})

    def _renderer(self) -> Callable[[Sequence[Section]], bytes]:
        if self._render is None:
            if find_spec("prometheus_client") is None:
                raise Problem(501, "metrics need more than kvbus itself: pip install 'kvbus[gateway]'")
            from kvbus.metrics.rendering import Exposition  # noqa: PLC0415 - only a gateway that is scraped pays for it

            self._render = Exposition().render
        return self._render


def own_sections(parts: Parts) -> list[Section]:
    """Return what this gateway tells of itself."""
    gates = {name: parts.transfers.statistics(name) for name in sorted(parts.transfers.gated())}
    busy = sum(gate.skipped_busy for gate in gates.values())
    requests = [Reading({"requests": count}, labels) for labels, count in parts.requests.by_class()]
    return [
        Section(table.BUILD, [Reading({"one": 1}, {"version": VERSION})]),
        Section(table.GATE, [Reading(asdict(gate), {"destination": name}) for name, gate in gates.items()]),
        Section(table.GATEWAY, [Reading(gateway_counters(parts) | parts.requests.refused() | {"refused_busy": busy})]),
        Section(table.HTTP, requests),
    ]


def gateway_counters(parts: Parts) -> dict[str, int | float | str]:
    """Return what this gateway counts, by name."""
    health, feed = parts.bus.health(), parts.feed
    fresh = health.connected and feed.listening and parts.directory.fresh
    heard: Mapping[str, int] = feed.counters()
    return {
        "followers": feed.clients + parts.page.clients,
        "body_bytes": parts.bodies.held_bytes,
        "feed_listening": int(feed.listening),
        "feed_losses": feed.losses,
        **{f"feed_{name}": heard.get(name, 0) for name in ("repaired", "duplicate", "malformed")},
        "registry_fresh": int(parts.directory.fresh),
        "stale": int(not fresh),
        "bus_connected": int(health.connected),
        "bus_reconnected": health.counters.get("reconnected", 0),
    }


def member_sections(members: Sequence[Member], roll: Roll) -> list[Section]:
    """Return what is known of the members, and what each of them answered."""
    now = time.monotonic()
    who = [{"instance": one.instance, "member": one.name} for one in members]
    present = [
        Reading(_presence(one, now if roll.hears else math.nan), it) for one, it in zip(members, who, strict=True)
    ]
    told = [Reading({"one": 1}, it | _info(one)) for one, it in zip(members, who, strict=True)]
    counted = [Reading(one.counted, it) for one, it in zip(members, who, strict=True) if one.counted is not None]
    return [Section(table.PRESENCE, present), Section(table.INFO, told), Section(table.MEMBER, counted)]


def _presence(member: Member, now: float) -> Counted:
    return {"up": int(member.counted is not None), "starts": member.starts, "heartbeat_s": member.silent_s(now)}


def _info(member: Member) -> dict[str, str]:
    record = member.record
    if record is None:
        return {}
    return {"version": record.version, "engine": record.engine, "model": record.model}
