"""The vLLM demo's steps, each with its own line on the screen.

A step has a cache salt of its own, so that neither server finds in its own cache what a step before it computed: what
is quick then came from outside, and the answers stay comparable, since a salt changes names and no KV.
"""

import asyncio
import signal
import time
from contextlib import aclosing
from dataclasses import dataclass, replace

from rich.console import Console

from kvbus.commands.cluster import Cluster
from kvbus.commands.demo_prompt import PROMPT_TOKENS, log_prompt
from kvbus.commands.demo_vllm_result import VllmShown
from kvbus.commands.poison import flip_top_exponent_bits
from kvbus.commands.vllm_asking import Answered, ask, external_tokens, tokenize
from kvbus.commands.vllm_launch import Server
from kvbus.commands.working import working
from kvbus.engines.client import LocalClient
from kvbus.errors import BackendError
from kvbus.events import TransferOutcome, TransferStep
from kvbus.publisher import Publisher
from kvbus.subscriber import Seen, Subscriber
from kvbus.topics import Topics

SOURCE, DESTINATION = "a", "b"
ANSWER_TOKENS = 24
TURNS = 3
"""Cold and staged by turns, of which medians are told: one first token alone is at the mercy of what else runs here."""
BUDGET_S = 240.0
"""For one transfer: a's prefill of a thousand tokens on a busy core."""
SLOW_BYTES_S = 8 << 20
"""In the last steps pages move at this rate: 46 MB then take six seconds, in which a can be killed."""


@dataclass(frozen=True, slots=True)
class Town:
    """What runs: broker and workers, and a vLLM server for each of them."""

    cluster: Cluster
    servers: dict[str, Server]
    model: str


