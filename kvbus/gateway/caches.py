"""Caches of instances, asked and changed over the bus: each member answers for its own pages.

What is wanted of an instance is wanted of all its members, since a prompt's KV lies on all of them.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Collection, Mapping
from typing import TypeVar

from kvbus.caching import CacheAnswered, CacheAsked, CacheChangeAsked, CacheChanged
from kvbus.errors import BusError, PeerError
from kvbus.events import Header, decode, encode
from kvbus.gateway.answers import Problem
from kvbus.gateway.directory import Directory
from kvbus.parts import REQUEST_LENGTH_MAX_BYTES, Body
from kvbus.publisher import Publisher
from kvbus.topics import Command, Topics
from kvbus.transport import Bus, NoAnswer

ANSWER_S = 5.0
"""A member answers between two rounds, and its engine tokenizes within milliseconds; this long when overloaded."""

B = TypeVar("B", bound=Body)

log = logging.getLogger(__name__)


class Caches:
    """Asks the members of instances, and puts their answers together."""

    def __init__(self, *, bus: Bus, topics: Topics, directory: Directory, publisher: Publisher) -> None:
        self._bus = bus
        self._topics = topics
        self._directory = directory
        self._publisher = publisher
        self._sequence = secrets.randbits(60)  # as a requester's: a random start keeps the ids of two runs apart

    async def look(self, instance: str, asked: CacheAsked) -> dict[str, CacheAnswered]:
        """Return what each member holds; Problem 400 where the prompt cannot be read, 503 where one does not answer."""
        answers = await self._ask_all(instance, asked, CacheAnswered)
        if refusal := next((answer.refusal for answer in answers.values() if answer.refusal), ""):
            raise Problem(400, f"{instance}: {refusal}")
        return answers

    async def change(self, instance: str, asked: CacheChangeAsked) -> int:
        """Change all members' caches, and return how many blocks that was at the one with fewest.

        Problem 409 where one refuses, 503 where one does not answer: a pin that this has made at others is let go again
        then. One of that name that stood before stays, with what was added to it.
        """
        answers = await self._ask_each(instance, asked, CacheChanged)
        changed = {name: one for name, one in answers.items() if isinstance(one, CacheChanged)}
        refusal = next((one.refusal for one in changed.values() if one.refusal), "")
        if refusal or len(changed) < len(answers):
            await self._unpin(instance, asked.pin, [name for name, one in changed.items() if one.pin_is_new])
            raise Problem(409, f"{instance}: {refusal}") if refusal else _first_problem(answers)
        return min(one.blocks for one in changed.values())

    # ------------------------------------------------------------------------------------------------------- inside

    async def _unpin(self, instance: str, pin: str, members: Collection[str]) -> None:
        """Let a pin go again where it was just made; who does not answer now keeps it until somebody lets it go."""
        asked = CacheChangeAsked(action="unpin", pin=pin)
        answers = await asyncio.gather(*(self._said(instance, member, asked, CacheChanged) for member in members))
        for answer in answers:
            if isinstance(answer, Problem):
                log.warning("a pin that was half made is left at %s: %s", instance, answer.text)

    async def _ask_all(self, instance: str, body: Body, kind: type[B]) -> dict[str, B]:
        answers = await self._ask_each(instance, body, kind)
        whole = {name: one for name, one in answers.items() if not isinstance(one, Problem)}
        if len(whole) < len(answers):
            raise _first_problem(answers)
        return whole

    async def _ask_each(self, instance: str, body: Body, kind: type[B]) -> dict[str, B | Problem]:
        """Return what each member says, or why it says nothing; Problem 503 where there is none."""
        if not self._directory.instances.get(instance):
            await self._directory.refresh()
        members = sorted(self._directory.instances.get(instance, ()))
        if not members:
            self._directory.require_fresh()
            raise Problem(503, f"no worker of {instance} is registered", retry_after_s=1)
        answers = await asyncio.gather(*(self._said(instance, member, body, kind) for member in members))
        return dict(zip(members, answers, strict=True))

    async def _said(self, instance: str, member: str, body: Body, kind: type[B]) -> B | Problem:
        try:
            return await self._ask(instance, member, body, kind)
        except Problem as problem:
            return problem

    async def _ask(self, instance: str, member: str, body: Body, kind: type[B]) -> B:
        self._sequence += 1
        header = Header(k=body.KIND, i=self._publisher.requester, s=self._sequence, t=time.time_ns())
        data = encode(header, body)
        if len(data) > REQUEST_LENGTH_MAX_BYTES:
            raise Problem(400, f"the prompt makes a question of {len(data)} bytes: at most {REQUEST_LENGTH_MAX_BYTES}")
        try:
            answer = await self._bus.request(
                self._topics.command(instance, Command.CACHE, member), data, wait_s=ANSWER_S
            )
            answered = answer if isinstance(answer, NoAnswer) else decode(answer).body
        except (BusError, PeerError) as error:
            raise Problem(503, f"{instance}/{member} was not asked: {error}", retry_after_s=1) from error
        if not isinstance(answered, kind):
            raise Problem(503, f"{instance}/{member} does not answer", retry_after_s=1)
        return answered


def _first_problem(answers: Mapping[str, object]) -> Problem:
    return next(one for one in answers.values() if isinstance(one, Problem))
