"""A tiny real model behind the OpenAI doors, under load: each answer is its own reference, and nothing leaks."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.flow.openai_clients import Serving, serving, staged_answer_is_the_sources, story
from tests.tiny_llama import make_tiny_llama
from tests.waiting import until

pytestmark = pytest.mark.slow

SEED = 20_260
REQUESTS = 200
PROMPTS = 24
ENDED_S = 250.0
BUDGET_S = 120.0
"""Of a transfer: its source computes behind two hundred others."""
SPOKEN = 8
"""Tokens of each engine: more than could be on their way when a transfer began to move."""


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Serving]:
    folder.chmod(0o700)
    model = make_tiny_llama(folder / "model")
    arguments = ("--transport", "memory", "--pages", "160", "--inflight-max", "8", "--rate-limit", "200000")
    with serving(folder, "transformers", {"folder": str(model)}, *arguments) as one:
        yield one


def test_a_tiny_model_says_on_b_what_it_said_on_a(tiny: Serving) -> None:
    staged_answer_is_the_sources(tiny)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, as text or as a chat, how much is asked for, and what the model says to it alone."""

    text: str
    is_chat: bool
    max_tokens: int
    said: str

    @property
    def messages(self) -> list[ChatCompletionMessageParam]:
        return [{"role": "user", "content": self.text}]


def cases(one: Serving, pick: random.Random) -> list[Case]:
    """The prompts, each with its reference: computed alone, whole, and kept by nobody."""
    found = []
    with one.local("a") as client:
        for number in range(PROMPTS):
            text, is_chat, most = story(f"case {number}", pick.randrange(1, 5)), number % 2 == 1, pick.randrange(6, 24)
            end = client.generate(
                text=None if is_chat else text,
                messages=[{"role": "user", "content": text}] if is_chat else None,
                max_tokens=most,
                store=False,
                reuse=False,
            ).end
            assert end.cached_tokens == 0
            found.append(Case(text, is_chat, most, end.text))
    assert len({case.said for case in found}) > PROMPTS / 2, "a model that says one thing to all proves nothing"
    return found


@dataclass(slots=True)
class Load:
    """The requests of one run: what became of them, by kind."""

    client: AsyncOpenAI
    url: str
    became: Counter[str]

    async def whole(self, case: Case, model: str) -> None:
        """Ask for an answer as one document."""
        if case.is_chat:
            chat = await self.client.chat.completions.create(
                model=model, messages=case.messages, max_tokens=case.max_tokens
            )
            said = chat.choices[0].message.content
        else:
            plain = await self.client.completions.create(model=model, prompt=case.text, max_tokens=case.max_tokens)
            said = plain.choices[0].text
        assert said == case.said
        self.became["answered"] += 1

    async def streamed(self, case: Case, model: str, leaves_after: int | None) -> None:
        """Ask for a stream, and leave it after so many chunks, if it has as many."""
        text = ""
        async with self._pieces(case, model) as pieces:
            seen = 0
            async for piece in pieces:
                text += piece
                seen += 1
                if seen == leaves_after:
                    assert case.said.startswith(text)
                    self.became["left mid-stream"] += 1
                    return
        assert text == case.said
        self.became["streamed"] += 1

    async def impatient(self, case: Case, model: str, patience_s: float) -> None:
        """Ask, and go away after a while, wherever the answer is then."""
        try:
            async with asyncio.timeout(patience_s):
                await self.streamed(case, model, None)
        except TimeoutError:
            self.became["left at some moment"] += 1

    async def transfer(self, case: Case, destination: str, source: str, salt: str) -> None:
        """Ask for a transfer, and wait for its end."""
        asked: dict[str, object] = {"source": source, "cache_salt": salt, "budget_s": BUDGET_S}
        asked |= {"messages": case.messages} if case.is_chat else {"prompt": case.text}
        async with httpx.AsyncClient(base_url=f"{self.url}/instances/{destination}", timeout=120) as http:
            said = (await http.post("/v1/kv_transfer", json=asked)).json()
            self.became[f"transfer {said['status']}"] += 1
            if said["status"] == "skipped_busy":
                return
            told = {"status": "queued"}
            while told["status"] in {"asking", "queued", "running"}:
                told = (await http.get(f"/v1/kv_transfer/{said['request_hash']}", params={"wait_s": 30})).json()
            assert told["status"] == "transferred", told

    @asynccontextmanager
    async def _pieces(self, case: Case, model: str) -> AsyncIterator[AsyncIterator[str]]:
        if case.is_chat:
            chat = await self.client.chat.completions.create(
                model=model, messages=case.messages, max_tokens=case.max_tokens, stream=True
            )
            async with chat:
                yield (chunk.choices[0].delta.content or "" async for chunk in chat)
        else:
            plain = await self.client.completions.create(
                model=model, prompt=case.text, max_tokens=case.max_tokens, stream=True
            )
            async with plain:
                yield (chunk.choices[0].text async for chunk in plain)