@dataclass(slots=True)
class Steps:
    """Plays the demo from start to end."""

    town: Town
    shown: VllmShown
    screen: Console
    ids: tuple[int, ...] = ()

    async def play(self) -> None:
        """Run all steps in order, then judge what they showed; BackendError where one cannot go on."""
        self.ids = await self._prompt(day=1, tokens=PROMPT_TOKENS)
        self.shown.prompt_tokens = len(self.ids)
        await self.warm_up()
        for turn in range(TURNS):
            await self.cold(f"cold-{turn}")
            await self.stage(f"staged-{turn}")
            await self.staged(f"staged-{turn}")
        await self.poison_refused()
        await self.without_digests()
        await self.poison_taken()
        await self.killed()
        self.shown.judge()

    async def warm_up(self) -> None:
        """Go all ways once with a short prompt, so that no measured step pays for a first time."""
        ids = await self._prompt(day=2, tokens=PROMPT_TOKENS // 8)
        with working(self.screen, "warming both servers up on a short prompt"):
            await self._ask(SOURCE, ids, "warm-cold")
            await self._ask(DESTINATION, ids, "warm-cold")
            await self._settled(ids, "warm")
            await self._ask(DESTINATION, ids, "warm")

    async def cold(self, salt: str) -> None:
        """B answers with nothing anywhere."""
        before = await self._external()
        with working(self.screen, f"b answers {len(self.ids)} tokens cold"):
            answer = await self._ask(DESTINATION, self.ids, salt)
        self.shown.ttfts_cold_s.append(answer.ttft_s)
        self.shown.expect(self.shown.cold in {(), answer.tokens}, "each cold answer has the same tokens")
        self.shown.cold, self.shown.cold_text = answer.tokens, answer.text
        self.shown.expect(await self._external() == before, "the cold answer takes nothing from outside")
        self.screen.print(f"cold: b's first token after [bold]{answer.ttft_s:.2f} s[/]")

    async def stage(self, salt: str) -> None:
        """A computes the prompt and lends its pages; b takes them over the bus."""
        with working(self.screen, "a computes the prompt, and b takes its pages"):
            outcome = await self._settled(self.ids, salt)
        shown = self.shown
        shown.pages, shown.length_bytes = outcome.pages_moved, outcome.length_bytes
        shown.stage_s, shown.move_s = outcome.total_s, outcome.move_s
        size = f"{outcome.length_bytes / 1e6:.1f} MB moved in [bold]{outcome.move_s * 1e3:.0f} ms[/]"
        self.screen.print(f"staged: {outcome.pages_moved} pages, {size} (a computed them in {outcome.grant_s:.2f} s)")

    async def staged(self, salt: str) -> None:
        """B answers from what was staged, and its own metrics say so."""
        before = await self._external()
        with working(self.screen, "b answers from the staged pages"):
            answer = await self._ask(DESTINATION, self.ids, salt)
        self.shown.ttfts_staged_s.append(answer.ttft_s)
        self.shown.expect(answer.tokens == self.shown.cold, "each staged answer has the same tokens as the cold one")
        self.shown.staged = answer.tokens
        self.shown.external_tokens = await self._external() - before
        self.screen.print(
            f"staged: b's first token after [bold]{answer.ttft_s:.3f} s[/]; "
            f"{self.shown.external_tokens} of its tokens are external, says its own /metrics"
        )

    async def poison_refused(self) -> None:
        """A changed page, with digests: the engine is refused it, and computes from there on."""
        with working(self.screen, "staging anew, changing one page, with page digests on"):
            await self._settled(self.ids, "refused")
            pages = await self._poison("refused")
            answer = await self._ask(DESTINATION, self.ids, "refused")
            held = await self._held("refused")
        self.shown.poison_refused = answer.tokens
        self.shown.poison_refused_blocks = pages - held
        self.screen.print(
            f"poisoned, digests on: {pages - held} of {pages} blocks found spoiled and dropped, the rest of the prompt "
            f"computed (first token after {answer.ttft_s:.2f} s); "
            + ("same tokens" if answer.tokens == self.shown.cold else "[red]other tokens[/]")
        )

    async def without_digests(self) -> None:
        """Both workers start anew without digests, and slow enough for what follows; their vLLMs attach again."""
        cluster = self.town.cluster
        with working(self.screen, "starting both workers anew, without page digests; the vLLMs run on"):
            plan = replace(cluster.plan, digests="off", rate_limit_bytes_s=SLOW_BYTES_S)
            for name in (SOURCE, DESTINATION):
                await cluster.restart(name, plan)
            # The first look-up after that may meet the closed socket, and then its request is computed.
            await self._ask(DESTINATION, self.ids[:64], "again")

    async def poison_taken(self) -> None:
        """The same without digests: nobody notices, and the answer is another."""
        with working(self.screen, "staging anew, changing one page, with page digests off"):
            await self._settled(self.ids, "taken")
            await self._poison("taken")
            before = await self._external()
            answer = await self._ask(DESTINATION, self.ids, "taken")
            taken = await self._external() - before
        self.shown.poison_taken, self.shown.poison_taken_text = answer.tokens, answer.text
        self.screen.print(
            f"poisoned, digests off: {taken} external tokens (first token after {answer.ttft_s:.2f} s): "
            f"{answer.text[:60]!r} instead of {self.shown.cold_text[:60]!r}",
            markup=False,
        )

    async def killed(self) -> None:
        """A and its vLLM are killed while pages move; b computes what did not come."""
        cluster = self.town.cluster
        if cluster.bus is None:
            raise BackendError("the cluster has not started")
        with working(self.screen, "staging anew, and killing a while its pages move"):
            moving = asyncio.ensure_future(self._until_moving())
            transfer = asyncio.ensure_future(self._transfer(self.ids, "killed"))
            await asyncio.wait({moving, transfer}, return_when=asyncio.FIRST_COMPLETED)
            self.shown.expect(not transfer.done(), "pages still move when a is killed")
            self.town.servers[SOURCE].kill()
            await cluster.end(SOURCE, signal.SIGKILL)
            moving.cancel()
            outcome = await transfer
            answer = await self._ask(DESTINATION, self.ids, "killed")
        self.shown.killed, self.shown.killed_outcome = answer.tokens, outcome.outcome
        self.shown.expect(outcome.outcome != "settled", "a transfer whose source is killed does not settle")
        self.screen.print(
            f"a killed: {outcome.outcome} ({outcome.failure}), {outcome.pages_moved} pages had come; b: "
            + ("same tokens" if answer.tokens == self.shown.cold else "[red]other tokens[/]")
        )

    # ------------------------------------------------------------------------------------------------------- inside

    async def _prompt(self, *, day: int, tokens: int) -> tuple[int, ...]:
        url = self.town.servers[DESTINATION].plan.url
        lines = max(4, tokens // 24)
        ids = await asyncio.to_thread(tokenize, url, self.town.model, log_prompt(lines, day=day))
        lines = max(1, round(lines * tokens / len(ids)))
        return await asyncio.to_thread(tokenize, url, self.town.model, log_prompt(lines, day=day))

    async def _ask(self, name: str, ids: tuple[int, ...], salt: str) -> Answered:
        url = self.town.servers[name].plan.url
        return await asyncio.to_thread(ask, url, self.town.model, ids, max_tokens=ANSWER_TOKENS, salt=salt)

    async def _external(self) -> int:
        return round(await asyncio.to_thread(external_tokens, self.town.servers[DESTINATION].plan.url))

    async def _settled(self, ids: tuple[int, ...], salt: str) -> TransferOutcome:
        outcome = await self._transfer(ids, salt)
        if outcome.outcome != "settled":
            raise BackendError(f"the transfer did not settle: {outcome.outcome} {outcome.failure} {outcome.reason}")
        return outcome

    async def _transfer(self, ids: tuple[int, ...], salt: str) -> TransferOutcome:
        cluster = self.town.cluster
        async with Publisher(bus=cluster.bus, topics=Topics(cluster.plan.prefix)) as publisher:
            began = time.monotonic()
            handle = await publisher.transfer(
                source=SOURCE, destination=DESTINATION, prompt=ids, salt=salt, budget_s=BUDGET_S
            )
            verdict = await handle.verdict(BUDGET_S)
            outcome = await handle.outcome(BUDGET_S) if verdict.hopeful else None
        if outcome is None:
            waited_s = time.monotonic() - began
            raise BackendError(f"the transfer did not end: {verdict.verdict} {verdict.reason} ({waited_s:.0f} s)")
        return outcome

    async def _poison(self, salt: str) -> int:
        """Change the page in the middle; return how many there are."""

        def change() -> int:
            with LocalClient(self.town.cluster.socket(DESTINATION)) as client:
                where = client.where(self.ids, salt)
                flip_top_exponent_bits(where, where.pages[len(where.pages) // 2])
            return len(where.pages)

        return await asyncio.to_thread(change)

    async def _held(self, salt: str) -> int:
        """How many blocks b's pool would still give for the prompt."""

        def ask_worker() -> int:
            with LocalClient(self.town.cluster.socket(DESTINATION)) as client:
                return client.held(self.ids, salt)

        return await asyncio.to_thread(ask_worker)

    async def _until_moving(self) -> None:
        """Return once the destination has said that pages of the last transfer move."""
        cluster = self.town.cluster
        if cluster.bus is None:
            raise BackendError("the cluster has not started")
        since = time.time_ns()
        async with aclosing(Subscriber(cluster.bus, Topics(cluster.plan.prefix)).facts(settle=False)) as items:
            async for item in items:
                if not isinstance(item, Seen) or item.event.header.t < since:
                    continue
                body = item.event.body
                if isinstance(body, TransferStep) and body.step == "moving":
                    return
