"""Rest: what may be left once nothing goes wrong any more and nobody asks for anything. Nothing may."""

from kvbus.testing.sim.assembly import Parts
from kvbus.testing.sim.member import Member
from kvbus.testing.sim.town import Town

LASTING_TASKS = frozenset({"run", "recorder", "presence", "consume", "council", "telling", "listener"})
"""A member's tasks that end only with it."""


def left_over(town: Town) -> tuple[str, ...]:
    """Return what is left, in words; empty at rest."""
    found: list[str] = []
    if not town.all_up():
        found.append("a member is not up")
    if town.broker.queued:
        found.append(f"{town.broker.queued} requests are queued")
    for member in town.members.values():
        if member.parts is not None:
            found += [f"{member.process.name}: {text}" for text in _left_at(member, member.parts)]
    return tuple(found)


def _left_at(member: Member, parts: Parts) -> list[str]:
    lender, pages = parts.pool.lender.statistics(), parts.pool.allocator.statistics()
    counted = {
        "transfers run": parts.destination.running,
        "transfers are remembered": len(parts.destination._running),  # noqa: SLF001 - a leak shows only inside
        "tickets are remembered": len(parts.destination._by_ticket),  # noqa: SLF001
        "leases are held": parts.rounds.holder.statistics().held,
        "leases are held by the facts": len(parts.model.held),
        "reads are lent": lender.reads,
        "writes are lent": lender.writes,
        "failed leases were not released": lender.failed,
        "leases are unmarked": lender.unmarked,
        "pin sets are kept": lender.pin_sets,
        "pages are pinned": pages.pinned,
        "pages are claimed": pages.claimed,
        "pages are missing": pages.pages - pages.free - pages.cached,
        "readers are lent to": parts.lending.statistics().lent,
        "releases are unconfirmed": parts.asker.unconfirmed,
        "attempts are open": parts.reader.open,
        "transfers are in flight": parts.gate.statistics().inflight,
        "bytes wait for the broker": parts.recorder.queued_bytes,
        "messages are in hand": member.bus.in_hand,
        "results are unsaid": len(parts.destination.results._unsaid),  # noqa: SLF001
        "questions are open": parts.source._questions.open,  # noqa: SLF001
    }
    if parts.council is not None and parts.sharing is not None:
        counted |= {
            "shares are open": parts.council.book.live,
            "transfers are not over at all members": parts.council.open_transfers,
            "transfers wait for their members": len(parts.destination._sharing),  # noqa: SLF001
            "proposals are open": len(parts.council._waiting),  # noqa: SLF001
        }
    found = [f"{count} {what}" for what, count in counted.items() if count]
    tasks = sorted(task.get_name() for task in member.actor.tasks.values())
    more = [name for name in tasks if name not in LASTING_TASKS]
    if more:
        found.append(f"{len(more)} tasks run on: {', '.join(more[:5])}")
    return found
