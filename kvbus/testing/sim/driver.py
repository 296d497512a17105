"""The requesters: they ask for transfers at random, repeat themselves, cancel, and keep the engines busy."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvbus.errors import BusError
from kvbus.events import LeaseReleased, TransferCancelRequested, TransferRequested
from kvbus.names import request_hash
from kvbus.parts import Body, OnMiss
from kvbus.speaking import Speaker
from kvbus.testing.sim.bus import SimBus
from kvbus.testing.sim.councils import member_name
from kvbus.testing.sim.loop import Actor
from kvbus.testing.sim.prompts import prompt_of, text_of, tokens_of
from kvbus.testing.sim.town import Town
from kvbus.topics import Command

REMEMBERED_MAX = 64
REQUESTER = "driver"
REGARDLESS = 0.98
"""Draws above it go to any instance, whether it has room or not, and name any other, or itself."""
ANSWERS_A_REQUEST = 0.25
"""Prompts that engines answer for callers of their own, for each request: so many, however long transfers take."""
NO_ROOM_PAUSES = 36
"""How much longer the requesters wait where nobody has room."""
ON_MISS: tuple[OnMiss, ...] = ("prefill", "prefill", "prefill", "partial", "partial", "fail")
BUDGETS_S = (0.3, 2.0, 5.0, 20.0)


@dataclass(frozen=True, slots=True)
class _Asked:
    destination: str
    request: TransferRequested


class Driver:
    """Asks until enough transfers were admitted."""

    def __init__(self, town: Town) -> None:
        self.asked = 0
        self.counts: Counter[str] = Counter()
        self._town = town
        self._actor = Actor(REQUESTER)
        self._bus = SimBus(town.broker, self._actor)
        self._random = random.Random(f"{town.settings.seed}:driver")
        self._recent: deque[_Asked] = deque(maxlen=REMEMBERED_MAX)
        self._speaker = Speaker(REQUESTER)
        self._sequence = 0

    def start(self) -> None:
        """Begin to ask."""
        loop = self._town.truth.loop
        loop.spawn(self._actor, self._ask(), "driver")
        if self._town.settings.weather.forged_s:
            loop.spawn(self._actor, self._forge(), "stranger")

    async def _ask(self) -> None:
        settings = self._town.settings
        pause_s = 1 / (settings.requests_a_second * settings.instances)
        while self._town.fired() < settings.transfers:
            draw = self._random.random()
            if draw < 0.04 and self._recent:
                self._cancel(self._random.choice(self._recent))
            elif draw < 0.12 and self._recent:
                self._send(self._random.choice(self._recent))
            else:
                # Mostly where there is room: a refusal costs as much to simulate as a transfer, and shows less.
                regardless = draw > REGARDLESS
                roomy = self._town.names if regardless else self._town.with_room()
                sources = self._town.names if regardless else self._town.findable()
                if roomy and sources:
                    asked = self._make(self._random.choice(roomy), sources, regardless=regardless)
                    self._recent.append(asked)
                    self._send(asked)
                    if self._random.random() < ANSWERS_A_REQUEST:
                        self._keep_engines_busy()
                else:
                    await asyncio.sleep(NO_ROOM_PAUSES * pause_s)
            await asyncio.sleep(self._random.expovariate(1 / pause_s))

    def _keep_engines_busy(self) -> None:
        """Let some engine answer a prompt of its own, which takes pages, and puts others out."""
        members = self._town.up()
        if members and (parts := self._random.choice(members).parts):
            parts.engine.answer(tokens_of(text_of(*self._document())), self._salt())

    async def _forge(self) -> None:
        """Say of readers that are lent to that their access has ended, with a nonce that is not theirs (P18)."""
        town = self._town
        draw, pause_s = random.Random(f"{town.settings.seed}:stranger"), town.settings.weather.forged_s
        while town.fired() < town.settings.transfers:
            await asyncio.sleep(draw.expovariate(1 / pause_s))
            lent = [(one, reader) for one in town.up() if one.parts for reader in one.parts.lending.readers()]
            if lent:
                lender, reader = draw.choice(lent)
                body = LeaseReleased(key=reader.key, nonce=draw.randbytes(16))
                self.counts["forged"] += 1
                self._tell(lender.instance, Command.LEASE, body, member_name(lender.rank))

    def _make(self, destination: str, sources: Sequence[str], *, regardless: bool) -> _Asked:
        draw = self._random
        others = [name for name in sources if name != destination]
        if regardless:
            source = draw.choice(others if draw.random() < 0.5 else sources)
        else:  # one that can be found, for the same reason
            source = draw.choice(others or [name for name in self._town.names if name != destination])
        prompt = prompt_of(*self._document(), as_text=draw.random() < 0.3)
        salt = self._salt()
        own = request_hash(model="", salt=salt, source=source, prompt=prompt.canonical())
        self.asked += 1
        request = TransferRequested(
            request_id=f"r{self.asked}",
            request_hash=own,
            requester=REQUESTER,
            source=source,
            destination=destination,
            prompt=prompt,
            salt=salt,
            on_miss=draw.choice(ON_MISS),
            budget_s=draw.choice(BUDGETS_S),
        )
        return _Asked(destination, request)

    def _document(self) -> tuple[int, int]:
        """Return a document, the first ones more often, and how many tokens of it."""
        settings, draw = self._town.settings, self._random
        tokens = draw.randint(settings.block_tokens, settings.block_tokens * settings.blocks_max)
        return min(draw.randrange(settings.documents), draw.randrange(settings.documents)), tokens

    def _salt(self) -> str:
        return "" if self._random.random() < 0.9 else "other"

    def _send(self, asked: _Asked) -> None:
        if self._random.random() < 0.7:
            self._town.truth.loop.begin(self._store(asked), "request")
        else:
            self._tell(asked.destination, Command.TRANSFER, asked.request)

    async def _store(self, asked: _Asked) -> None:
        request = asked.request
        subject = self._town.broker.topics.transfer(asked.destination, request.request_hash)
        try:
            await self._bus.store(subject, self._encoded(request), message_id=request.request_id)
        except BusError:
            self.counts["not_sent"] += 1

    def _cancel(self, asked: _Asked) -> None:
        self.counts["cancels"] += 1
        body = TransferCancelRequested(request_hash=asked.request.request_hash)
        self._tell(asked.destination, Command.CANCEL, body)

    def _tell(self, instance: str, verb: Command, body: Body, member: str = "") -> None:
        """Ask something, and wait for no answer: no requester here does anything about one."""
        subject = self._town.broker.topics.command(instance, verb, member)
        try:
            self._bus.ask(subject, self._encoded(body), lambda _answer: None)
        except BusError:
            self.counts["not_sent"] += 1

    def _encoded(self, body: Body) -> bytes:
        self._sequence += 1
        sent_ns = int((1_700_000_000 + self._town.truth.loop.time()) * 1e9)
        return self._speaker.said(body, "", self._sequence, sent_ns)
