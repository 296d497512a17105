"""Transfers as the gateway serves them: one gate for each instance, the runs behind it, and what the facts add.

The destination has the last word on everything. What the gateway decides by itself, it decides to spare the destination
a question: who is listed, what runs already, how much may run.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvbus.errors import BusError
from kvbus.events import Header, NamesForgotten, TransferOutcome, TransferStep
from kvbus.gateway.answers import Problem
from kvbus.gateway.asked import Asked
from kvbus.gateway.directory import Directory
from kvbus.gateway.feed import Told
from kvbus.gateway.gate import GateStatistics, TransferGate
from kvbus.gateway.gates import Gates
from kvbus.gateway.records import Record
from kvbus.gateway.restarts import Restarts
from kvbus.gateway.runs import Run, Taken, outcome_status
from kvbus.gateway.settings import GatewaySettings
from kvbus.gateway.sources import Allowlist, Source, source_of
from kvbus.publisher import Publisher
from kvbus.subscriber import Seen

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a request, by the words of the published endpoint."""

    status: str
    request_hash: str
    destination: str
    transfer: str = ""
    reason: str = ""


class Transfers:
    """Answers requests, and follows what becomes of them."""

    def __init__(
        self,
        *,
        settings: GatewaySettings,
        directory: Directory,
        publisher: Publisher,
        clock: Callable[[], float],
        wall_s: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._allowlist = Allowlist.parsed(settings.source_allow)
        self._directory = directory
        self._publisher = publisher
        self._clock = clock
        self._wall_s = wall_s
        self._gates = Gates(settings, directory)
        self._restarts = Restarts()
        self._runs: dict[Record, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waited: dict[Record, set[asyncio.Future[None]]] = {}

    # -------------------------------------------------------------------------------------------------------- asking

    async def ask(self, asked: Asked, instance: str = "") -> Answered:
        """Answer a request for an instance; Problem 400, 403, 404 or 503 where it is not taken on."""
        source = await self._allowed_source(asked.source)
        destination = await self.served(instance, asked.destination)
        if source == destination:
            raise Problem(400, f"source and destination are both {source!r}: an instance is not its own source")
        request_hash = asked.request_hash(source)
        self._gates.notice_restart(destination, self._clock())
        record = Record(request_hash, source, destination, asked.model, self._clock(), self._wall_s())
        gate = self.gate(destination)
        passed = gate.enter(record)
        if passed.word == "busy":
            gate.was_busy()
            most = self._settings.inflight_max
            return _answered("skipped_busy", record, f"at most {most} transfers into {destination} run at a time")
        if passed.word == "repeat" and passed.record is not None:
            return await self._join(gate, passed.record)
        if asked.is_empty:
            gate.fire(record)
            gate.end(record, "transferred", reason="the prompt is empty: there is nothing to move")
            return _answered("accepted", record, record.reason)
        taken = await _taken(self._start(record, gate, asked))
        if taken.word == "skipped_busy":
            gate.was_busy()
        elif taken.word == "deduped":
            gate.repeated(record)
        return _answered(taken.word, record, taken.reason)

    async def _join(self, gate: TransferGate, record: Record) -> Answered:
        """Answer a repeat: it shares what its first becomes, also where that is not taken on."""
        run = self._runs.get(record)
        taken = await _taken(run) if run is not None else Taken()
        if taken.word == "skipped_busy":
            gate.was_busy()
            return _answered("skipped_busy", record, taken.reason)
        gate.repeated(record)
        return _answered("deduped", record, "the same request runs, or has settled within the dedup time")

    def _start(self, record: Record, gate: TransferGate, asked: Asked) -> Run:
        run = Run(record, gate, asked, self._publisher, self._ended)
        self._runs[record] = run
        task = asyncio.get_running_loop().create_task(run.serve())
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return run

    async def _allowed_source(self, text: str) -> str:
        """Return the instance that a source stands for.

        Problem 403 where it may not be named, or stands for several; 503 where it may, and is not there now.
        """
        try:
            source = source_of(text)
        except ValueError as error:
            raise Problem(403, self._allowlist.refusal(None) or str(error)) from error
        names = self._directory.names_of(source)
        if not names and self._allowlist.may_list(source):
            await self._directory.refresh()
            names = self._directory.names_of(source)
        if reason := self._allowlist.refusal(source, names):
            if self._allowlist.may_list(source) and not names:
                self._directory.require_fresh()
            raise Problem(403, reason)
        return self._one_of(names, source)

    def _one_of(self, names: Iterable[str], source: Source) -> str:
        match sorted(names):
            case [name]:
                return name
            case []:
                self._directory.require_fresh()
                text = "no registered instance answers to this source: is its worker running?"
                raise Problem(503, text, retry_after_s=1)
            case several:
                raise Problem(403, f"several instances claim this source: {', '.join(several)}", source=str(source))

    # --------------------------------------------------------------------------------------------------- destinations

    async def served(self, instance: str, wanted: str = "") -> str:
        """Return the one instance that a request is about.

        Problem 400 or 404 where that is none, or unclear; 503 where nobody can say, or no instance is there now.
        """
        if instance and wanted and instance != wanted:
            raise Problem(400, f"the path names {instance!r}, and destination is {wanted!r}")
        name = instance or wanted
        if not name and not self.instances():
            await self._directory.refresh()
        served = self.instances()
        if name in served:
            return name
        if name:
            if not self._settings.instances:
                await self._directory.refresh()
                if name in self._directory.instances:
                    return name
                self._directory.require_fresh()
            raise Problem(404, f"this gateway serves no instance {name!r}", instances=sorted(served))
        if len(served) == 1:
            return next(iter(served))
        if not served:
            raise Problem(503, "no instance is registered: is a worker running?", retry_after_s=1)
        raise Problem(400, "name a destination: this gateway serves several instances", instances=sorted(served))

    def instances(self) -> frozenset[str]:
        """Return the instances that this gateway speaks for now."""
        return frozenset(self._settings.instances or self._directory.instances)

    def gate(self, instance: str) -> TransferGate:
        """Return the gate of an instance."""
        return self._gates.gate(instance, self._clock())

    def statistics(self, instance: str = "") -> GateStatistics:
        """Return the counters of an instance; without one, those of all that this gateway speaks for, added up."""
        if instance:
            return self.gate(instance).statistics(self._clock())
        return self._gates.total(self.gated(), self._clock())

    def gated(self) -> frozenset[str]:
        """Return the instances that have counters: those that are served now, or were within the last hour."""
        self._gates.drop_gone(self._clock())
        return self.instances().union(self._gates.names())

    # -------------------------------------------------------------------------------------------------------- records

    def find(self, request_hash: str, instance: str = "") -> Record:
        """Return the latest request of a hash; Problem 404 or 409 where there is none, or one for several instances."""
        names = [instance] if instance else self._gates.names()
        found = [record for name in names if (record := self.gate(name).find(request_hash))]
        if not found:
            raise Problem(404, "no request of this hash is remembered here")
        if len(found) > 1:
            where = sorted(record.destination for record in found)
            raise Problem(409, "several instances have a request of this hash: name one in the path", instances=where)
        return found[0]

    async def until_ended(self, record: Record, wait_s: float) -> None:
        """Wait until a request has ended, at most so long."""
        if record.ended:
            return
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waited.setdefault(record, set())
        waiting.add(over)
        try:
            await asyncio.wait({over}, timeout=wait_s)
        finally:
            waiting.discard(over)
            if not waiting and self._waited.get(record) is waiting:
                del self._waited[record]

    async def cancel(self, record: Record) -> None:
        """Ask for a request to stop; Problem 409 or 503 where it has ended, or nobody answers."""
        if record.ended:
            raise Problem(409, f"this request has ended: {record.status}")
        run = self._runs.get(record)
        cancel = run.cancel() if run else self._publisher.cancel(record.request_hash, record.destination)
        try:
            heard = await cancel
        except BusError as error:
            raise Problem(503, f"the bus took no cancel: {error}", retry_after_s=1) from error
        if not heard:
            raise Problem(503, f"{record.destination} does not answer", retry_after_s=1)

    def hear(self, seen: Seen) -> Iterable[Told]:
        """Take what the facts say of a transfer, whoever asked for it; clients hear it from another."""
        body, instance = seen.event.body, seen.event.header.i
        if self._restarts.spoke(seen.event.header) and instance in self._gates:
            self._lose(seen.event.header)
        if isinstance(body, TransferStep):
            self._hear_step(body, seen.event.header)
        elif isinstance(body, TransferOutcome) and body.destination == instance:
            self._hear_outcome(body, seen.event.header)
        elif isinstance(body, NamesForgotten) and instance in self._gates:
            self.gate(instance).forget_ended()
        return ()

    async def close(self) -> None:
        """End all runs: each one's gate hears of it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --------------------------------------------------------------------------------------------------------- inside

    def _hear_step(self, body: TransferStep, header: Header) -> None:
        if header.i not in self.instances():
            return
        gate = self.gate(header.i)
        record = gate.find(body.request_hash)
        run = self._runs.get(record) if record is not None else None
        if record is not None and (record.transfer == body.transfer or (not record.ended and not record.transfer)):
            record.step = body.step
        elif body.step != "accepted":
            return
        elif record is None or record.ended:
            gate.show(self._foreign(header, body.request_hash, body.transfer))
        elif run is not None and run.move(body.transfer, header.c):
            record.step = body.step

    def _hear_outcome(self, body: TransferOutcome, header: Header) -> None:
        if body.destination not in self.instances():
            return
        gate = self.gate(body.destination)
        record = gate.find(body.request_hash)
        if record is None:
            record = self._foreign(header, body.request_hash, body.transfer)
            gate.show(record)
        if run := self._runs.get(record):
            run.hear(body, header.c)
        elif not record.ours and record.transfer == body.transfer and record.outcome is None:
            record.source, record.status = body.source, outcome_status(body)
            record.reason, record.outcome = body.reason, body
            self._ended(record)

    def _foreign(self, header: Header, request_hash: str, transfer: str) -> Record:
        """Return a record of what others asked for: it can be looked at, and stands in nobody's way."""
        record = Record(request_hash, "", header.i, "", self._clock(), header.t / 1e9, ours=False, transfer=transfer)
        record.status, record.step = "running", "accepted"
        record.member, record.epoch = header.m, header.e
        return record

    def _lose(self, header: Header) -> None:
        """End what others asked a run for that has ended: where it is taken up again, that is another transfer."""
        for record in self.gate(header.i).left_open(header.m, header.e):
            if record not in self._runs:
                record.status = "failed"
                record.reason = f"{header.i}/{header.m} started anew, and its last run told no end of this"
                self._ended(record)

    def _ended(self, record: Record) -> None:
        self._runs.pop(record, None)
        for over in self._waited.pop(record, ()):
            if not over.done():
                over.set_result(None)

    def _forget_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a transfer's task failed", exc_info=error)


async def _taken(run: Run) -> Taken:
    """Wait until the destination has spoken; raise its Problem where it does not take the request on."""
    await asyncio.wait({run.taken})  # not awaited itself: a caller that goes away must not cancel it for the others
    taken = run.taken.result()
    if taken.problem is not None:
        raise taken.problem
    return taken


def _answered(status: str, record: Record, reason: str = "") -> Answered:
    return Answered(status, record.request_hash, record.destination, record.transfer, reason)
