"""Members of one instance over one bus, with real leases: what each does when, and who may still act after its end.

Time stands still unless a test moves it, and members take their turns when a test lets them.
"""

import asyncio

from kvbus.bus_assets import Assets
from kvbus.events import HeartbeatSeen, encode
from kvbus.ledger.agreement import Agreement, Decision
from kvbus.ledger.attendance import GONE_S, TURN_S
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Evidence, Fact, FailureClass, LeaseFacts
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.shares import Share, ShareStage
from kvbus.ledger.types import Delivered, Direction, SubmitMode
from kvbus.roles.council import REFRESH_S, InstanceCouncil, Place
from kvbus.roles.recorder import Recorder
from kvbus.roles.rounds import Rounds
from kvbus.speaking import Speaker
from kvbus.testing.bus import MemoryBroker
from kvbus.testing.ledger_parts import ListedLender, ManualBackend
from kvbus.topics import Topics
from tests.waiting import until

TOPICS = Topics()
SUBJECT = TOPICS.settle("i")
RANKS = {"m0": 0, "m1": 1}
PULL = SubmitMode("pull", Direction.WRITE)
WHOLE = Delivered((True, True), 2)


class Sink:
    """Records nothing."""

    def facts(self, facts: LeaseFacts) -> None:
        del facts

    def decision(self, decision: Decision) -> None:
        raise AssertionError(f"decided in process, where several members agree: {decision}")


