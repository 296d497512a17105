"""`kvbus demo`: two instances, one prompt, cold against staged, and the proof that the staged pages answer."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console

from kvbus.commands.audit import audit_log
from kvbus.commands.audit import lines as audit_lines
from kvbus.commands.auditing import Verdict as AuditVerdict
from kvbus.commands.cluster import Cluster, ClusterPlan
from kvbus.commands.common import EXIT_FAILED, console, json_option, print_document
from kvbus.commands.demo_prompt import fitting_prompt
from kvbus.commands.demo_result import Shown, result_table
from kvbus.commands.leases import LeaseBook
from kvbus.commands.poison import flip_top_exponent_bits
from kvbus.commands.recordings import write_record
from kvbus.commands.rendering import LinePrinter, printable
from kvbus.commands.stories import Story, tell
from kvbus.commands.wording import lines_of
from kvbus.commands.worker import engine_option, engine_options
from kvbus.commands.working import working
from kvbus.config import DIGESTS
from kvbus.engines.client import LocalClient, TimedAnswer
from kvbus.errors import BackendError
from kvbus.events import TransferOutcome
from kvbus.publisher import Publisher, Verdict
from kvbus.subscriber import Seen, Subscriber
from kvbus.topics import Topics

SOURCE, DESTINATION = "a", "b"
ANSWER_TOKENS = 24
SPEEDUP_MIN = {"toy": 1.0, "transformers": 8.0}
"""Below this the demo has not shown its point. The toy engine only has to be quicker; its prefill is a made-up cost."""
PAGES = {"toy": 256, "transformers": 160}
"""A prompt of 2,048 tokens takes 64 pages; 160 of SmolLM2's 1.5 MB pages are 236 MB an instance."""
TRANSFER_WAIT_S = 120.0
FACTS_WAIT_S, QUIET_S = 5.0, 0.5


@click.command()
@engine_option
@click.option("--engine-options", "options", default="", metavar="JSON", help="Options of the engines.")
@click.option(
    "--transport",
    "--backend",
    "backend",
    type=click.Choice(["auto", "ucx", "memory", "socket"]),
    default="ucx",
    show_default=True,
    help="How pages are read; auto: the cheapest way for each transfer.",
)
@click.option("--digests", type=click.Choice(DIGESTS), default="off", show_default=True, help="When pages are hashed.")
@click.option("--nats", "nats_url", default="", metavar="URL", help="Use this broker instead of starting one.")
@click.option("--token", default="", envvar="KVBUS_NATS_TOKEN", help="The broker's token.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write all that was recorded to FILE, for `kvbus audit` and `kvbus story`.",
)
@json_option
def demo(as_json: bool, options: str, record: Path | None, **settings: str) -> int:
    """Show the story end to end: a prompt computed cold, then answered from staged KV, with the same tokens.

    Two instances start on this host. B answers a prompt cold; A's KV of the prompt is staged to B over NATS and UCX; B
    answers again. Then one staged page is changed, which must change the answer, or with --digests be noticed. Exit
    status 0 if all of it holds.
    """
    engine = settings["engine"]
    plan = ClusterPlan(
        instances=(SOURCE, DESTINATION),
        engine=engine,
        engine_options=engine_options(engine, options),
        pages=PAGES[engine],
        backend=settings["backend"],
        digests=settings["digests"],
        nats_url=settings["nats_url"],
        nats_token=settings["token"],
    )
    return asyncio.run(_demo(plan, record, as_json=as_json))


async def _demo(plan: ClusterPlan, file: Path | None, *, as_json: bool) -> int:
    screen = console(as_json=as_json)
    shown = Shown(plan.engine, plan.digests)
    cluster = Cluster(plan)
    this = asyncio.current_task()
    if this is not None:  # told to end, it ends what it started, as it does on Ctrl-C
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    try:
        with working(screen, "starting two instances") as say:
            await cluster.start(say)
        shown.model = cluster.registered[DESTINATION].record.model
        async with _facts(cluster, shown, screen) as hold:
            await _show(cluster, shown, screen, hold)
            await _audit(cluster, shown, screen, file)
    finally:
        with working(screen, "stopping") as say:
            await cluster.stop()
    screen.print(result_table(shown))
    for fault in shown.faults:
        screen.print(f"[red]does not hold: {fault}[/]")
    if as_json:
        print_document(shown.document())
    return EXIT_FAILED if shown.faults else 0


