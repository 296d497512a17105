"""Large transfers that are cancelled, slow peers, many peers at once, and hosts short of memory."""

import random
import resource
import time
from pathlib import Path

from bench.chaos_data.content import names_of
from bench.chaos_data.lab import EVIDENCE_S, RATE_BYTES_S, Lab, Seat, Transfer, ballast
from bench.chaos_data.table import Row
from kvbus.pool.host_memory import available_bytes

LARGE_PAGE_BYTES = 2 << 20
LARGE_BYTES = {"cma": 1 << 30}
"""What a cancelled transfer is to move; over the other transports, and on a host without room, OTHERS_BYTES."""
OTHERS_BYTES = 256 << 20
LARGE_S = 2.0
"""How long the whole of it would take: longer than new content needs to fill the pages, so that a late byte shows."""
MEMORY_SHARE = 8
"""At most an eighth of the available memory goes into one pool, or into ballast: the host has other uses for it."""
BALLAST_BYTES_MAX = 2 << 30
SPACE_LEFT_BYTES = 1 << 20
"""Enough for what Python takes in passing; a connection of UCX takes half as much again, a pool eight times as much."""
PEERS = 64
HOUSES = 4
STORM_ROWS = 4


def cancelled(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """A large transfer is cancelled; its pages take new content at once when access has ended, and only then."""
    wanted = LARGE_BYTES.get(row.transport, OTHERS_BYTES)
    room = (available_bytes() or OTHERS_BYTES) // MEMORY_SHARE
    length_bytes = wanted if wanted <= room else max(64 << 20, min(OTHERS_BYTES, room))
    rows = length_bytes // LARGE_PAGE_BYTES
    row.note = f"{length_bytes >> 20} MiB a transfer"
    chosen = {"page_bytes": LARGE_PAGE_BYTES, "pages": rows + 1}
    with Lab(row, chance, plant) as lab:
        source = lab.seat("a", row.transport, **chosen)
        destination = lab.seat("b", row.transport, rate_limit_bytes_s=length_bytes / LARGE_S, **chosen)
        tag = f"{row.fault} large"
        source.ask("write", names_of(tag, rows))
        for number in range(rounds):
            after = names_of(f"{row.fault} after {number}", rows)
            transfer = lab.begin(source, destination, tag=tag, rows=rows, hand_to=after)
            lab.until_share(transfer, lab.share())
            at = transfer.cancel()
            end = transfer.end()
            row.runs += 1
            row.ended(end.evidence, at, end.at)
            row.check(
                end.result in {"cancelled", "delivered"}, f"a cancelled transfer ended as {end.result}: {end.text}"
            )
            lab.handed_over(transfer)
            transfer.tell()
            lab.whole(lab.begin(source, destination, tag=tag, rows=1))  # over the same way, behind all that was asked
            lab.at_rest()
            lab.look(destination)
            destination.ask("evict", (*after, *transfer.names))


def slow(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """A source that moves by fits and starts, read slowly, is waited for: nothing is isolated, every page comes."""
    row.note = "time is the whole transfer's"
    with Lab(row, chance, plant) as lab:
        source = lab.seat("a", row.transport)
        destination = lab.seat("b", row.transport, rate_limit_bytes_s=RATE_BYTES_S / 4)
        for _ in range(rounds):
            began = time.monotonic()
            transfer = lab.begin(source, destination)
            for share in sorted(chance.uniform(0.05, 0.95) for _ in range(4)):
                lab.until_share(transfer, share)
                source.house.stop()
                transfer.end_within(0.3)
                source.house.go_on()
            end = lab.whole(transfer)
            row.runs += 1
            row.ended(end.evidence, began, end.at)
            counted = destination.ask("counted")
            row.check(not counted["isolated"], f"a slow peer was isolated: {counted}")
            lab.at_rest()
            lab.look()
            destination.ask("evict", transfer.names)
            source.ask("evict", transfer.names)


def storm(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """A destination meets 64 sources at once, and a source 64 readers: each comes through, within bounds.

    A connection has as long as evidence has, for on a starved host 64 of them may take longer than a worker grants one.
    Time counts from the first order to each attempt's end, so it is the whole storm's at its longest.
    """
    with Lab(row, chance, plant) as lab:
        crowd = _crowd(lab, row.transport)
        pages = PEERS * STORM_ROWS + 1
        centre = lab.seat("b", row.transport, pages=pages, wire_up_s=EVIDENCE_S)
        before = centre.ask("descriptors")
        for _ in range(rounds):
            _all_at_once(lab, [lab.offer(peer, centre, rows=STORM_ROWS) for peer in crowd])
            _all_at_once(lab, [lab.offer(centre, peer, rows=STORM_ROWS) for peer in crowd])
            row.runs += 1
            row.check(lab.links(centre) <= PEERS, f"{lab.links(centre)} links to {PEERS} peers")
            more = centre.ask("descriptors") - before
            row.note = f"{more} more open files with {PEERS} peers both ways; time is each transfer's from the first on"


def _crowd(lab: Lab, transport: str) -> list[Seat]:
    houses = [
        lab.house(
            [
                lab.member(f"p{number}", transport, pages=2 * STORM_ROWS + 1, wire_up_s=EVIDENCE_S)
                for number in range(at, PEERS, HOUSES)
            ]
        )
        for at in range(HOUSES)
    ]
    return [Seat(house, number) for house in houses for number in range(len(house.settings))]


def _all_at_once(lab: Lab, transfers: list[Transfer]) -> None:
    began = time.monotonic()
    for transfer in transfers:
        transfer.ticket, transfer.pages = transfer.destination.ask(
            "fetch", transfer.sealed, transfer.expected, transfer.names
        )
    for transfer in transfers:
        end = lab.whole(transfer)
        lab.row.ended(end.evidence, began, end.at)
    lab.at_rest()
    lab.look()
    for transfer in transfers:
        transfer.destination.ask("evict", transfer.names)
        transfer.source.ask("evict", transfer.names)


def pressed(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """Another process takes and gives back memory without pause while pages move; time is the transfer's own.

    Then the reader gets no more memory at all when it meets another source: that attempt ends, and the next one works.
    """
    length_bytes = min(BALLAST_BYTES_MAX, (available_bytes() or BALLAST_BYTES_MAX) // MEMORY_SHARE)
    row.note = f"beside {length_bytes >> 20} MiB of ballast; time is the whole transfer's"
    with Lab(row, chance, plant) as lab, ballast(length_bytes):
        source, destination = lab.seat("a", row.transport), lab.seat("b", row.transport)
        for _ in range(rounds):
            began = time.monotonic()
            transfer = lab.begin(source, destination)
            end = lab.whole(transfer)
            row.runs += 1
            row.ended(end.evidence, began, end.at)
            lab.at_rest()
            lab.look()
            destination.ask("evict", transfer.names)
            source.ask("evict", transfer.names)
        _starved(lab, lab.seat("c", row.transport), destination)


def _starved(lab: Lab, source: Seat, destination: Seat) -> None:
    """Leave the reader less address space than a connection or a mapping takes, for one attempt."""
    pid = destination.told.process.pid
    starved = lab.offer(source, destination)
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size + SPACE_LEFT_BYTES, resource.RLIM_INFINITY))
    try:
        starved.ticket, starved.pages = destination.ask("fetch", starved.sealed, starved.expected, starved.names)
        starved.end()
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    starved.tell()
    lab.at_rest()
    destination.ask("evict", starved.names)
    source.ask("evict", starved.names)
    lab.whole(lab.begin(source, destination))
