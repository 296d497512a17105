"""What a broker has to carry: counted on real workers, and multiplied for 10, 100 and 1,000 instances.

    python bench/capacity.py --measure   # two workers and a broker: writes docs/capacity.json
    python bench/capacity.py             # renders docs/capacity.md from that
    python bench/capacity.py --check     # exit status 1 where the page is another one

Counted are messages as they are published, each once, with their subjects and payloads. What a follower (a gateway, a
dashboard) hears comes on top: every fact once for each.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
from controls.town import BLOCK, TOPICS, town
from nats.aio.msg import Msg

from kvbus.bus import NatsBus
from kvbus.bus_assets import KEEP_HOURS_MIN
from kvbus.commands.recordings import EVENTS_MAX
from kvbus.publisher import Publisher

ROOT = Path(__file__).resolve().parents[1]
COSTS = ROOT / "docs" / "capacity.json"
PAGE = ROOT / "docs" / "capacity.md"
SIZES = (10, 100, 1_000)
RATES = (0.1, 1.0, 10.0)
"""Transfers a second that each instance takes: a quiet one, a usual one, and one that does little else."""
BLOCKS = 32
"""Of each prompt: 1,024 tokens."""
TRANSFERS = 40
IDLE_S = 20.0
SETTLE_S = 5.0
"""After the start of a worker: from its second refresh in the registry on it knows where its record stands."""
REST_S = 2.0
"""For the facts that follow an outcome, and a heartbeat or two, which are taken off."""
SETTLE_MIB = 128
FACTS_MIB = 1_024
"""What `kvbus init` reserves for facts unless told otherwise."""


class Ear:
    """Counts what is published on the broker, by kind."""

    def __init__(self) -> None:
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    async def hear(self, message: Msg) -> None:
        """Count one message."""
        kind = _kind(message.subject)
        self.messages[kind] += 1
        self.bytes[kind] += len(message.subject) + len(message.data)

    def take(self) -> dict[str, dict[str, float]]:
        """Return what was heard since the last time."""
        heard = {"messages": dict(self.messages), "bytes": dict(self.bytes)}
        self.messages.clear()
        self.bytes.clear()
        return {name: {kind: float(count) for kind, count in sorted(counts.items())} for name, counts in heard.items()}


async def measure() -> dict[str, Any]:
    """Count on a broker and two workers, which speak to nobody else."""
    with tempfile.TemporaryDirectory(prefix="kvbus-") as folder:
        async with town(Path(folder)) as (built, bus):
            for name, allow in (("a", []), ("b", ["a"])):
                await built.start(bus, name, allow=allow, pages=BLOCKS * (TRANSFERS + 8), in_flight=8)
            ear = Ear()
            listener = await nats.connect(built.url, pending_size=1 << 26)
            await asyncio.sleep(SETTLE_S)
            await listener.subscribe(">", cb=ear.hear)
            await listener.flush()
            try:
                return await _counted(bus, ear)
            finally:
                await listener.close()


async def _counted(bus: NatsBus, ear: Ear) -> dict[str, Any]:
    before, began = await _stored(bus), time.monotonic()
    ear.take()
    await asyncio.sleep(IDLE_S)
    idle_s, idle, after = time.monotonic() - began, ear.take(), await _stored(bus)
    ear.take()
    idle_facts = after["KVB_FACTS"] - before["KVB_FACTS"]
    async with Publisher(bus=bus, topics=TOPICS) as publisher:
        await _transfers(publisher, 4)  # the first ones connect
        await asyncio.sleep(REST_S)
        before, began = await _stored(bus), time.monotonic()
        ear.take()
        await _transfers(publisher, TRANSFERS)
        await asyncio.sleep(REST_S)
        took_s, busy, after = time.monotonic() - began, ear.take(), await _stored(bus)
    share = took_s / idle_s
    return {
        "blocks": BLOCKS,
        "transfers": TRANSFERS,
        "instance_messages_s": sum(idle["messages"].values()) / idle_s / 2,
        "instance_bytes_s": sum(idle["bytes"].values()) / idle_s / 2,
        "instance_facts_bytes_s": idle_facts / idle_s / 2,
        "instance_record_bytes": after["KV_kvbus_instances"] / 2,
        "transfer_messages": _more(busy, idle, share, "messages") / TRANSFERS,
        "transfer_bytes": _more(busy, idle, share, "bytes") / TRANSFERS,
        "transfer_facts_bytes": (after["KVB_FACTS"] - before["KVB_FACTS"] - idle_facts * share) / TRANSFERS,
        "transfer_settle_bytes": (after["KVB_SETTLE"] - before["KVB_SETTLE"]) / TRANSFERS,
        "transfer_live_facts_bytes": busy["bytes"].get("live facts", 0.0) / TRANSFERS,
        "by_kind": {kind: round(count / TRANSFERS, 2) for kind, count in busy["messages"].items()},
    }


def _more(busy: dict[str, dict[str, float]], idle: dict[str, dict[str, float]], share: float, what: str) -> float:
    """Return what transfers added to what would have been said in that time anyway."""
    return sum(busy[what].values()) - share * sum(idle[what].values())


async def _transfers(publisher: Publisher, count: int) -> None:
    pick = random.SystemRandom()
    for _ in range(count):
        prompt = [pick.randrange(97, 123) for _ in range(BLOCKS * BLOCK + 3)]
        handle = await publisher.transfer(source="a", destination="b", prompt=prompt)
        outcome = await handle.outcome()
        if outcome is None or outcome.outcome != "settled":
            raise SystemExit(f"a transfer ended as {outcome}: what was counted is of no use")


async def _stored(bus: NatsBus) -> dict[str, float]:
    """Return the bytes that each stream holds."""
    names = ("KVB_FACTS", "KVB_SETTLE", "KV_kvbus_instances")
    answers = [json.loads(await bus.ask(f"$JS.API.STREAM.INFO.{name}", b"", wait_s=5)) for name in names]
    return {name: float(answer["state"]["bytes"]) for name, answer in zip(names, answers, strict=True)}


def _kind(subject: str) -> str:
    if subject.startswith("_INBOX"):
        return "answers"
    if subject.startswith("$JS.API."):
        return "questions to JetStream"
    if subject.startswith("$"):
        return "acks and buckets"
    words = subject.split(".")
    return " ".join(words[1:3]) if words[1] == "live" else words[1]


# ---------------------------------------------------------------------------------------------------------- the page


TEXT = """\
# Capacity