def requests(load: Load, known: Sequence[Case], pick: random.Random) -> list[asyncio.Task[None]]:
    """Two hundred requests, all at once: a third leaves, and a seventh are transfers, both ways."""
    tasks = []
    for number in range(REQUESTS):
        case, (model, other) = pick.choice(known), pick.choice((("a", "b"), ("b", "a")))
        if number % 7 == 3:
            work = load.transfer(case, model, other, salt=pick.choice(("", f"tenant {number}")))
        elif number % 3 == 0:
            leaves_early = number % 2 == 0
            work = (
                load.streamed(case, model, pick.randrange(1, 4))
                if leaves_early
                else load.impatient(case, model, pick.uniform(0.0, 4.0))
            )
        elif number % 3 == 1:
            work = load.whole(case, model)
        else:
            work = load.streamed(case, model, None)
        tasks.append(asyncio.create_task(work))
    pick.shuffle(tasks)
    return tasks


# H28
async def test_two_hundred_mixed_requests_give_no_wrong_answer_and_leave_nothing(tiny: Serving) -> None:
    pick = random.Random(SEED)
    known = await asyncio.to_thread(cases, tiny, pick)
    looks = 0
    ended = asyncio.Event()

    async def look() -> None:
        nonlocal looks
        while not ended.is_set():
            for name in ("a", "b"):
                await asyncio.to_thread(tiny.stats, name)
                looks += 1

    looking = asyncio.create_task(look())
    async with tiny.async_openai() as client:
        load = Load(client, tiny.url, Counter())
        async with asyncio.timeout(ENDED_S):
            await asyncio.gather(*requests(load, known, pick))
        ended.set()
        await looking
    left = load.became["left mid-stream"] + load.became["left at some moment"]
    assert left >= REQUESTS / 5, load.became
    assert load.became["transfer accepted"] >= 5, load.became
    assert looks >= 10
    tiny.at_rest()
    for name in ("a", "b"):
        stats = tiny.stats(name)
        assert (stats["inflight"], stats["failed"]) == (0, 0)
    for case in known[:6]:  # what lies in the pools now is right too
        load = Load(tiny.async_openai(), tiny.url, Counter())
        await asyncio.gather(load.whole(case, "a"), load.whole(case, "b"))
        await load.client.close()


async def test_tokens_keep_coming_while_transfers_run_beside(tiny: Serving) -> None:
    moved = [story(f"beside {number}", 16) for number in range(4)]
    with tiny.local("a") as a, tiny.local("b") as b:
        for place, text in enumerate(moved):  # each source holds what it will be asked for
            await asyncio.to_thread((b if place % 2 else a).generate, text=text, max_tokens=1)
    heard: Counter[str] = Counter()

    async def listen(client: AsyncOpenAI, model: str) -> None:
        for number in count():
            prompt = story(f"{model} {number}", 1)
            stream = await client.completions.create(model=model, prompt=prompt, max_tokens=400, stream=True)
            async for chunk in stream:
                heard[model] += len(chunk.choices)

    async def came_beside(http: httpx.AsyncClient, source: str, text: str) -> bool:
        """Move a prompt, and tell whether both engines spoke between a look that saw it move and one that still did."""
        said = (await http.post("/v1/kv_transfer", json={"source": source, "prompt": text, "on_miss": "fail"})).json()
        place, beside = f"/v1/kv_transfer/{said['request_hash']}", False
        before: Counter[str] = Counter()
        while (told := (await http.get(place)).json())["status"] in {"asking", "queued", "running"}:
            if told["step"] == "moving":
                before = before or heard.copy()
                beside = beside or all(heard[model] - before[model] >= SPOKEN for model in ("a", "b"))
        assert told["status"] == "transferred", told
        return beside

    async with tiny.async_openai() as client:
        listening = [asyncio.create_task(listen(client, model)) for model in ("a", "b")]
        await until(lambda: heard["a"] and heard["b"], 100, what="both engines answer")
        beside = 0
        for place, text in enumerate(moved):
            source, destination = ("b", "a") if place % 2 else ("a", "b")
            async with httpx.AsyncClient(base_url=f"{tiny.url}/instances/{destination}", timeout=60) as http:
                beside += await came_beside(http, source, text)
        for task in listening:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
    assert beside >= 1, "no transfer was seen to move while both engines spoke"
    tiny.at_rest()
