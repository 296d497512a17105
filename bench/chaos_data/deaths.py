"""Processes that die, stand still, fork or come back in the middle of a transfer."""

import random

from bench.chaos_data.content import names_of
from bench.chaos_data.house import killed_at_the_end
from bench.chaos_data.lab import RATE_BYTES_S, ROWS, Lab, Seat, Transfer
from bench.chaos_data.table import Row
from kvbus.grants import unseal


def source_killed(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """The source is killed at a random moment; the reader keeps whole pages, and knows that it reads no more."""
    with Lab(row, chance, plant) as lab:
        destination = lab.seat("b", row.transport, rate_limit_bytes_s=RATE_BYTES_S)
        source = lab.seat("a", row.transport)
        for _ in range(rounds):
            successor = lab.again(source)  # starts while this round runs
            transfer = lab.begin(source, destination)
            lab.until_share(transfer, lab.share())
            killed_at = source.house.kill()
            end = transfer.end()
            row.runs += 1
            row.ended(end.evidence, killed_at, end.at)
            lab.at_rest(destination)
            lab.look(destination)
            forget(transfer)
            source = successor


def destination_killed(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """The destination is killed at a random moment; the source takes its pages back on proof alone."""
    with Lab(row, chance, plant) as lab:
        source = lab.seat("a", row.transport)
        destination = lab.seat("b", row.transport, rate_limit_bytes_s=RATE_BYTES_S)
        for _ in range(rounds):
            successor = lab.again(destination)
            transfer = lab.begin(source, destination)
            lab.until_share(transfer, lab.share())
            killed_at = destination.house.kill()
            end = transfer.lent_end()
            row.runs += 1
            row.ended(end.evidence, killed_at, end.at)
            lab.at_rest(source)
            lab.look(source)
            source.ask("evict", transfer.names)
            destination = successor


UNREAD_S = 1.2
"""At most so long a source stands still: some of UCX's own timers run off once a second."""


def killed_unread(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """The destination is killed while its source stands still, what it asked for unread; then the source goes on.

    UCX over tcp would abort the source, did readers ask for more than one message at a time.
    """
    with Lab(row, chance, plant) as lab:
        source = lab.seat("a", row.transport)
        destination = lab.seat("b", row.transport, rate_limit_bytes_s=RATE_BYTES_S / 4)
        for _ in range(rounds):
            successor = lab.again(destination)
            connected, unread = lab.begin(source, destination, rows=1), lab.offer(source, destination, rows=ROWS - 1)
            lab.whole(connected)
            source.house.stop()
            unread.ticket, _ = destination.ask("fetch", unread.sealed, unread.expected, unread.names)
            unread.end_within(UNREAD_S * chance.random())
            killed_at = destination.house.kill()
            source.house.go_on()
            end = unread.lent_end()
            row.runs += 1
            row.ended(end.evidence, killed_at, end.at)
            lab.at_rest(source)
            lab.look(source)
            source.ask("evict", (*connected.names, *unread.names))
            destination = successor


def forget(transfer: Transfer, *seats: Seat) -> None:
    """Have the destination, or others, forget a transfer's pages, so that the next one has room."""
    for seat in seats or (transfer.destination,):
        seat.ask("evict", transfer.names)


STUCK_S = 1.0
"""A read that waits for a source that stands still does not end by itself; so long it is given the chance."""
NEEDS_SOURCE = frozenset({"tcp", "posix", "socket"})
"""Transports by which the source itself sends; over the others its memory is read without it."""


def source_stopped(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """The source stands still, the pages take new content once access has ended, and the source goes on.

    Over cma and memory the reading ends by itself, and the time counts from the stop; else from the cancel.
    """
    with Lab(row, chance, plant) as lab:
        source = lab.seat("a", row.transport)
        destination = lab.seat("b", row.transport, rate_limit_bytes_s=RATE_BYTES_S, cancel_wait_s=0.2)
        for number in range(rounds):
            canaries = names_of(f"{row.fault} canary {number}", ROWS)
            transfer = lab.begin(source, destination, hand_to=canaries)
            lab.until_share(transfer, lab.share())
            at = source.house.stop()
            end = transfer.end_within(STUCK_S) if row.transport in NEEDS_SOURCE else transfer.end()
            if end is None:
                at = transfer.cancel()
                end = transfer.end()
            row.runs += 1
            row.ended(end.evidence, at, end.at)
            lab.handed_over(transfer)
            source.house.go_on()
            transfer.tell()
            lab.whole(lab.begin(source, destination, rows=1))  # whatever was still to come has come by then
            lab.at_rest()
            lab.look()
            destination.ask("evict", canaries)
            source.ask("evict", transfer.names)


def restarted(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """A source comes back under its name while its stopped predecessor is still being read; then that one dies.

    Nothing of the old run counts for the new one: neither its grants, nor the word of who read from it.
    """
    with Lab(row, chance, plant) as lab:
        destination = lab.seat("b", row.transport, rate_limit_bytes_s=RATE_BYTES_S, pages=2 * ROWS + 2)
        source = lab.seat("a", row.transport, pages=ROWS + 2)
        for _ in range(rounds):
            successor = lab.again(source)
            old = lab.begin(source, destination)
            lab.until_share(old, lab.share() / 2)
            source.house.stop()
            new = lab.begin(successor, destination)
            successor.ask("released", old.key, old.nonce)  # said to the wrong run
            row.check(not lab.is_lent_back(new), "the new run took its pages back by a word for the old one")
            demand_that_old_grants_are_refused(lab, old, successor)
            lab.whole(new)
            row.check(lab.links(destination) >= 2, "the new run was not met over a connection of its own")
            killed_at = source.house.kill()
            end = old.end_within(STUCK_S)
            if end is None:
                killed_at = old.cancel()
                end = old.end()
            row.runs += 1
            row.ended(end.evidence, killed_at, end.at)
            lab.at_rest(destination, successor)
            lab.look(destination, successor)
            for transfer in (old, new):
                forget(transfer)
            successor.ask("evict", new.names)
            source = successor


def demand_that_old_grants_are_refused(lab: Lab, old: Transfer, successor: Seat) -> None:
    """The new run is asked, and a grant of the old one comes: by its signature and by its epoch it is another's."""
    asked, destination = lab.offer(successor, old.destination, rows=1), old.destination
    unsigned = destination.ask("refuses", (*old.sealed[:2], successor.told.verify_key), asked.expected, asked.names)
    lab.row.check("not signed" in unsigned, f"a grant signed by the old run was not refused: {unsigned!r}")
    grant = unseal(*old.sealed).model_copy(update={"reader": asked.key})
    stale = destination.ask("refuses_grant", grant, asked.expected, asked.names)
    lab.row.check("another epoch" in stale, f"a grant of the old epoch was not refused: {stale!r}")
    asked.tell()
    successor.ask("evict", asked.names)


def forked(row: Row, chance: random.Random, rounds: int, plant: str) -> None:
    """Both sides fork while connected, so that a child keeps all sockets open; then source and destination die.

    A child may use nothing of UCX. Where no reset reaches the reader, its cancel ends the reading by force; the source
    of a dead destination needs the proof of its death.
    """
    with Lab(row, chance, plant) as lab:
        for _ in range(rounds):
            sources = [lab.seat("a", row.transport), lab.seat("c", row.transport)]
            chosen = {"rate_limit_bytes_s": RATE_BYTES_S / 2, "cancel_wait_s": 0.2, "pages": 2 * ROWS + 1}
            destination = lab.seat("b", row.transport, **chosen)
            first, second = (lab.begin(source, destination) for source in sources)
            lab.until_share(first, lab.share() / 2)
            children = [sources[0].ask("fork"), destination.ask("fork")]
            with killed_at_the_end(children[0][0]), killed_at_the_end(children[1][0]):
                row.check(all(refused for _, refused in children), "a forked child could use UCX")
                at = sources[0].house.kill()
                end = first.end_within(STUCK_S / 4)
                if end is None:
                    at = first.cancel()
                    end = first.end()
                row.ended(end.evidence, at, end.at)
                at = destination.house.kill()
                lent = second.lent_end()
                row.ended(lent.evidence, at, lent.at)
                row.runs += 1
                lab.at_rest(sources[1])
                lab.look(sources[1])