What the broker has to carry and to keep. Made by `python bench/capacity.py` from what it counted on a broker and two
workers (docs/capacity.json); `--measure` counts anew. The numbers are counts, so another machine gives nearly the
same ones; how many messages a second a broker takes is its own matter.

## What one costs

| | messages | bytes | stored facts |
|---|---|---|---|
| an instance, each second | {instance} |
| a transfer of {blocks} blocks | {transfer} |

The transfers were made one after the other: where many run at once, facts that gather meanwhile share a message, and
there are fewer. A message counts when it is published, with its subject and payload, and a request once more when the
queue hands it out. An instance's record in the registry takes
{record}. Pages never pass the broker.

What is said during a transfer, by kind (with the heartbeats of that time):

| kind | messages for a transfer |
|---|---|
{kinds}

## What many cost

| instances | transfers/s for each | messages/s | bytes | facts for a day | {facts_gib} GiB of facts are full after |
|---|---|---|---|---|---|
{rows}

- **Followers.** Each gateway and each dashboard hears every fact as it is stored: {live} for a transfer, for each of
  them.
- **Replicas.** With three replicas each stored message is written three times, once on each node, and the leader sends
  it twice. Requests, facts, decisions and registry records are stored; the rest is not.
- **The facts stream** drops its oldest messages when it is full, and what is older than `kvbus init --keep-hours`,
  which is {keep_hours} unless told otherwise. The table's last column is what fits: the stream holds that, or the hours
  that it is told to keep, whichever is less. Set both to the time over which an audit has to be possible
  (`--facts-mib`, `--keep-hours`). Where a day does not fit, record with `kvbus watch --record`. An audit reads the
  newest {events} events of each log.
- **The request queue** holds 10,000 requests and 256 MiB; a request leaves it when its transfer has ended. A requester
  is told `skipped_busy` long before it is full.
- **The settle log** takes {settle} for a transfer. It holds 128 MiB, for as many hours as the facts, and drops its
  oldest decisions when it is full: that is {settle_transfers} transfers.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What a number of instances costs at a number of transfers a second for each."""

    instances: int
    rate: float
    messages_s: float
    bytes_s: float
    facts_bytes_day: float
    facts_full_h: float


def load(costs: dict[str, Any], instances: int, rate: float) -> Load:
    """Multiply: each instance's own, and each transfer's."""
    transfers_s = instances * rate
    facts_bytes_s = instances * costs["instance_facts_bytes_s"] + transfers_s * costs["transfer_facts_bytes"]
    return Load(
        instances,
        rate,
        instances * costs["instance_messages_s"] + transfers_s * costs["transfer_messages"],
        instances * costs["instance_bytes_s"] + transfers_s * costs["transfer_bytes"],
        facts_bytes_s * 86_400,
        (FACTS_MIB << 20) / facts_bytes_s / 3_600,
    )


def page(costs: dict[str, Any]) -> str:
    """Return the page."""
    loads = [load(costs, instances, rate) for instances in SIZES for rate in RATES]
    rows = [
        f"| {one.instances:,} | {one.rate:g} | {_number(one.messages_s)} | {_size(one.bytes_s)}/s "
        f"| {_size(one.facts_bytes_day)} | {_hours(one.facts_full_h)} |"
        for one in loads
    ]
    kinds = [f"| {kind} | {count:g} |" for kind, count in costs["by_kind"].items()]
    return TEXT.format(
        instance=f"{costs['instance_messages_s']:.2f} | {_size(costs['instance_bytes_s'])} "
        f"| {_size(costs['instance_facts_bytes_s'])}",
        blocks=costs["blocks"],
        transfer=f"{costs['transfer_messages']:.1f} | {_size(costs['transfer_bytes'])} "
        f"| {_size(costs['transfer_facts_bytes'])}",
        record=_size(costs["instance_record_bytes"]),
        kinds="\n".join(kinds),
        facts_gib=FACTS_MIB // 1_024,
        keep_hours="an hour" if KEEP_HOURS_MIN == 1 else f"{KEEP_HOURS_MIN} hours",
        events=f"{EVENTS_MAX:,}",
        rows="\n".join(rows),
        settle=_size(costs["transfer_settle_bytes"]),
        settle_transfers=f"{(SETTLE_MIB << 20) / costs['transfer_settle_bytes']:,.0f}",
        live=_size(costs["transfer_live_facts_bytes"]),
    )


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _size(value: float) -> str:
    for limit, word in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{value / limit:.1f} {word}"
    return f"{value:.0f} B"


def _hours(value: float) -> str:
    if value < 1:
        return f"{value * 60:.1f} min"
    return f"{value / 24:,.1f} days" if value >= 48 else f"{value:.1f} h"


def main() -> int:
    """Measure, render or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="count on real workers, and write docs/capacity.json")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the page is the one to be")
    options = parser.parse_args()
    if options.measure:
        COSTS.write_text(json.dumps(asyncio.run(measure()), indent=2) + "\n", encoding="utf-8")
    text = page(json.loads(COSTS.read_text(encoding="utf-8")))
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
