"""What every story does: ask for transfers, count how they end, compare answers, await that all came home, audit."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from subprocess import Popen
from typing import TypeVar

from kvbus.commands.common import EXIT_CONFIG
from kvbus.engines.toy import ToyEngine, ToyOptions
from tests.cluster.stack import COMMAND_S, Document, Stack, StackError, document
from tests.cluster.table import Row
from tests.waiting import wait_until

T = TypeVar("T")
WHOLE = ToyOptions()
"""The engine of an instance with one rank."""
BLOCK = WHOLE.block_tokens
ANSWER_TOKENS = 4
"""As many as inside.py asks for."""
HEALTHY_S = 60.0
"""A worker registers within seconds; a machine with two busy cores may take ten times that."""
REST_S = 120.0
"""The longest that a lease may stay out after a fault: a budget of 60 s, then releases that are repeated each 10 s."""
OWED = (
    "pages_writing",
    "pages_quarantined",
    "leases_held",
    "leases_retained",
    "releases_unconfirmed",
    "transfers_running",
    "inflight",
)
"""The counters that are 0 while nothing is going on."""
BUDGET_S = 60
"""For each transfer: a request whose destination died is offered again after 10 s, and a container starts for some."""
TRIES = 3
"""An election among brokers takes less than the 5 s for which a command waits, or on a busy machine some more."""
BROKER_AWAY = ("bus_unavailable:",)
"""How a refusal begins where an instance cannot ask the broker while it elects, or has no room for facts."""
HOPEFUL = ("accepted", "deduped")
"""Verdicts that an outcome follows; it is told once, and lost with a connection: whoever asks again hears it."""
RECORDED_S = 20.0
"""Until facts are stored that waited for a broker that has just come back."""
AGAIN_S = 30.0
"""So long a person goes on asking, however quick the tries are: registrations come back with the second heartbeat."""
RAN_ANEW = "has run anew since"
"""The audit's words for a lease of a run that is over: its pool went with it, so nothing is kept from anybody."""
ORDERS = "ucx_submissions"
"""The counter of orders to read pages, where all of them go by UCX."""
NEVER_BEGAN = "never_began"
"""Evidence of a kind too: a request that was refused has lent nothing."""
PAUSE_S = 0.2
"""Between two looks at a container: what is awaited here takes seconds."""
MOVING_S = 30.0
"""From the request to the first moved page: the source computes the prompt first."""


def prompt(blocks: int) -> str:
    """Return a text that nobody asked about before: so many whole blocks, and a few letters more."""
    pick = random.SystemRandom()
    return "".join(pick.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(blocks * BLOCK + 3))