async def _show(cluster: Cluster, shown: Shown, screen: Console, hold: "_Hold") -> None:
    with LocalClient(cluster.socket(SOURCE)) as lender, LocalClient(cluster.socket(DESTINATION)) as taker:
        ids = await asyncio.to_thread(fitting_prompt, taker, day=1)
        warm = await asyncio.to_thread(fitting_prompt, taker, day=2)
        shown.prompt_tokens = len(ids)
        steps = _Steps(cluster, shown, screen, lender, taker)
        await steps.warm_up(warm)
        await steps.cold(ids)
        hold.open()
        outcome = await steps.stage(ids, "b takes the prompt's KV from a")
        if outcome is None or outcome.outcome != "settled":
            shown.faults.append(f"the transfer settles: {outcome.reason if outcome else 'no outcome'}")
            return
        shown.pages, shown.length_bytes = outcome.pages_moved, outcome.length_bytes
        shown.transfer_s, shown.stage_s, shown.transfer = outcome.move_s, outcome.total_s, outcome.transfer
        await steps.staged(ids)
        await steps.poison(ids)
    await hold.until_quiet(FACTS_WAIT_S)
    shown.expect(shown.tokens_identical, "the staged answer has the same tokens as the cold one")
    shown.expect(shown.poison_detected, shown.poison_text)
    shown.expect(
        shown.recomputed == shown.cold, "after the changed page was evicted, b computes the right answer again"
    )
    least = SPEEDUP_MIN[shown.engine]
    shown.expect(shown.speedup >= least, f"the first token comes at least {least:g} times sooner")
    story = tell(shown.events, shown.transfer)
    if isinstance(story, Story):
        screen.print(f"\n{story.summary}\n", markup=False)
    told = isinstance(story, Story) and story.complete and not story.contradictions
    shown.expect(told, "the facts on the bus explain every page of the transfer, up to the return of both leases")


