"""What becomes of requests whose member leaves: none is lost, none is run against a cancel, none is blamed for it."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvbus.events import (
    Event,
    InstanceRecord,
    PrefixAsked,
    TransferRequested,
    TransferStep,
    TransferVerdict,
    decode_all,
)
from kvbus.handles import Verdict
from kvbus.ledger.admission import AdmissionGate
from kvbus.ledger.agreement import Agreement
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Fact
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.transfer import Phase, Transfer
from kvbus.ledger.types import Direction
from kvbus.names import NAME_LENGTH_BYTES, request_hash
from kvbus.parts import Prompt
from kvbus.patience import may_pass
from kvbus.prefixes import NAMES_LENGTH_MAX_BYTES
from kvbus.processes import identity
from kvbus.roles.admitting import HANDED_BACK, LEFT, TRIES_MAX, Offer, left_step
from kvbus.roles.asking import Asker
from kvbus.roles.destination import Destination
from kvbus.roles.past import Past
from kvbus.roles.poolside import PoolSide
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Registered
from kvbus.roles.results import Results
from kvbus.roles.rounds import Rounds
from kvbus.roles.running import ReaderSide, Running
from kvbus.roles.tokens import names_answered
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.testing.ledger_parts import ManualBackend
from kvbus.topics import Topics
from tests.unit.pool_parts import EPOCH, TOY, fill, names_of

TOPICS = Topics()
NOW_S = 1_000.0
WAITS_S = 100.0
"""Longer than a request allows."""
SOURCE = Registered(
    "a",
    "m0",
    7,
    InstanceRecord(
        verify_key=b"\x07" * 32,
        fingerprint="f" * 32,
        model="toy",
        engine="toy",
        block_tokens=4,
        ranks=1,
        page_bytes=64,
        pages=8,
        process=identity(),
        transports=("memory",),
        version="0.1.0",
    ),
)
STOPPING = "draining: b is shutting down"


def request(number: int = 1) -> TransferRequested:
    prompt = Prompt(tokens=b"\0\0\0\0" * 8)
    hash_ = request_hash(model="", salt="", source="a", prompt=prompt.canonical())
    return TransferRequested(
        request_id=f"r.{number}", request_hash=hash_, requester="r", source="a", destination="b", prompt=prompt
    )


@dataclass
class Reader:
    """One run of a destination's member, with all of its parts but an engine and a data plane."""

    bus: MemoryBus
    epoch: int = EPOCH
    group: SimpleNamespace | None = None
    """The other members, where it has some."""

    def __post_init__(self) -> None:
        self.pool = PoolSide.create(TOY, pages=16, tokens_max=32, vocab_size=100, epoch=self.epoch)
        self.recorder = Recorder(
            bus=self.bus, topics=TOPICS, instance="b", member="m0", epoch=self.epoch, unix_ns=lambda: int(NOW_S * 1e9)
        )
        holder = LeaseHolder(
            bindings=[Binding("pull", ManualBackend("pull"), Direction.WRITE)], lenders=[self.pool.lender]
        )
        rounds = Rounds(
            holder=holder, agreement=Agreement(term=self.epoch), sink=self.recorder, member="m0", epoch=self.epoch
        )
        asker = Asker(bus=self.bus, topics=TOPICS, recorder=self.recorder, pause_s=1.0, clock=lambda: NOW_S)
        self.side = ReaderSide(
            instance="b",
            member="m0",
            epoch=self.epoch,
            process=identity(),
            binding="pull",
            transports=("memory",),
            pool=self.pool,
            rounds=rounds,
            asker=asker,
            recorder=self.recorder,
            lend_wait_s=1.0,
            clock=lambda: NOW_S,
            group=self.group,  # only whether it leads is asked
        )
        self.past = Past(self.bus, TOPICS, "b", lambda: NOW_S)
        self.results = Results(bus=self.bus, topics=TOPICS, recorder=self.recorder)
        self.destination = Destination(
            side=self.side,
            gate=AdmissionGate(instance="b", source_allow=("a",), inflight_max=4, dedup_ttl_s=60.0, entries_max=100),
            results=self.results,
            bus=self.bus,
            tokenizer=self,
            past=self.past,
        )

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        raise AssertionError(f"there is no engine for {prompt}")

    def begin(self, asked: TransferRequested) -> Running:
        """Let a transfer begin whose request came from the queue, and be where its pages are being read."""
        transfer = Transfer("b-1", asked.request_hash, "a", NOW_S, 30.0)
        destination = self.destination
        running = Running(self.side, asked, transfer, destination._index, destination._on_ended, queued=True)
        running.source, running.nonce = SOURCE, b"n" * 16
        self.results.open("b-1")
        destination._running["b-1"], destination._by_hash[asked.request_hash] = running, "b-1"
        transfer.resolved(NOW_S, prompt_tokens=32, blocks_wanted=8, blocks_held=0, prefix_held=0)
        transfer.leased(NOW_S, {1: 0})
        transfer.granted(NOW_S, 8)
        assert transfer.phase is Phase.MOVING
        return running

    async def answer(self, asked: TransferRequested, *, number: int, waited_s: float = 0.0) -> TransferVerdict:
        verdict, _ = await self.destination.request(asked, Offer(NOW_S, waited_s, number, queued=True))
        return verdict

    async def steps(self) -> list[str]:
        """The steps that it has recorded, once the broker has them."""
        recording = asyncio.create_task(self.recorder.run())
        assert await self.recorder.flush(10.0)
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
        found = await self.bus.history(TOPICS.facts("b"))
        events = [event for delivery in found for event in decode_all(delivery.data)]
        bodies = [event.body for event in events if isinstance(event, Event)]
        return [body.step for body in bodies if isinstance(body, TransferStep)]


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBroker().connect()