def expected(text: str, options: ToyOptions) -> list[int]:
    """Return the tokens that follow, computed here by an engine that never saw a page."""
    engine = ToyEngine(options)
    run = engine.resume(engine.tokenize(text), [], lambda: False)
    return [token for _ in range(ANSWER_TOKENS) if (token := run.next_token()) is not None]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way: the words of the command, and the process that runs it."""

    words: tuple[str, ...]
    process: "Popen[str]"


def _out(audit: Document) -> list[Document]:
    """Return the leases that are still out at members that run, as an audit tells them."""
    return [one for one in audit["out"] if RAN_ANEW not in one["why"]]


class Actors:
    """The people of one story; everything that they see goes into its row."""

    def __init__(self, stack: Stack, row: Row) -> None:
        self.stack = stack
        self.row = row

    # ------------------------------------------------------------------------------------------------------ transfers

    def ask(self, source: str, destination: str, text: str) -> Asked:
        """Ask for a transfer, and return at once."""
        words = ("stage", "--from", source, "--to", destination, "--budget", str(BUDGET_S), text)
        return Asked(words, self.stack.start_kvbus(*words))

    def await_end(
        self, asked: Asked, *, may_be_refused: tuple[str, ...] = (), again: tuple[str, ...] = BROKER_AWAY
    ) -> str:
        """Await how a transfer ended, count it, and return the word for it.

        Who is told that the broker does not answer, by it or by the instance, asks again: no transfer has begun.
        `may_be_refused`: parts of reasons that count as an end too, since no transfer began.
        """
        self.row.transfers += 1
        try:
            told = self._answer(asked, again)
            if told["outcome"] is None and any(part in told["reason"] for part in may_be_refused):
                self.row.failed += 1
                self.row.evidence.append(NEVER_BEGAN)
                self.row.notes.append(f"{told['verdict']}: {told['reason']}")
                return str(told["verdict"])
            return self._count(told)
        except StackError as error:
            self.row.lost += 1
            self.row.problems.append(f"a transfer ended with no word: {error}")
            return "lost"

    def _answer(self, asked: Asked, again: tuple[str, ...] = BROKER_AWAY) -> Document:
        process, tries = asked.process, 1
        ends_at = time.monotonic() + AGAIN_S
        while tries < TRIES or time.monotonic() < ends_at:
            try:
                told = document(process, COMMAND_S)
                is_unheard = told["verdict"] in HOPEFUL and told["outcome"] is None
                is_passing = told["verdict"] == "refused" and told["reason"].startswith(again)
                if not is_unheard and not is_passing:
                    return told
                why = told["reason"] or f"{told['verdict']}, and no outcome"
            except StackError as error:
                if error.status != EXIT_CONFIG:
                    raise
                why = str(error)
            self.row.notes.append(f"asked again, after {why}")
            process, tries = self.stack.start_kvbus(*asked.words), tries + 1
        return document(process, COMMAND_S)

    def _count(self, told: Document) -> str:
        outcome = told["outcome"]
        if outcome is None:
            self.row.lost += 1
            self.row.problems.append(f"{told['verdict']}: {told['reason']}, and no outcome")
            return "lost"
        self.row.evidence += outcome["evidence"]
        self.row.ids.append(outcome["transfer"])
        if outcome["outcome"] == "settled":
            self.row.settled += 1
            self.row.move_s.append(outcome["move_s"])
        elif outcome["failure"] and outcome["evidence"]:
            self.row.failed += 1
            self.row.notes.append(f"{outcome['failure']}: {outcome['reason']} ({', '.join(outcome['evidence'])})")
        else:
            self.row.lost += 1
            self.row.problems.append(f"{outcome['outcome']} {outcome['failure']} {outcome['reason']}, no evidence")
        return str(outcome["outcome"])

    def transfer(self, source: str, destination: str, text: str) -> str:
        """Ask for a transfer and await its end."""
        return self.await_end(self.ask(source, destination, text))

    def until_moving(self, destination: str, asked_before: int) -> None:
        """Return once pages come in at a destination, for one transfer more than the `orders` that it had before."""
        words = ("moving", ORDERS, str(asked_before + 1))
        self.until(lambda: self.stack.ask(destination, *words)["moving"], MOVING_S, f"{destination} reads pages")

    def orders(self, destination: str) -> int:
        """Return how many orders to read pages this destination gave so far."""
        return self.counter(destination, ORDERS)

    def counter(self, service: str, name: str) -> int:
        """Return one counter of a worker; 0 for what was not counted yet."""
        return int(self.stack.ask(service, "counters").get(name, 0))

    def until_counted(self, service: str, name: str, least: int, wait_s: float = REST_S) -> None:
        """Return once a counter of a worker has come so far."""
        self.until(
            lambda: self.stack.ask(service, "reached", name, str(least)).get(name, 0) >= least,
            wait_s,
            f"{service} counts {least} {name}",
        )

    def until_settled_unheard(self, destination: str, settled_before: int) -> None:
        """Await that a transfer settles whose requester does not hear it, and count it."""
        self.row.transfers += 1
        try:
            self.until_counted(destination, "transfers_settled", settled_before + 1)
            self.row.settled += 1
        except AssertionError as error:
            self.row.lost += 1
            self.row.problems.append(str(error))

    def refuse(self, source: str, destination: str, text: str, part: str) -> None:
        """Ask for a transfer that has to be refused, or to fail, with a reason that holds these words."""
        told = self._answer(self.ask(source, destination, text))
        outcome = told["outcome"] or {}
        reason = f"{told['verdict']} {told['reason']} {outcome.get('failure', '')} {outcome.get('reason', '')}"
        self.row.check(part in reason, f"expected a refusal that says {part!r}, got: {reason}")
        self.row.notes.append(f"refused, as it must be: {reason.strip()}")

    # ------------------------------------------------------------------------------------------------------- answers

    def compare(self, service: str, text: str, *, from_pages: bool, options: ToyOptions = WHOLE) -> int:
        """Ask a worker about a prompt, and compare its answer with the engine's own; `options` name its rank.

        Returns how many of the prompt's tokens came from pages.
        """
        answer = self.stack.ask(service, "answer", text)
        self.row.answers += 1
        self.row.wrong += answer["tokens"] != expected(text, options)
        held = int(answer["cached_tokens"])
        if from_pages:
            self.row.check(held, f"{service} answered without a page, although its transfer had settled")
        return held

    # ------------------------------------------------------------------------------------------------------- waiting

    def until_healthy(self, services: Sequence[str]) -> None:
        """Return once these containers pass their own health checks."""
        for service in services:
            self.until(partial(self.stack.is_well, service), HEALTHY_S, f"{service} is healthy")

    def until_home(self, services: Sequence[str]) -> None:
        """Await that nothing is out at these workers, and count what stays out as leaked."""
        for service in services:
            try:
                self.until(partial(self._is_home, service), REST_S, f"{service} has all pages home")
            except AssertionError:
                owed = self._owed(service)
                self.row.leaked += sum(owed.values())
                self.row.problems.append(f"{service} still owes {owed}")

    def tell(self) -> None:
        """Keep the story of one transfer: the one that the fault met."""
        told = self.row.shown or next(iter(self.row.ids), "")
        if told:
            words = ("env", "COLUMNS=118", "kvbus", "story", told)
            text = self._answered(lambda: self.stack.tool(*words), "the story is told")
            self.row.trail = [line.rstrip() for line in text.splitlines()]

    def judge(self) -> None:
        """Have kvbus audit what the broker holds; what is still out counts as leaked."""
        verdicts: list[Document] = []

        def is_clean() -> bool:
            verdicts.append(self.stack.kvbus("audit"))
            return verdicts[-1]["verdict"] == "clean" and not _out(verdicts[-1])

        with contextlib.suppress(AssertionError):  # then the last verdict says what is wrong
            self.until(is_clean, RECORDED_S, "the audit is clean")
        verdict = verdicts[-1] if verdicts else self._answered(lambda: self.stack.kvbus("audit"), "an audit is made")
        self.row.audit = verdict["verdict"]
        self.row.leaked += len(_out(verdict))

    def check_kept(self, lender: str, reader: str) -> None:
        """Check that a lender keeps what a silent reader may still read, and that the audit names it."""
        held = self.stack.ask(lender, "counters")["leases_held"]
        self.row.check(held == 1, f"{lender} holds {held} leases, expected that of {reader} and no other")
        out = _out(self.stack.kvbus("audit"))
        holders = [one["lease"]["instance"] for one in out]
        self.row.check(holders == [lender], f"the audit names leases of {holders} as out, expected one of {lender}")
        self.row.notes += [
            f"kept by {lender}: {one['direction']} {len(one['pages'])} pages, {one['why']}" for one in out
        ]

    def _is_home(self, service: str) -> bool:
        return not self._owed(service)

    def _owed(self, service: str) -> dict[str, int]:
        counters = self.stack.ask(service, "counters")
        pages = {"pages_away": counters["pages"] - counters["pages_free"] - counters["pages_cached"]}
        return {name: int(n) for name, n in ({k: counters[k] for k in OWED} | pages).items() if n}

    def _answered(self, ask: Callable[[], T], what: str) -> T:
        """Return what is answered; a broker that has just come back may break off once or twice."""
        found: list[T] = []

        def has_answered() -> bool:
            found.append(ask())
            return True

        self.until(has_answered, REST_S, what)
        return found[0]

    @staticmethod
    def until(holds: Callable[[], object], wait_s: float, what: str) -> None:
        """As `wait_until`, but a container that does not answer yet is no end of the waiting.

        Each look starts a process or two, so there is a pause between them: containers want the processor too.
        """
        never_set = threading.Event()

        def asked() -> object:
            try:
                answer = holds()
            except (StackError, OSError, LookupError):  # nobody listens yet, or an election goes on
                answer = False
            return answer or never_set.wait(PAUSE_S)

        wait_until(asked, wait_s, what)
