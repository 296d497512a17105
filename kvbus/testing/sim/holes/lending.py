"""Holes of lending: between look-up and pin, between question and answer, and a pool full of frozen readers."""

# ruff: noqa: SLF001, ANN401 - what takes a rule out sits inside of what it spoils, and hands on what it does not use

import asyncio
from collections.abc import Sequence
from typing import Any

from kvbus.dataplane.lending import LendingBackend
from kvbus.errors import BusError
from kvbus.ledger.lending import LendBook
from kvbus.pool.allocator import PageAllocator
from kvbus.pool.index import ReuseIndex
from kvbus.pool.lender import PoolLender
from kvbus.roles.asking import ANSWER_SLACK_S, Asker
from kvbus.roles.source import Source, key_of
from kvbus.testing.sim.holes.hole import Hole, Patch, taken_out
from kvbus.testing.sim.holes.script import Script
from kvbus.topics import Command

A, B = 1, 2
OTHERS = range(10, 15)
"""Five long prompts: as many pages as the pool has."""
LOOK_UP_S = 0.5
"""How long the planted source takes from its look-up to its pin."""


# ---------------------------------------------------------------------------------------------------------------- P9


async def _evicted_in_between(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    question = s.gate("lend_requested", "i1")
    request = s.ask("i1", "i0", A)
    await s.caught(question)
    s.say("the question reaches i0, and at the same time its engine wants the whole pool")
    question.open()
    s.fill("i0", OTHERS)
    outcome = await s.outcome(request)
    s.require(outcome.pages_moved == 8, f"found pages were lost before they were pinned: {outcome.reason}")
    await s.rest()


def _pinned_later() -> Sequence[Patch]:
    """Look the pages up, and pin what was found a while later."""

    def decide(self: Source, asked: Any, entry: Any) -> None:
        names = tuple(asked.names[at : at + 16] for at in range(0, len(asked.names), 16))
        found = self._pool.lender.pages_held(names)

        def pin() -> None:
            index: Any = self._pool.lender._index
            index.longest_prefix = lambda _names: found
            self._lend_now(asked, entry)
            del index.longest_prefix
            self._questions.wake(key_of(asked.key))

        asyncio.get_running_loop().call_later(LOOK_UP_S, pin)

    return [(Source, "_decide", decide)]


async def _inserted_twice(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    s.compute("i1", A)
    await s.until("the engine of i1 writes", lambda: s.is_writing("i1"))
    engine = s.freeze_engine("i1")
    first = await s.outcome(s.ask("i1", "i0", A))
    s.staged(first.pages_moved == 8, f"A should have come: {first.reason}")
    gets = s.stall("i2", "_half")
    request = s.ask("i2", "i1", A)
    await s.stalled(gets)
    s.say("i2 reads A from i1, whose engine now stores an A of its own")
    s.loop.resume(engine)
    await s.idle("i1")
    s.check()
    s.fill("i1", OTHERS)
    await s.pause(2.0)
    gets.open()
    second = await s.outcome(request)
    s.require(second.pages_moved == 8, f"the later A displaced the one that was lent: {second.reason}")
    await s.rest()


def _last_one_wins() -> Sequence[Patch]:
    """Let the newest page of a name be the one that is found."""

    def insert(self: ReuseIndex, name: bytes, page: int) -> int:
        self._page_of[name] = page
        self._name_of[page] = name
        return page

    return [(ReuseIndex, "insert", insert), (ReuseIndex, "__contains__", lambda _self, _name: False)]


# --------------------------------------------------------------------------------------------------------------- P18


async def _lost_reply(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    reply = s.gate("lend_answered", "i0", mode="drop")
    request = s.ask("i1", "i0", A)
    await s.caught(reply)
    outcome = await s.outcome(request)
    s.staged(outcome.outcome == "settled", f"the question should have been asked again: {outcome.reason}")
    await s.rest()


def _a_key_for_each_question() -> Sequence[Patch]:
    """Ask under another key each time: the source cannot know a repeat."""
    request, checked = Asker._request, Asker._checked
    asked_last: dict[str, Any] = {}

    async def another(self: Asker, subject: str, body: Any, *, left_s: float) -> Any:
        before = asked_last.get(body.key.transfer)
        attempt = before.key.attempt + 1 if before else 1
        body = asked_last[body.key.transfer] = body.model_copy(
            update={"key": body.key.model_copy(update={"attempt": attempt})}
        )
        return await request(self, subject, body, left_s=left_s)

    def as_asked(self: Asker, answer: Any, asked: Any, *more: Any) -> Any:
        return checked(self, answer, asked_last[asked.key.transfer], *more)

    return [(Asker, "_request", another), (Asker, "_checked", as_asked)]


async def _lost_release(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    word = s.gate("lease_released", "i1", mode="drop", most=3)
    outcome = await s.outcome(s.ask("i1", "i0", A))
    s.staged(outcome.outcome == "settled", f"A should have come: {outcome.reason}")
    await s.caught(word)
    await s.rest()


def _said_once() -> Sequence[Patch]:
    """Say once that access has ended, and never again."""

    async def once(self: Asker, release: Any) -> None:
        subject = self._topics.command(release.source.instance, Command.LEASE, release.source.member)
        try:
            await self._bus.request(subject, self._recorder.encoded(release.body), wait_s=ANSWER_SLACK_S)
        except BusError:
            return

    return [(Asker, "_release", once)]


async def _late_question(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    copy = s.gate("lend_requested", "i1", mode="double")
    outcome = await s.outcome(s.ask("i1", "i0", A))
    s.staged(outcome.outcome == "settled" and bool(copy.held), f"A should have come: {outcome.reason}")
    await s.until("i0 has the word of i1", lambda: not s.lent("i0"))
    s.say("the key is closed; now the copy of the question arrives")
    copy.open()
    await s.pause(1.0)
    s.require(s.lent("i0") == 0, "a late question was lent to under a closed key, and nobody will end that")
    await s.rest()


def _no_tombstones() -> Sequence[Patch]:
    """Keep nothing of a key that was closed."""
    end = LendingBackend._end

    def without_tombstone(self: LendingBackend, *args: Any) -> None:
        end(self, *args)
        self._tombstones.clear()

    def close(self: LendBook, key: Any, nonce: bytes) -> Any:
        del nonce
        return self._entries.pop(key, None)

    return [(LendingBackend, "_end", without_tombstone), (LendBook, "close", close)]


# --------------------------------------------------------------------------------------------------------------- P26


async def _frozen_readers(s: Script) -> None:
    await s.up()
    readers = ("i1", "i2", "i3", "i4", "i5")
    for document in range(1, 6):
        await s.cached("i0", document)
    lent = []
    for document, reader in enumerate(readers, start=1):
        gets = s.stall(reader, "_half")
        request = s.ask(reader, "i0", document, budget_s=60.0)
        await s.until("the request is lent to or has failed", lambda: bool(gets.held or s.outcomes))  # noqa: B023
        if not gets.held:
            break
        s.freeze(reader)
        lent.append((reader, gets, request))
    s.say(f"{len(lent)} frozen readers hold {s.parts('i0').pool.allocator.claimed} of 40 pages of i0")
    s.compute("i0", 20)
    await s.pause(1.0)
    held = s.held("i0", 20)
    s.require(held == 8, f"the engine of i0 stored {held} of the 8 blocks of its longest prompt: readers have the rest")
    taken = await s.outcome(s.ask("i0", "i6", 21, on_miss="prefill"))
    s.require(taken.outcome == "failed", "i0 takes pages for a peer beyond its cap")
    s.staged(len(lent) == 4 and taken.failure == "lease_refused", f"refused for another reason: {taken.reason}")
    for reader, gets, _ in lent:
        s.thaw(s.member(reader))
        gets.open()
    await s.rest()


def _no_cap() -> Sequence[Patch]:
    """Lend and take as long as there are pages."""
    return [(PoolLender, "refusal", _any_room), (PageAllocator, "unclaimed", lambda _self, _pages: 0)]


def _any_room(self: PoolLender, pages: int, **more: Any) -> None:
    del self, pages, more


HOLES = (
    Hole(
        "P9",
        "pages are found, and evicted before they are pinned",
        "found and pinned in one step: the engine took other pages",
        _evicted_in_between,
        taken_out(_pinned_later),
        "wrong bytes",
    ),
    Hole(
        "P9",
        "a second page of the same name is stored while the first is lent",
        "inserted if absent: the first page stayed, the second became free",
        _inserted_twice,
        taken_out(_last_one_wins),
        "the reuse index is not one to one",
        instances=3,
    ),
    Hole(
        "P18",
        "the reply to a lease request is lost",
        "asked again under its key, the source gave the same lease: nothing stayed lent",
        _lost_reply,
        taken_out(_a_key_for_each_question),
        "1 readers are lent to",
    ),
    Hole(
        "P18",
        "the word that access has ended is lost",
        "it was said again until the source confirmed it: nothing stayed lent",
        _lost_release,
        taken_out(_said_once),
        "1 readers are lent to",
    ),
    Hole(
        "P18",
        "a copy of the question arrives after its key was closed",
        "the tombstone refused it: nothing was lent",
        _late_question,
        taken_out(_no_tombstones),
        "under a closed key",
    ),
    Hole(
        "P26",
        "frozen readers fill the pool",
        "lending and taking were refused at the cap, and the engine stored its longest prompt",
        _frozen_readers,
        taken_out(_no_cap),
        "pages are lent to peers, at most",
        instances=7,
    ),
)
