"""Sources that say what is not so, and pages that change while they are read."""

import random
import re
from collections.abc import Mapping

from bench.chaos_data.content import names_of
from bench.chaos_data.house import FaultError
from bench.chaos_data.lab import RATE_BYTES_S, ROWS, Lab, Seat, Transfer
from bench.chaos_data.table import Row
from kvbus.events import column
from kvbus.grants import Grant, unseal

CAUGHT_SHARE_MAX = 0.8
"""With more than that of a transfer there, all of the rest may be on its way in the kernel's buffers."""
TRIES_MAX = 20
"""A transfer takes half a second: on a starved host it is over before anybody has looked, but not each time."""


def forged(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """Forged offsets, foreign keys and wrong lengths are refused before anything is posted; the honest grant works."""
    with Lab(row, chance, plant) as lab:
        source, stranger = lab.seat("a", row.transport), lab.seat("x", row.transport)
        destination = lab.seat("b", row.transport)
        for _ in range(rounds):
            transfer = lab.offer(source, destination, rows=8)
            expected, names = transfer.expected, transfer.names
            stolen = (*transfer.sealed[:2], stranger.told.verify_key)
            before = destination.ask("posted")
            answers = {"a foreign signature": destination.ask("refuses", stolen, expected, names)}
            for name, grant in forgeries(unseal(*transfer.sealed), transfer, chance).items():
                answers[name] = destination.ask("refuses_grant", grant, expected, names)
            for name, answer in answers.items():
                row.check(answer, f"{name} was not refused")
                row.evidence["never_submitted"] = row.evidence.get("never_submitted", 0) + 1
            row.check(destination.ask("posted") == before, "something was posted for a forged grant")
            row.runs += 1
            transfer.ticket, transfer.pages = destination.ask("fetch", transfer.sealed, expected, names)
            lab.whole(transfer)
            destination.ask("evict", names)


def forgeries(grant: Grant, transfer: Transfer, chance: random.Random) -> Mapping[str, Grant]:
    """Return grants of which one thing is wrong each, at a place that chance chooses."""
    pool, pages, counters = grant.pool, list(grant.page_indexes()), list(grant.page_counters())
    at = chance.randrange(len(pages))

    def with_pool(**changed: int) -> Grant:
        return grant.model_copy(update={"pool": pool.model_copy(update=changed)})

    def with_page(page: int) -> Grant:
        return grant.model_copy(update={"pages": column([*pages[:at], page, *pages[at + 1 :]], 4)})

    counters[at] |= 1
    table_end = pool.generations_offset + Grant.GENERATION_LENGTH_BYTES * pool.page_count
    strange = transfer.key.model_copy(update={"transfer": "another"})
    return {
        "an offset into the generation table": with_pool(pages_offset=chance.randrange(table_end)),
        "an offset that leads beyond the pool": with_pool(pages_offset=pool.pages_offset + pool.page_stride),
        "a page outside the pool": with_page(pool.page_count + chance.randrange(1 << 20)),
        "one page twice": with_page(pages[at - 1]),
        "a pool that is too short": with_pool(length_bytes=pool.length_bytes - chance.randrange(1, pool.page_stride)),
        "another page length": with_pool(page_bytes=pool.page_bytes - 32),
        "a stride shorter than a page": with_pool(page_stride=pool.page_stride // 2),
        "an address that wraps": with_pool(base=(1 << 63) - chance.randrange(1, pool.length_bytes)),
        "a page that is being written": grant.model_copy(update={"counters": column(counters, 8)}),
        "another reader's grant": grant.model_copy(update={"reader": strange}),
        "another layout": grant.model_copy(update={"fingerprint": "f" * 32}),
        "no such way to the pool": grant.model_copy(update={transfer.destination.told.transport: None}),
    }


def rewritten(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """The source fences a silent reader, and writes other content over what it reads: each such page is named.

    Time counts from the first new byte to the reader's end: a rewriting ends no access by itself.
    """
    row.note = "time is from the first new byte: a rewriting ends no access"
    with Lab(row, chance, plant) as lab:
        source = lab.seat("a", row.transport)
        destination = lab.seat("b", row.transport, rate_limit_bytes_s=RATE_BYTES_S)
        for number in range(rounds):
            successor = lab.again(destination)
            transfer = _caught(lab, source, destination, chance)
            fenced = source.ask("fence", "b", destination.settings.epoch)
            row.check(fenced == 1, f"{fenced} readers were fenced")
            destination.house.go_on()
            at = source.ask("write_at", names_of(f"{row.fault} over {number}", ROWS))
            end = transfer.end()
            row.runs += 1
            row.ended(end.evidence, at, end.at)
            told = re.search(r"(\d+) pages were rewritten", end.text)
            named = int(told[1]) if told else 0
            by_socket = row.transport == "socket"  # its lease is closed by the fence: what is left is not sent at all
            row.check(by_socket or (named > 0 and named + end.arrived == ROWS), f"not each page is named: {end.text!r}")
            row.check(end.arrived < ROWS, "pages that were rewritten have been delivered")
            transfer.tell()
            lab.at_rest(source, destination)
            lab.look(source, destination)
            destination.house.kill()
            destination = successor


def _caught(lab: Lab, source: Seat, destination: Seat, chance: random.Random) -> Transfer:
    """Return a transfer in its middle, whose reader stands still; those that were too far on are let end."""
    for _ in range(TRIES_MAX):
        transfer = lab.begin(source, destination)
        lab.until_share(transfer, chance.uniform(0.02, 0.75))
        destination.house.stop()
        if lab.eye(destination).begun(transfer.pages, transfer.names) <= CAUGHT_SHARE_MAX * ROWS:
            return transfer
        destination.house.go_on()
        lab.whole(transfer)
        lab.at_rest(source, destination)
        for seat in (source, destination):
            seat.ask("evict", transfer.names)
    raise FaultError(f"{TRIES_MAX} transfers were over before their reader could be stopped")
