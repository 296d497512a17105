"""The engine's counter over a real pool and holder: what forgetting, fences and a longest prompt mean at it."""

import pytest

from kvbus.engines.desk import Allocated, Hello, Refusal
from kvbus.errors import BackendError, ConfigError, KvbusError, PeerError
from kvbus.ledger.agreement import Agreement, Decision
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import LeaseFacts
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Containment, Direction
from kvbus.pool.layout import PageLayout
from kvbus.processes import identity
from kvbus.roles.desk import PoolDesk
from kvbus.roles.local import LocalBackend
from kvbus.roles.poolside import PoolSide
from kvbus.roles.rounds import Rounds
from tests.unit.pool_parts import EPOCH, TOY

PAGES, LONGEST = 16, 8
IDS = tuple(range(LONGEST * TOY.block_tokens))
OTHER_IDS = tuple(reversed(IDS))


class Unheard:
    """Where facts go that nobody reads."""

    def facts(self, facts: LeaseFacts) -> None:
        assert facts

    def decision(self, decision: Decision) -> None:
        raise AssertionError(f"an engine's leases await no decision: {decision}")


class Counter:
    """A desk with its pool, as a worker has it once its engine has attached."""

    def __init__(self) -> None:
        self.pool = PoolSide.create(TOY, pages=PAGES, tokens_max=len(IDS), vocab_size=100, epoch=EPOCH)
        reads, writes = LocalBackend(name="engine-read"), LocalBackend(name="engine-write")
        self.holder = LeaseHolder(
            bindings=[
                Binding("engine-read", reads, Direction.READ, Containment.STOP_BINDING),
                Binding("engine-write", writes, Direction.WRITE, Containment.STOP_BINDING),
            ],
            lenders=[self.pool.lender],
        )
        rounds = Rounds(holder=self.holder, agreement=Agreement(term=EPOCH), sink=Unheard(), member="m0", epoch=EPOCH)
        self.desk = PoolDesk(
            attach=lambda _layout, _hello: self.pool,
            rounds=lambda: rounds,
            reads=reads,
            writes=writes,
            clock=lambda: 0.0,
            counters=dict,
        )
        layout: dict[str, object] = dict(TOY.to_plain())
        self.desk.welcome(Hello("toy", "1", "toy", "ab12", layout, 100, len(IDS), identity()))

    def stores(self, ids: tuple[int, ...], salt: str = "", first: int = 0) -> tuple[int, ...]:
        """Let the engine fill a prompt's blocks; return the pages."""
        handle = self.desk.match(ids, salt).handle
        allocated = self.desk.alloc(handle, first, len(ids) // TOY.block_tokens - first)
        assert isinstance(allocated, Allocated), allocated
        self.desk.commit(allocated.write)
        self.desk.release(handle)
        return allocated.pages

    def check(self) -> None:
        self.holder.check()
        self.pool.lender.check()


@pytest.fixture
def counter() -> Counter:
    return Counter()


def test_what_an_engine_computes_from_a_forgotten_prefix_gets_no_name(counter: Counter) -> None:
    # contract 24
    counter.stores(IDS[: 2 * TOY.block_tokens])
    matched = counter.desk.match(IDS, "")
    assert len(matched.pages) == 2
    assert counter.desk.forget() == 2
    refused = counter.desk.alloc(matched.handle, 2, 2)
    assert isinstance(refused, Refusal)
    assert "forgotten" in refused.text
    assert counter.pool.lender.statistics().reads == 1, "what it matched it may use up"
    counter.desk.release(matched.handle)
    assert counter.pool.allocator.statistics().free == PAGES
    counter.check()


def test_a_prompt_that_was_being_stored_when_names_were_forgotten_is_not_found(counter: Counter) -> None:
    # contract 24
    handle = counter.desk.match(IDS, "").handle
    allocated = counter.desk.alloc(handle, 0, 4)
    assert isinstance(allocated, Allocated)
    assert counter.desk.forget() == 0
    counter.desk.commit(allocated.write)
    assert counter.desk.held(IDS, "") == 0
    counter.desk.release(handle)
    counter.stores(IDS)
    assert counter.desk.held(IDS, "") == LONGEST, "a prompt matched later counts again"
    counter.check()


def test_an_engine_gets_pages_that_a_fence_binds_for_their_salt_alone(counter: Counter) -> None:
    # P5
    pages = counter.stores(IDS, salt="one")
    lease = counter.pool.lender.lend_read(counter.pool.names(IDS, "one"))
    lease.poll()
    assert lease.fence() is None
    lease.release()
    assert set(counter.stores(OTHER_IDS, salt="two")).isdisjoint(pages)
    assert set(counter.stores(OTHER_IDS, salt="one")) == set(pages)
    counter.check()


def test_who_remembers_what_was_brought_hears_of_what_is_evicted_and_of_nothing_else(counter: Counter) -> None:
    # P22
    heard: list[str] = []
    counter.desk.follow_forgetting(lambda: heard.append("forgotten"), lambda: heard.append("evicted"))
    counter.stores(IDS)
    assert counter.desk.evict(OTHER_IDS, "") == 0
    assert heard == []
    assert counter.desk.evict(IDS, "") == LONGEST
    assert heard == ["evicted"]
    counter.desk.forget()
    assert heard == ["evicted", "forgotten"]
    counter.check()


@pytest.mark.parametrize("error", [BackendError("no UCX here"), ConfigError("the port is taken")], ids=repr)
def test_a_pool_that_cannot_be_made_refuses_its_engine_in_words_each_time(error: KvbusError) -> None:
    def attach(layout: PageLayout, hello: Hello) -> PoolSide:
        raise error

    desk = PoolDesk(
        attach=attach,
        rounds=lambda: pytest.fail("no round is needed"),
        reads=LocalBackend(name="engine-read"),
        writes=LocalBackend(name="engine-write"),
        clock=lambda: 0.0,
        counters=dict,
    )
    layout: dict[str, object] = dict(TOY.to_plain())
    for _ in range(2):
        answer = desk.welcome(Hello("toy", "1", "toy", "ab12", layout, 100, len(IDS), identity()))
        assert isinstance(answer, Refusal)
        assert answer.text == str(error)


def test_before_there_is_a_pool_nothing_can_be_forgotten() -> None:
    # contract 24
    desk = PoolDesk(
        attach=lambda _layout, _hello: Counter().pool,
        rounds=lambda: pytest.fail("no round is needed"),
        reads=LocalBackend(name="engine-read"),
        writes=LocalBackend(name="engine-write"),
        clock=lambda: 0.0,
        counters=dict,
    )
    with pytest.raises(PeerError, match="no engine has attached"):
        desk.forget()


def test_pages_that_a_request_and_a_peer_share_stay_where_they_are_until_both_let_go(counter: Counter) -> None:
    # contract 22, P9
    pages = counter.stores(IDS)
    matched = counter.desk.match(IDS, "")
    lease = counter.pool.lender.lend_read(counter.pool.names(IDS, ""))
    view = lease.poll()
    assert view is not None
    assert matched.pages == view.pages == pages
    for first, second in ((0, 8), (9, 17)):  # more prompts than fit beside them
        counter.stores(tuple(range(first, first + 32)), salt=f"other {second}")
    assert counter.desk.evict(IDS, "") == 0
    assert counter.pool.memory.generations.counters(pages) == view.counters
    counter.desk.release(matched.handle)
    counter.stores(OTHER_IDS)
    assert counter.desk.held(IDS, "") == LONGEST, "the peer has them still"
    lease.release()
    assert counter.desk.evict(IDS, "") == LONGEST
    counter.check()


def test_what_an_engine_has_left_comes_back_and_what_it_handed_over_stays(counter: Counter) -> None:
    # P8, R4
    desk = counter.desk
    counter.stores(IDS[: 2 * TOY.block_tokens])
    handed = desk.match(IDS[: 2 * TOY.block_tokens], "").handle
    desk.hand_over(handed)
    writing = desk.match(OTHER_IDS, "").handle
    assert isinstance(desk.alloc(writing, 0, 3), Allocated)
    desk.engine_left()
    counter.check()
    assert desk.held(OTHER_IDS, "") == 0, "a page that was half written has no name"
    with pytest.raises(PeerError, match="no such handle"):
        desk.release(writing)
    assert desk.evict(IDS, "") == 0, "what was handed over is not the engine's to leave"
    desk.release(handed)
    assert desk.evict(IDS, "") == 2
    assert counter.pool.lender.statistics().pages.free == PAGES
    counter.check()
