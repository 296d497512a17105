"""Questions that a command puts to each member of an instance, since each answers for its own."""

import secrets
import time
from collections.abc import Sequence
from typing import TypeVar

from kvbus.errors import ConfigError, PeerError
from kvbus.events import Header, decode, encode
from kvbus.parts import Body
from kvbus.roles.registry import Registered, lookup
from kvbus.topics import Command, Topics, escape
from kvbus.transport import Bus, NoAnswer

ANSWER_S = 5.0
"""A member answers between two rounds, within milliseconds; this long only when overloaded."""

B = TypeVar("B", bound=Body)


def check_name(instance: str) -> None:
    """Raise ConfigError for what no instance can be called."""
    try:
        escape(f"{instance}/" if instance else "")  # as the keys begin under which its members register
    except ValueError as error:
        raise ConfigError(f"{instance[:80]!r} cannot be the name of an instance: {error}") from error


async def members_of(bus: Bus, instance: str) -> Sequence[Registered]:
    """Return who is registered under an instance; ConfigError where nobody is."""
    check_name(instance)
    found = await lookup(bus, instance)
    if not found:
        raise ConfigError(f"no worker of {instance!r} is registered: is the name right, and does it run?")
    return sorted(found, key=lambda one: one.member)


class Members:
    """Asks members on the subjects of one command, under a name of its own."""

    def __init__(self, bus: Bus, topics: Topics, speaker: str) -> None:
        self._bus = bus
        self._topics = topics
        self._speaker = speaker
        self._sequence = secrets.randbits(60)  # as a requester's: a random start keeps the ids of two runs apart

    async def ask(self, verb: Command, member: Registered, body: Body, kind: type[B]) -> B | NoAnswer:
        """Return a member's answer; BusError where it may not be asked, PeerError where it answers something else."""
        self._sequence += 1
        header = Header(k=body.KIND, i=self._speaker, s=self._sequence, t=time.time_ns())
        subject = self._topics.command(member.instance, verb, member.member)
        data = await self._bus.request(subject, encode(header, body), wait_s=ANSWER_S)
        if isinstance(data, NoAnswer):
            return data
        answer = decode(data).body
        if not isinstance(answer, kind):
            raise PeerError("a member answers with another kind", member=f"{member.instance}/{member.member}")
        return answer
