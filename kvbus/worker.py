"""The worker: one member of one instance. Starts its parts in order, runs the rounds, and ends in the right order.

Its engine is another process, so that neither waits for the other's interpreter. Its memory is its own truth: the bus
carries reports, and a broker that is away delays returns but never causes one.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from kvbus.config import ATTACHING, WorkerSettings
from kvbus.engines.desk import Hello
from kvbus.engines.port import EnginePort
from kvbus.errors import ConfigError
from kvbus.pool.layout import PageLayout
from kvbus.processes import ProcessWatch, identity
from kvbus.roles.assembly import Base, Parts, assemble
from kvbus.roles.desk import PoolDesk
from kvbus.roles.journal import TroubleLog
from kvbus.roles.local import LocalBackend
from kvbus.roles.lock import WorkerLock
from kvbus.roles.owed import keep_owed, kept_owed, owed_path
from kvbus.roles.poolside import PoolSide
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import next_epoch, require_alone
from kvbus.roles.rounds import Rounds
from kvbus.topics import Topics
from kvbus.transport import Bus

TICK_S = 1.0
"""A round runs at least this often, for deadlines; with transfers in flight, four times as often."""
ENGINE_WAIT_S = 180.0
"""Loading a model of hundreds of MB from a cold disk, with torch's own import, on two busy cores."""
ATTACH_WAIT_S = 900.0
"""For an engine that somebody else starts: five times as long, since a person may have to."""
ENGINE_RESTARTS_MAX = 3
"""An engine that died three times will die a fourth time; then somebody has to look."""
FINISH_S = 2.0
"""For transfers to end by themselves before they are handed back: most take milliseconds, and containers are given ten
seconds in all."""
STOP_BUDGET_S = 3.0
"""For each part of the shutdown: transfers, the engine, leases, the outbox. What is not evident by then stays mapped
until the process exits; in all a worker ends within half a minute."""
FLUSH_S = 1.0
"""For telling sources that access has ended: they answer in milliseconds."""
RELEASE_S = 5.0
"""For the last of that: what a source has not heard by then, the next run tells it."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Worker:
    """One member at work. `run` does everything; `stop` may be called from a signal handler of the loop."""

    settings: WorkerSettings
    bus: Bus
    on_ready: Callable[[str], None]
    parts: Parts | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _attached: asyncio.Event = field(default_factory=asyncio.Event)
    _base: Base | None = None
    _port: EnginePort | None = None
    _desk: PoolDesk | None = None
    _engine: asyncio.subprocess.Process | None = None

    def stop(self) -> None:
        """Ask the worker to end; it does so in order, within bounds."""
        self._stop.set()

    def counters(self) -> Mapping[str, int | float | str]:
        """Return what this member counts, by name; nothing before its engine is there."""
        return self.parts.counters() if self.parts else {}

    async def run(self) -> None:
        """Run until `stop`; ConfigError or BusError where it cannot start, and nothing is left behind then."""
        with WorkerLock(self.settings):
            topics = Topics(self.settings.prefix)
            await require_alone(self.bus, self.settings.instance, self.settings.member)
            epoch = await next_epoch(self.bus, self.settings.instance, self.settings.member)
            base = self._make_base(topics, epoch)
            self._watch_parent(base)
            await self._open_port(base)
            tasks = {"recorder": self._spawn(base.recorder.run(), "recorder")}
            try:
                tasks["engine"] = self._spawn(self._keep_engine(), "engine")
                parts = await self._engine_attached(tasks)
                if parts is None:
                    return  # told to stop before the engine was there
                await parts.intake.listen()
                parts.drain.leave = self.stop
                await parts.drain.listen()
                await parts.presence.register()
                tasks["presence"] = self._spawn(parts.presence.run(), "presence")
                if parts.rollback is not None:
                    tasks["rollback"] = self._spawn(parts.rollback.run(), "rollback")
                if parts.council is not None:
                    await parts.council.listen()
                    tasks["council"] = self._spawn(parts.council.run(), "council")
                tasks["intake"] = self._spawn(parts.intake.consume(), "intake")
                tasks["rounds"] = self._spawn(self._rounds(parts), "rounds")
                self.on_ready(self._ready_text(parts))
                await self._until_stopped(tasks)
            finally:
                await self._close(base, tasks)

    def _ready_text(self, parts: Parts) -> str:
        pool, settings = parts.pool, self.settings
        sources = ", ".join(settings.limits.source_allow) or "nobody (no --allow: every source is refused)"
        pages = f"{pool.memory.page_count} pages of {pool.layout.page_bytes / 1e3:.1f} kB"
        return f"{settings.instance}/{settings.member} is ready: {settings.engine}, {pages}, takes KV from {sources}"

    # -------------------------------------------------------------------------------------------------------- start

    def _make_base(self, topics: Topics, epoch: int) -> Base:
        loop = asyncio.get_running_loop()
        recorder = Recorder(
            bus=self.bus,
            topics=topics,
            instance=self.settings.instance,
            member=self.settings.member,
            epoch=epoch,
            unix_ns=time.time_ns,
        )
        self._base = Base(
            settings=self.settings,
            bus=self.bus,
            topics=topics,
            epoch=epoch,
            recorder=recorder,
            watch=ProcessWatch(loop),
            wake=lambda: _wake_from_any_thread(loop, self._wake),
            reads=LocalBackend(name="engine-read"),
            writes=LocalBackend(name="engine-write"),
        )
        return self._base

    def _watch_parent(self, base: Base) -> None:
        """Stop when whoever started this worker has ended, so that a killed `kvbus up` leaves nothing behind."""
        pid = self.settings.parent_pid
        if pid:
            try:
                watched = base.watch.watch(identity(pid), self.stop)
            except ProcessLookupError:
                watched = False
            if not watched:
                self.stop()

    async def _open_port(self, base: Base) -> None:
        self._desk = PoolDesk(
            attach=self._attach,
            rounds=self._rounds_of_parts,
            reads=base.reads,
            writes=base.writes,
            clock=time.monotonic,
            counters=self.counters,
        )
        self._port = EnginePort(self.settings.socket_path, self._desk, self._on_engine, self._on_engine_lost)
        await self._port.start()

    def _attach(self, layout: PageLayout, hello: Hello) -> PoolSide:
        if self._base is None or self._port is None or self._desk is None:
            raise ConfigError("an engine attached before the worker was ready")
        self.parts = assemble(self._base, self._port, self._desk, layout, hello)
        self.parts.rounds.follow(TroubleLog())
        self.parts.asker.bring(kept_owed(owed_path(self.settings)))
        return self.parts.pool

    def _rounds_of_parts(self) -> Rounds:
        if self.parts is None:
            raise ConfigError("no engine has attached yet")
        return self.parts.rounds

    def _on_engine(self, hello: Hello) -> None:
        log.info("engine %s %s attached: %s", hello.engine, hello.version, hello.model)
        self._attached.set()

    def _on_engine_lost(self, reason: str) -> None:
        log.info("engine lost: %s", reason)
        self._attached.clear()

    async def _engine_attached(self, tasks: dict[str, asyncio.Task[None]]) -> Parts | None:
        waiting = self._spawn(_wait(self._attached), "attach")
        stopped = self._spawn(_wait(self._stop), "stop")
        wanted = {waiting, stopped, *tasks.values()}
        wait_s = ATTACH_WAIT_S if self.settings.engine in ATTACHING else ENGINE_WAIT_S
        ended, _ = await asyncio.wait(wanted, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        stopped.cancel()
        for task in ended & set(tasks.values()):
            task.result()  # raises what ended it
        if self.parts is None and self._stop.is_set():
            return None
        if self.parts is None:
            raise ConfigError(
                f"the {self.settings.engine} engine did not attach within {wait_s:g} s; its own output says why"
            )
        return self.parts

    # ------------------------------------------------------------------------------------------------------- engine

    async def _keep_engine(self) -> None:
        """Start the engine's process, and start it again when it dies, a few times; unless it attaches by itself."""
        if self.settings.engine in ATTACHING:
            await self._stop.wait()
            return
        for start in range(ENGINE_RESTARTS_MAX + 1):
            code = await self._run_engine()
            if self._stop.is_set():
                return
            if self.parts is None:
                raise ConfigError(
                    f"the {self.settings.engine} engine ended with status {code}: its message stands above"
                )
            log.warning("the engine ended with status %s (start %d of %d)", code, start + 1, ENGINE_RESTARTS_MAX + 1)
            await asyncio.sleep(TICK_S)
        log.error("the engine keeps dying: transfers to and from this instance go on, answers do not")
        await self._stop.wait()

    async def _run_engine(self) -> int:
        settings = self.settings
        command = [sys.executable, "-m", "kvbus.engines.process", "--engine", settings.engine]
        command += ["--socket", str(settings.socket_path), "--options", json.dumps(settings.options_for_engine)]
        self._engine = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr.fileno(), start_new_session=True
        )
        return await self._engine.wait()

    # ------------------------------------------------------------------------------------------------------- rounds

    async def _rounds(self, parts: Parts) -> None:
        while True:
            wait_s = TICK_S / 4 if parts.destination.running else TICK_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            self._wake.clear()
            self._round(parts)

    @staticmethod
    def _round(parts: Parts) -> None:
        if parts.plane is not None:
            for notice in parts.plane.notices():
                parts.source.released(notice.key, notice.nonce)
        parts.rounds.run()
        for reader in parts.lending.closed_here():  # their leases have gone back; their keys are closed for good
            parts.source.released(reader.key, reader.nonce)
        parts.source.tick()
        parts.destination.tick()
        parts.drain.tick()

    async def _until_stopped(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        stopped = self._spawn(_wait(self._stop), "stop")
        await asyncio.wait({stopped, *tasks.values()}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for task in tasks.values():
            if task.done():
                task.result()  # raises what ended it: none of them ends by itself

    # ---------------------------------------------------------------------------------------------------------- end

    async def _close(self, base: Base, tasks: dict[str, asyncio.Task[None]]) -> None:
        """Stop, return what there is evidence for, and tell; each part within its own budget (contract 54).

        Also the way out after a fault: then rounds may not run by themselves any more, so they are run here.
        """
        fault = not self._stop.is_set()
        self._stop.set()
        if self.parts is not None:
            await self._end_traffic(self.parts, fault=fault)
        if self._port is not None and not await self._port.close():
            await self._end_engine()
            await self._port.close()
        if self.parts is not None:
            await self._shut_holder(self.parts)
            await self._stop_listening(self.parts, tasks)
        if not await base.recorder.flush(STOP_BUDGET_S):
            log.warning("%d bytes of facts did not reach the broker", base.recorder.queued_bytes)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await self._end_engine()
        base.watch.close()

    async def _end_traffic(self, parts: Parts, *, fault: bool) -> None:
        """Take and lend nothing new; wait, bounded, until transfers have ended and readers have let go.

        What has not ended by then is stopped, and its request handed back to the queue, for the next run.
        """
        why = f"draining: {self.settings.instance} is shutting down"
        await parts.drain.stop(why)

        def ended() -> bool:
            self._round(parts)
            return not parts.destination.running and not parts.lending.statistics().lent

        if not await _until(ended, FINISH_S):
            parts.destination.stop(why, fault=fault)
            await _until(ended, STOP_BUDGET_S)
        await parts.asker.flush(FLUSH_S)

    async def _stop_listening(self, parts: Parts, tasks: dict[str, asyncio.Task[None]]) -> None:
        """The forced close may have ended the last reads: tell their sources too, then leave the bus."""
        await parts.asker.flush(RELEASE_S)
        keep_owed(owed_path(self.settings), await parts.asker.close())
        await parts.drain.close()
        if "intake" in tasks:
            tasks["intake"].cancel()  # until here it gave back at once what the queue still offered
        await parts.intake.flush(FLUSH_S)
        await parts.intake.close()
        if parts.council is not None and parts.sharing is not None:  # until here it heard how its transfers end
            tasks["council"].cancel()
            await parts.council.close()
            await parts.sharing.close()
        await parts.source.close()
        await parts.destination.close()

    async def _shut_holder(self, parts: Parts) -> None:
        holder = parts.rounds.holder
        status = holder.shutdown(STOP_BUDGET_S)
        deadline = time.monotonic() + STOP_BUDGET_S
        while not status.complete and time.monotonic() < deadline:
            parts.rounds.run()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S / 10):
                    await self._wake.wait()
            self._wake.clear()
            status = holder.shutdown(0.0)
        parts.rounds.run()
        if not status.complete:  # logged, not raised: the memory stays mapped until this process ends (R16)
            log.warning("not complete: %d leases held, %d without evidence", status.held, status.retained)

    async def _end_engine(self) -> None:
        engine = self._engine
        if engine is None or engine.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            engine.terminate()
        try:
            async with asyncio.timeout(STOP_BUDGET_S):
                await engine.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                engine.kill()
            await engine.wait()

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)


def _wake_from_any_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # no loop runs here: another thread, so the loop has to be woken
        if asyncio.get_running_loop() is loop:
            loop.call_soon(event.set)  # and not at once: a round that wakes itself would let nobody else have a turn
            return
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(event.set)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _until(true: Callable[[], bool], budget_s: float) -> bool:
    deadline = time.monotonic() + budget_s
    while not true():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.02)
    return True


async def run_worker(
    settings: WorkerSettings, bus: Bus, on_ready: Callable[[str], None], on_made: Callable[[Worker], None] | None = None
) -> None:
    """Run one worker until SIGTERM or SIGINT; the bus is the caller's to close. `on_made` gets it before it runs."""
    worker = Worker(settings, bus, on_ready)
    if on_made is not None:
        on_made(worker)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    await worker.run()