async def _audit(cluster: Cluster, shown: Shown, screen: Console, file: Path | None) -> None:
    """Audit, and record where that is wanted, all that both instances have reported since they started."""
    if cluster.bus is None:
        raise BackendError("the cluster has not started")
    runs = frozenset((name, one.member, one.epoch) for name, one in cluster.registered.items())
    record, shown.audit = await audit_log(cluster.bus, Topics(cluster.plan.prefix), runs=runs)
    if file is not None:
        write_record(file, record)
    clean = shown.audit.verdict is AuditVerdict.CLEAN
    shown.expect(clean, f"the audit of all facts is clean (it is {shown.audit.verdict.value})")
    for line in audit_lines(shown.audit):
        screen.print(printable(line), markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The demo's steps, each with its own line on the screen; calls to the engines run beside the loop."""

    cluster: Cluster
    shown: Shown
    screen: Console
    lender: LocalClient
    taker: LocalClient

    async def warm_up(self, ids: tuple[int, ...]) -> None:
        """Run both ways once on another prompt, so that neither measured run pays for a first time."""
        with working(self.screen, "warming both instances up on another prompt"):
            await self._answer(self.lender, ids, reuse=False)
            await self._answer(self.taker, ids, reuse=False)
            await self._transfer(ids)
            await self._answer(self.taker, ids)
            await asyncio.to_thread(self.taker.evict, ids)
            await asyncio.to_thread(self.lender.evict, ids)

    async def cold(self, ids: tuple[int, ...]) -> None:
        """Answer with nothing in the cache and nothing stored."""
        held = await asyncio.to_thread(self.taker.held, ids)
        self.shown.expect(held == 0, f"b holds none of the prompt's blocks before the cold run (it holds {held})")
        with working(self.screen, f"b answers {len(ids)} tokens cold"):
            answer = await self._answer(self.taker, ids)
        self.shown.expect(answer.end.cached_tokens == 0, "the cold run reuses nothing")
        self.shown.ttft_cold_s, self.shown.cold = answer.ttft_s, answer.end.tokens
        held = await asyncio.to_thread(self.taker.held, ids)
        self.shown.expect(held == 0, "the cold run stores nothing")
        self.screen.print(f"cold: first token after [bold]{answer.ttft_s:.2f} s[/]")

    async def stage(self, ids: tuple[int, ...], text: str) -> TransferOutcome | None:
        """Have b take the prompt's KV from a, which computes it for that."""
        with working(self.screen, text):
            verdict, outcome = await self._transfer(ids)
        if outcome is not None:
            size = outcome.length_bytes / 1e6
            self.screen.print(
                f"staged: {outcome.pages_moved} pages, {size:.1f} MB moved in [bold]{outcome.move_s * 1e3:.0f} ms[/] "
                f"(a computed them in {outcome.grant_s:.2f} s) · {outcome.outcome}"
            )
        else:
            self.screen.print(f"[red]not staged: {verdict.verdict} {verdict.reason}[/]")
        return outcome

    async def staged(self, ids: tuple[int, ...]) -> None:
        """Answer from the staged pages."""
        held = await asyncio.to_thread(self.taker.held, ids)
        self.shown.expect(held == self.shown.pages, f"b holds the {self.shown.pages} staged blocks (it holds {held})")
        with working(self.screen, "b answers from the staged pages"):
            answer = await self._answer(self.taker, ids)
        self.shown.expect(answer.end.cached_tokens > 0, "the staged run reuses the pages")
        self.shown.ttft_staged_s, self.shown.staged = answer.ttft_s, answer.end.tokens
        self.screen.print(f"staged: first token after [bold]{answer.ttft_s:.3f} s[/]")

    async def poison(self, ids: tuple[int, ...]) -> None:
        """Change one staged page in memory: the answer must change. Then evict it: the answer must be right again."""
        with working(self.screen, "changing one staged page, and asking once more"):
            where = await asyncio.to_thread(self.taker.where, ids)
            page = where.pages[len(where.pages) // 2]
            flip_top_exponent_bits(where, page)
            answer = await self._answer(self.taker, ids)
            self.shown.poisoned = answer.end.tokens
            noticed = self.cluster.plan.digests != "off"  # then it is out of use already
            self.shown.blocks_left_out = len(where.pages) - await asyncio.to_thread(self.taker.held, ids)
            evicted = await asyncio.to_thread(self.taker.evict, ids)
            expected = len(where.pages) - noticed
            self.shown.expect(evicted == expected, "the changed page and its prompt's others are evicted")
            answer = await self._answer(self.taker, ids)
            self.shown.recomputed = answer.end.tokens

    async def _transfer(self, ids: tuple[int, ...]) -> tuple[Verdict, TransferOutcome | None]:
        cluster = self.cluster
        async with Publisher(bus=cluster.bus, topics=Topics(cluster.plan.prefix)) as publisher:
            handle = await publisher.transfer(
                source=SOURCE, destination=DESTINATION, prompt=ids, budget_s=TRANSFER_WAIT_S
            )
            verdict = await handle.verdict(TRANSFER_WAIT_S)
            outcome = await handle.outcome(TRANSFER_WAIT_S) if verdict.hopeful else None
        return verdict, outcome

    @staticmethod
    async def _answer(client: LocalClient, ids: tuple[int, ...], *, reuse: bool = True) -> TimedAnswer:
        return await asyncio.to_thread(client.generate, ids=ids, max_tokens=ANSWER_TOKENS, store=False, reuse=reuse)


@dataclass(slots=True)
class _Hold:
    """Lets facts through to the screen once the interesting part begins; what comes before is warm-up."""

    is_open: bool = False
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self) -> None:
        """Show facts from now on."""
        self.is_open = True

    async def until_quiet(self, wait_s: float) -> None:
        """Wait, bounded, until no fact has come for half a second."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            self.arrived.clear()
            try:
                async with asyncio.timeout(QUIET_S):
                    await self.arrived.wait()
            except TimeoutError:
                return


@contextlib.asynccontextmanager
async def _facts(cluster: Cluster, shown: Shown, screen: Console) -> AsyncIterator[_Hold]:
    """Follow the facts for as long as the block runs: onto the screen, and into the result."""
    hold = _Hold()
    if cluster.bus is None:
        raise BackendError("the cluster has not started")
    subscriber = Subscriber(cluster.bus, Topics(cluster.plan.prefix))

    book, printer = LeaseBook(keep_returned=False), LinePrinter(screen)

    async def follow() -> None:
        async with contextlib.aclosing(subscriber.facts()) as events:
            async for seen in events:
                if not isinstance(seen, Seen):
                    continue
                lines = lines_of(seen.event, book)
                if hold.is_open:
                    hold.arrived.set()
                    shown.events.append(seen.event)
                    for line in lines:
                        if not line.is_local:  # the engines' own reads and writes would drown the transfer
                            printer.show(seen.event, line)

    following = asyncio.get_running_loop().create_task(follow())
    try:
        yield hold
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