async def stopped(reader: Reader, *, cancelled: bool = False, fault: bool = False) -> TransferRequested:
    """A request whose transfer a stop has ended, after a cancel that came while it was stopping, or without one."""
    asked = request()
    running = reader.begin(asked)
    reader.destination.stop(STOPPING, fault=fault)
    assert running.transfer.phase is Phase.STOPPING
    if cancelled:
        assert reader.destination.cancel(asked.request_hash, "cancelled by r", said_unix_s=NOW_S)
    running.on_line(1, int(Fact.ACCESS_ENDED | Fact.RETURNED), 0, 0)
    assert running.concluded
    await reader.side.asker.close()  # nobody is there to be told that access has ended
    return asked


# P22
async def test_what_a_user_cancels_while_its_member_stops_has_ended_and_is_not_run_again(bus: MemoryBus) -> None:
    reader = Reader(bus)
    asked = await stopped(reader, cancelled=True)
    assert not reader.results.is_handed_back("b-1")
    await reader.steps()
    outcome = await Past(bus, TOPICS, "b", lambda: NOW_S).outcome(asked.request_id)
    assert outcome is not None
    assert (outcome.outcome, outcome.failure, outcome.reason) == ("cancelled", "cancelled", "cancelled by r")


# P22, P23
@pytest.mark.parametrize("fault", [False, True])
async def test_a_request_is_handed_back_for_nothing_by_a_stop_and_for_one_of_its_tries_by_a_fault(
    bus: MemoryBus,
    fault: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    reader = Reader(bus)
    asked = await stopped(reader, fault=fault)
    assert reader.results.is_handed_back("b-1")
    assert (await reader.steps()).count(HANDED_BACK) == (not fault)
    following = Reader(bus, EPOCH + 1)
    verdict = await following.answer(asked, number=TRIES_MAX + 1)
    outcome = following.results._outcomes.get(verdict.transfer)
    if fault:  # as many runs have taken it, and broke
        assert outcome is not None
        assert outcome.failure == "exhausted"
    else:
        assert outcome is None
        assert verdict.reason.startswith("no instance 'a'")  # it would be run


async def test_a_request_that_was_accepted_in_time_is_not_refused_for_its_wait_after_a_hand_back(
    bus: MemoryBus,
) -> None:
    reader = Reader(bus)
    asked = await stopped(reader)
    await reader.steps()
    following = Reader(bus, EPOCH + 1)
    late = await following.answer(request(2), number=2, waited_s=WAITS_S)
    assert late.reason.startswith("waited: ")
    assert may_pass(Verdict(late.verdict, late.reason), None)
    again = await following.answer(asked, number=2, waited_s=WAITS_S)
    assert again.reason.startswith("no instance 'a'")


async def test_a_member_that_does_not_lead_says_so_in_a_word_by_which_patience_knows_that_it_passes(
    bus: MemoryBus,
) -> None:
    reader = Reader(bus, group=SimpleNamespace(leads=False))
    verdict = await reader.answer(request(), number=1)
    assert verdict.reason == "not_leading: m0 does not lead b now; ask again"
    assert may_pass(Verdict(verdict.verdict, verdict.reason), None)


# P23
async def test_offers_that_were_left_by_runs_that_rest_spend_no_try(bus: MemoryBus) -> None:
    reader, asked = Reader(bus), request()
    for sequence in range(2):
        reader.recorder.event(left_step(asked.request_hash, sequence))
    assert await reader.steps() == [LEFT] * 2
    following = Reader(bus, EPOCH + 1)
    assert await following.destination.left_before(asked.request_hash) == 2
    assert await following.destination.left_before("f" * 32) == 0
    assert (await following.answer(asked, number=TRIES_MAX + 2)).reason.startswith("no instance 'a'")
    spent = await following.answer(asked, number=TRIES_MAX + 3)
    assert following.results._outcomes[spent.transfer].failure == "exhausted"


def test_a_prefix_of_more_blocks_than_an_answer_can_name_is_refused_in_words() -> None:
    most = NAMES_LENGTH_MAX_BYTES // NAME_LENGTH_BYTES
    pool = PoolSide.create(TOY, pages=16, tokens_max=32, vocab_size=100, epoch=EPOCH)
    fill(pool.lender, names_of(1))
    names = names_of(1) + tuple(number.to_bytes(NAME_LENGTH_BYTES, "big") for number in range(most))
    pool.prompts.note(names, "salt")
    fingerprint = pool.layout.fingerprint()
    longest = names_answered(pool, PrefixAsked(name=names[most - 1], fingerprint=fingerprint), "a")
    assert longest is not None
    assert len(longest.names) == NAMES_LENGTH_MAX_BYTES
    answer = names_answered(pool, PrefixAsked(name=names[most], fingerprint=fingerprint), "a")
    assert answer is not None
    assert answer.refusal == f"the prefix has {most + 1} blocks, and an answer names at most {most}"
