"""The instances of one run: who is up, who comes back when, what all of them together have counted."""

import random
from collections import Counter
from collections.abc import Iterator

from kvbus.ledger.admission import AdmissionStatistics
from kvbus.testing.sim.assembly import Parts
from kvbus.testing.sim.broker import SimBroker
from kvbus.testing.sim.councils import Councils
from kvbus.testing.sim.loop import Actor
from kvbus.testing.sim.member import Member
from kvbus.testing.sim.settings import SimSettings
from kvbus.testing.sim.truth import Truth

RESTART_MAX_S = 4.0
LATE_S = 30.0
"""A member whose clock is so far ahead takes what it is sent for older than a request may be in the queue."""


class Town:
    """All members, by instance; a member that ended is followed by a new one."""

    def __init__(self, settings: SimSettings, truth: Truth, broker: SimBroker, world: Actor) -> None:
        self.settings = settings
        self.truth = truth
        self.broker = broker
        self.world = world
        self.names = tuple(f"i{number}" for number in range(settings.instances))
        self.members: dict[str, Member] = {}
        """By instance, and for further ranks by instance and rank as in i0/1."""
        self.councils = Councils()
        self.ended: Counter[str] = Counter()
        self.starts = 0
        self.healed = False
        self._random = random.Random(f"{settings.seed}:town")
        self._by_actor: dict[Actor, Member] = {}

    def start(self) -> None:
        """Start one member per instance."""
        for name in self.names:
            for rank in range(self.settings.ranks):
                self._start(name, rank)

    def up(self) -> list[Member]:
        """Return the members that run and have their parts."""
        return [member for member in self.members.values() if member.alive and member.parts is not None]

    def all_up(self) -> bool:
        """Whether every instance has a member at work that is not about to leave."""
        return len(self.up()) == len(self.members) and not any(member.leaving for member in self.up())

    def kill(self, member: Member) -> None:
        """Kill a member, and let another follow."""
        member.kill()
        self._count(member)
        self._later(member)

    def quit(self, member: Member) -> None:
        """Let a member leave in order, and let another follow."""
        member.quit(lambda: self._left(member))

    def fired(self) -> int:
        """Return how many transfers were admitted so far, by members that ended and those that run."""
        return self.ended["fired"] + sum([one.parts.gate.fired for one in self._by_actor.values() if one.parts])

    def counts(self) -> Counter[str]:
        """Return what admission counted, over all members that ever were; `lost` died with their member."""
        total = Counter(self.ended)
        for member in self.up():
            if member.parts is not None:
                total.update(_moved(member.parts))
        for one in self._running():
            for name in ("fired", "settled", "failed", "deduped", "skipped_busy", "refused", "inflight"):
                total[name] += getattr(one, name)
        return total

    def _running(self) -> Iterator[AdmissionStatistics]:
        for member in self.up():
            if member.parts is not None:
                yield member.parts.gate.statistics()

    def _left(self, member: Member) -> None:
        self._count(member)
        self._later(member)

    def _count(self, member: Member) -> None:
        self._by_actor.pop(member.actor, None)
        if member.parts is None:
            return
        one = member.parts.gate.statistics()
        for name in ("fired", "settled", "failed", "deduped", "skipped_busy", "refused"):
            self.ended[name] += getattr(one, name)
        self.ended["lost"] += one.inflight
        self.ended.update(_moved(member.parts))
        member.parts = None

    def _later(self, ended: Member) -> None:
        soon = self.healed or self._random.random() < 0.5
        delay_s = 0.05 if soon else self._random.random() * RESTART_MAX_S
        self.truth.loop.post(self.world, self._start, ended.instance, ended.rank, delay_s=delay_s)

    def _start(self, name: str, rank: int) -> None:
        others = tuple(other for other in self.names if other != name)
        self.starts += 1
        member = Member(self.settings, self.truth, self.broker, name, rank, others, self.starts, self.councils)
        self.members[_key(name, rank)] = member
        member.start()
        self._by_actor[member.actor] = member

    def with_room(self) -> list[str]:
        """Return the instances whose leading member hears of requests in time, and would admit one more transfer."""
        leading: dict[str, Member] = {}
        for member in self.members.values():
            if member.parts is not None and (member.parts.council is None or member.parts.council.leads):
                leading.setdefault(member.instance, member)
        return [name for name, member in leading.items() if self._has_room(member)]

    def findable(self) -> list[str]:
        """Return the instances that the registry knows."""
        return self.broker.known(self.names)

    def _has_room(self, member: Member) -> bool:
        room, parts = self.settings.inflight_max, member.parts
        return (
            parts is not None
            and parts.gate.inflight < room
            and self.broker.queued_for(member.instance) < room
            and not member.leaving
            and member.wall_offset_s < LATE_S  # by its own clock
            and member.bus.connected
        )


def _moved(parts: Parts) -> Counter[str]:
    """Return what a member's facts, and its reader, have counted."""
    return parts.model.counts + Counter(pages_moved=parts.reader.pages_read)


def _key(instance: str, rank: int) -> str:
    return f"{instance}/{rank}" if rank else instance