class Seat:
    """One run of one member: its council, its leases, and what it was asked to carry out."""

    def __init__(self, house: "House", name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.bus = house.broker.connect()
        self.lender, self.backend = ListedLender(), ManualBackend("pull")
        holder = LeaseHolder(bindings=[Binding("pull", self.backend, Direction.WRITE)], lenders=[self.lender])
        self.rounds = Rounds(holder=holder, agreement=Agreement(term=1), sink=Sink(), member=name, epoch=epoch)
        recorder = Recorder(
            bus=self.bus, topics=TOPICS, instance="i", member=name, epoch=epoch, unix_ns=lambda: int(house.now * 1e9)
        )
        self.recorder = recorder
        self.council = InstanceCouncil(
            place=Place("i", name, epoch, RANKS),
            bus=self.bus,
            topics=TOPICS,
            recorder=recorder,
            holder=holder,
            run_rounds=self.rounds.run,
            clock=lambda: house.now,
        )
        self.council.carrier = self
        self.rounds.group = self.council
        self.begun: list[str] = []
        self.stopped: list[str] = []
        self.ended: dict[str, ShareStage] = {}

    def begin_share(self, share: Share, coordinator: str) -> None:
        self.begun.append(f"{share.transfer} of {coordinator}")

    def stop_share(self, share: Share, reason: str) -> None:
        self.stopped.append(f"{share.transfer}: {reason}")

    def share_over(self, share: Share, reason: str) -> None:
        del reason
        self.ended[share.transfer] = share.stage

    def lease(self, transfer: str = "t") -> int:
        """Lease two pages for a transfer, and let their attempt begin."""
        ticket = self.rounds.holder.take(
            self.lender.lend(Direction.WRITE, 2), PULL, "grant", now=0.0, peer="a", transfer=transfer
        )
        self.council.leased(transfer, ticket)
        self.rounds.run()
        return ticket

    def arrive(self, ticket: int) -> None:
        self.backend.answer(ticket, WHOLE, Evidence.COMPLETED)
        self.rounds.run()

    async def beat(self) -> None:
        """Send a heartbeat with the place in the log, as presence does."""
        term, n = self.council.book.place
        body = HeartbeatSeen(
            transfers_running=0,
            leases_held=0,
            pages_free=0,
            pages_cached=0,
            pages_lent=0,
            facts_sequence=0,
            settle_term=term,
            settle_n=n,
        )
        await self.bus.publish(TOPICS.heartbeat("i"), encode(self.recorder.header(body.KIND), body))

    async def turn(self) -> None:
        await self.council._turn()


class House:
    """An instance with two members."""

    def __init__(self) -> None:
        self.now = 100.0
        self.broker = MemoryBroker()
        self.seats: dict[str, Seat] = {}

    async def start(self, name: str, epoch: int) -> Seat:
        """Start a member, or its next run; whoever listened under that name hears nothing any more."""
        if old := self.seats.get(name):
            await old.bus.close()
        seat = self.seats[name] = Seat(self, name, epoch)
        await seat.council.listen()
        return seat

    async def settle_down(self, *names: str, turns: int = 6) -> None:
        """Let these members beat and take turns until what they told each other has arrived."""
        for _ in range(turns):
            for name in names or tuple(self.seats):
                seat = self.seats[name]
                if seat.bus.connected:
                    await seat.beat()
                await self._arrived()
                await seat.turn()
                await self._arrived()

    async def _arrived(self) -> None:
        queues = [listener.queue for listener in self.broker.listeners]
        await until(lambda: all(queue.empty() for queue in queues))

    @property
    def kinds(self) -> list[str]:
        """What stands in the log, in its order."""
        seat = next(iter(self.seats.values()))
        log = self.broker.logs[1].select(SUBJECT, 0)
        return [f"{one.kind} {one.term}" for message in log for one in seat.council._log._decisions_in(message)]


async def led() -> tuple[House, Seat, Seat]:
    """Return two members of which m0 leads."""
    house = House()
    first, second = await house.start("m0", 10), await house.start("m1", 11)
    await house.settle_down()
    house.now += TURN_S
    await house.settle_down()
    assert first.council.leads
    assert not second.council.leads
    return house, first, second


async def opened(house: House, first: Seat, second: Seat) -> tuple[int, int]:
    """Open t over both, and return the tickets under which they leased its pages."""
    opening = asyncio.get_running_loop().create_task(
        first.council.open("t", house.now + 60.0, wait_s=5.0),
    )
    await until(lambda: first.council._waiting)
    await house.settle_down()
    assert await opening == ""
    assert second.begun == ["t of m0"]
    return first.lease(), second.lease()


# ---------------------------------------------------------------------------------------------------- a transfer's life


# P10, R6
async def test_leases_go_back_when_all_members_have_promised_and_not_before() -> None:
    house, first, second = await led()
    ticket, theirs = await opened(house, first, second)
    first.arrive(ticket)
    await house.settle_down()
    assert first.rounds.holder.tickets() == {ticket}
    second.arrive(theirs)
    second.bus.cut()
    await house.settle_down("m0")
    assert first.rounds.holder.tickets() == {ticket}
    second.bus.restore()
    await house.settle_down("m1", "m0", turns=2)
    await house.settle_down()
    assert first.ended == second.ended == {"t": ShareStage.VISIBLE}
    assert not first.rounds.holder.tickets()
    assert not second.rounds.holder.tickets()
    assert len(first.lender.content) == len(second.lender.content) == 2
    assert house.kinds[-3:] == ["open 2", "settle 2", "visible 2"]


# P11, P10
async def test_where_one_member_gives_up_no_other_keeps_what_arrived() -> None:
    house, first, second = await led()
    ticket, theirs = await opened(house, first, second)
    first.arrive(ticket)
    second.rounds.holder.abandon(theirs, FailureClass.DEADLINE, "too late")
    second.backend.end(theirs)
    second.rounds.run()
    await house.settle_down()
    assert first.ended == second.ended == {"t": ShareStage.VOID}
    assert not first.rounds.holder.tickets()
    assert not first.lender.content
    assert not second.lender.content


async def test_a_void_waits_for_the_end_of_access_before_pages_go_back() -> None:
    house, first, second = await led()
    ticket, theirs = await opened(house, first, second)
    first.council.refuse("t", "no reason")  # it has leased: this says nothing
    second.rounds.holder.abandon(theirs, FailureClass.DEADLINE, "too late")
    second.rounds.run()
    await house.settle_down()
    assert second.ended == {"t": ShareStage.VOID}
    assert second.rounds.holder.tickets() == {theirs}
    assert first.rounds.holder.bits(ticket) & Fact.ABANDONED
    for seat, own in ((first, ticket), (second, theirs)):
        seat.backend.end(own)
        seat.rounds.run()
        assert not seat.rounds.holder.tickets()


async def test_a_cancel_reaches_every_members_share() -> None:
    house, first, second = await led()
    await opened(house, first, second)
    assert first.council.cancel("t", "no longer wanted")
    assert not second.council.cancel("t", "not the one that leads")
    await house.settle_down()
    assert first.stopped == second.stopped == ["t: no longer wanted"]
    assert first.council.is_open("t")


async def test_a_lease_of_no_transfer_waits_for_nobody() -> None:
    _, first, _ = await led()
    ticket = first.rounds.holder.take(first.lender.lend(Direction.WRITE, 2), PULL, "grant", now=0.0, peer="engine")
    first.rounds.run()
    first.arrive(ticket)
    assert not first.rounds.holder.tickets()


# --------------------------------------------------------------------------------------------------------- who may lead


# P13
async def test_two_members_that_try_to_lead_at_once_end_with_one_that_does() -> None:
    house = House()
    first, second = await house.start("m0", 10), await house.start("m1", 11)
    house.now += 10 * TURN_S  # neither has heard of the other, and both have waited long enough
    await asyncio.gather(first.turn(), second.turn())
    await house.settle_down()
    assert [first.council.leads, second.council.leads].count(True) == 1
    assert first.council.book.coordinator == second.council.book.coordinator


# P13
async def test_who_does_not_lead_opens_nothing() -> None:
    house, _, second = await led()
    assert await second.council.open("t", house.now + 60.0, wait_s=5.0) == "m1 does not lead i now"


# P13
async def test_a_coordinator_that_was_replaced_finds_out_when_it_would_decide_and_follows() -> None:
    house, first, second = await led()
    ticket, theirs = await opened(house, first, second)
    first.arrive(ticket)
    second.arrive(theirs)
    await second.turn()
    await house._arrived()  # m0 knows now that both have their pages
    first.bus.connected = False  # nothing reaches m0, and it does not know
    house.now += GONE_S + 3 * TURN_S
    await house.settle_down("m1", turns=12)
    assert house.kinds[-1].startswith("term")
    first.bus.connected = True
    deciding = house.kinds
    await first.turn()
    assert not first.council.leads
    assert house.kinds == deciding  # nothing of it got in
    await house.settle_down("m1", "m0")
    assert second.council.leads
    assert first.council.book.coordinator == ("m1", 11)
    assert first.ended == second.ended
    assert len(first.ended) == 1


# P13
async def test_a_transfer_that_waits_to_be_opened_hears_that_another_leads() -> None:
    house, first, second = await led()
    opening = asyncio.get_running_loop().create_task(first.council.open("t", house.now + 60.0, wait_s=5.0))
    await until(lambda: first.council._waiting)
    await second.council._lead(9)
    await first.turn()
    assert await opening == "another member leads now"
    assert not first.council.leads


async def test_a_transfer_that_cannot_be_opened_in_time_says_who_is_not_there() -> None:
    house, first, _ = await led()
    house.seats["m1"].bus.cut()
    house.now += GONE_S + 1
    await house.settle_down("m0")
    assert first.council.leads
    opening = first.council.open("t", house.now + 60.0, wait_s=0.01)
    assert await opening == "not opened in time: m1 is not there"


# P15, contract 48
async def test_a_member_that_starts_again_voids_what_its_last_run_shared() -> None:
    house, first, second = await led()
    ticket, theirs = await opened(house, first, second)
    first.arrive(ticket)
    second.arrive(theirs)
    again = await house.start("m1", 12)
    await house.settle_down()
    assert first.ended == {"t": ShareStage.VOID}
    assert not first.lender.content
    assert again.council.book.place == first.council.book.place
    assert not again.begun


# P14
async def test_the_record_of_the_term_is_written_again_after_a_while() -> None:
    house, first, second = await led()
    before = house.kinds
    house.now += REFRESH_S
    await house.settle_down()
    assert house.kinds == [*before, before[0]]
    assert first.council.leads
    assert second.council.book.place == first.council.book.place


# P13, P15
async def test_terms_of_two_members_never_have_one_number() -> None:
    for members in ((("m0", 10), ("m1", 11)), (("m1", 11), ("m0", 10))):
        terms: dict[str, int] = {}
        for name, epoch in members:
            house = House()  # a log of its own: the other's was lost
            seat = await house.start(name, epoch)
            await seat.council._lead(1)
            terms[name] = seat.council.book.term
        assert terms["m0"] != terms["m1"]


# ------------------------------------------------------------------------------------------------------------ listening


# P25
async def test_a_heartbeat_makes_a_follower_read_what_no_live_repeat_told_it() -> None:
    house, first, second = await led()
    await opened(house, first, second)
    assert first.council.cancel("t", "no longer wanted")
    listeners, house.broker.listeners = house.broker.listeners, []
    await first.turn()
    house.broker.listeners = listeners
    await second.turn()
    assert not second.stopped
    await house.settle_down("m0", turns=1)
    await second.turn()
    assert second.stopped == ["t: no longer wanted"]


# contract 44
async def test_what_strangers_and_other_instances_say_changes_nothing() -> None:
    house, first, second = await led()
    stranger = Seat(house, "m7", 70)
    stranger.council.book.term, stranger.council.book.n = 1_000, 1
    await stranger.beat()
    second.council.book.changed = True
    for sender, instance in ((stranger.recorder, "i"), (second.recorder, "other")):
        sender._speaker = Speaker(instance, sender._member, sender._epoch)
        await Seat.turn(second)
        await house.settle_down("m0", turns=1)
        second.council.book.changed = True
    await house.broker.connect().publish(TOPICS.shares("i"), b"\x00")
    await house.broker.connect().publish(TOPICS.heartbeat("i"), b"\x00")
    await house._arrived()
    assert first.council.statistics.malformed == 3
    assert first.council._log.told_term == first.council.book.term
    assert first.council._council is not None
    assert not first.council._council.outranked_by


async def test_a_broker_that_is_away_ends_no_turns() -> None:
    house, first, _ = await led()
    running = asyncio.get_running_loop().create_task(first.council.run())
    first.bus.cut()
    first.council.book.changed = True
    first.council._log.behind = True
    first.council._wake.set()
    await until(lambda: not first.council._wake.is_set())
    first.bus.restore()
    second = house.seats["m1"]
    ready = asyncio.get_running_loop().create_task(second.council.run())
    opening = await first.council.open("t", house.now + 60.0, wait_s=10.0)
    assert opening == ""
    await until(lambda: second.begun)
    for task in (running, ready):
        assert not task.done()
        task.cancel()
    await first.council.close()


def test_the_terms_record_is_renewed_well_before_the_log_forgets_it() -> None:
    # P14: the two numbers stand in different rings, and only together they mean something
    settle = next(stream for stream in Assets(TOPICS).streams() if stream["name"] == "KVB_SETTLE")
    kept_ns = settle["max_age"]
    assert isinstance(kept_ns, int)
    assert kept_ns / 1e9 >= 3 * REFRESH_S
