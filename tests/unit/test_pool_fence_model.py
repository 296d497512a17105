"""Random lives of a pool with frozen readers: whatever happens, none delivers or fetches what it was not lent.

Every byte in the pool tells its salt, so a look at what a frozen reader would fetch now shows whose it is.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvbus.ledger.types import Direction
from kvbus.names import page_names
from kvbus.pool.lease import PoolLease
from tests.unit.pool_parts import TOY, small_lender

PAGES, LONGEST, BLOCKS = 9, 3, 3
SALTS = {"one": 0, "two": 1}
SALT, PROMPT = st.sampled_from(sorted(SALTS)), st.integers(1, 2)
COUNT = st.integers(1, BLOCKS)


def names_of(salt: str, prompt: int, count: int) -> tuple[bytes, ...]:
    return page_names(TOY.namespace(salt), [prompt] * (TOY.block_tokens * count), TOY.block_tokens)


@dataclass(eq=False)
class Frozen:
    """A reader that may fetch at any time: which pages, in which generation, holding what, of which salt."""

    lease: PoolLease
    salt: str
    counters: tuple[int, ...]
    held: tuple[int, ...]


@dataclass(eq=False)
class Writing:
    """A write lease that is out."""

    lease: PoolLease
    salt: str
    since_forgetting: int


class FenceMachine(RuleBasedStateMachine):
    readers = Bundle("readers")
    fenced = Bundle("fenced")
    writes = Bundle("writes")

    @initialize()
    def begin(self) -> None:
        self.lender = small_lender(PAGES, LONGEST)
        self.reading: list[Frozen] = []
        self.behind_fences: list[Frozen] = []
        self.forgettings = 0
        self.next_byte = 2
        for salt in SALTS:
            self.store(salt, 1, BLOCKS)

    def byte_at(self, page: int) -> int:
        return int(self.lender.memory.page_bytes(page)[0])

    def fill(self, lease: PoolLease, salt: str) -> None:
        """Write bytes that tell their salt: odd ones for one, even ones for the other; none comes twice in a row."""
        for page in lease.pages:
            self.next_byte = (self.next_byte + 2) % 256 or 2
            self.lender.memory.page_bytes(page)[:] = self.next_byte | SALTS[salt]

    def store(self, salt: str, prompt: int, count: int, *, told: bool = True) -> None:
        lease = self.lender.lend_write(
            names_of(salt, prompt, count), range(count), for_peer=False, salt=salt if told else None
        )
        if lease.poll() is not None:
            self.fill(lease, salt)
            lease.mark_arrived([True] * count)
        lease.release()

    @rule(salt=SALT, prompt=PROMPT, count=COUNT, told=st.sampled_from((True, True, True, False)))
    def engine_stores(self, salt: str, prompt: int, count: int, told: bool) -> None:  # noqa: FBT001
        self.store(salt, prompt, count, told=told)

    @rule(target=writes, salt=SALT, prompt=PROMPT, count=COUNT, for_peer=st.booleans())
    def write(self, salt: str, prompt: int, count: int, for_peer: bool) -> object:  # noqa: FBT001
        if len([None for lease in self.lender._leases.values() if lease.direction is Direction.WRITE]) > 1:
            return multiple()  # room for all else
        names = names_of(salt, prompt, count)
        lease = self.lender.lend_write(names, range(count), for_peer=for_peer, salt=salt)
        if lease.poll() is None:
            lease.release()
            return multiple()
        self.fill(lease, salt)
        return Writing(lease, salt, self.forgettings)

    @rule(one=consumes(writes), whole=st.booleans())
    def commit(self, one: Writing, whole: bool) -> None:  # noqa: FBT001
        before = self.lender.held(one.lease.names)
        one.lease.mark_arrived([whole] * len(one.lease.pages))
        one.lease.release()
        if one.since_forgetting != self.forgettings:
            assert self.lender.held(one.lease.names) == before, "computed before the names were forgotten"

    @rule(target=readers, salt=SALT, prompt=PROMPT)
    def lend(self, salt: str, prompt: int) -> object:
        return self.read(salt, prompt)

    def read(self, salt: str, prompt: int) -> object:
        lease = self.lender.lend_read(names_of(salt, prompt, BLOCKS))
        view = lease.poll()
        if view is None or not view.pages:
            lease.release()
            return multiple()
        one = Frozen(lease, salt, view.counters, tuple(self.byte_at(page) for page in view.pages))
        self.reading.append(one)
        return one

    @rule(one=consumes(readers))
    def speak(self, one: Frozen) -> None:
        one.lease.release()
        self.reading.remove(one)

    @rule(target=fenced, salt=SALT, prompt=PROMPT)
    def freeze(self, salt: str, prompt: int) -> object:
        one = self.read(salt, prompt)
        return self.fence(one) if isinstance(one, Frozen) else multiple()

    @rule(target=fenced, one=consumes(readers))
    def fence_one(self, one: Frozen) -> object:
        return self.fence(one)

    def fence(self, one: Frozen) -> object:
        failure = one.lease.fence()
        self.reading.remove(one)
        one.lease.release()
        if failure is not None:
            assert "of which salt" in failure.text
            return multiple()
        self.behind_fences.append(one)
        return one

    @rule(one=consumes(fenced))
    def hear_of(self, one: Frozen) -> None:
        assert self.lender.lift(one.lease.lease_id)
        self.behind_fences.remove(one)

    @rule()
    def forget(self) -> None:
        self.lender.forget_names()
        self.forgettings += 1
        for salt in SALTS:
            for prompt in (1, 2):
                assert not any(self.lender.held(names_of(salt, prompt, BLOCKS)))

    @rule(salt=SALT, prompt=PROMPT)
    def evict(self, salt: str, prompt: int) -> None:
        self.lender.evict(names_of(salt, prompt, BLOCKS))

    @invariant()
    def whoever_reads_finds_what_it_was_lent(self) -> None:
        for one in getattr(self, "reading", ()):
            assert self.lender.memory.generations.counters(one.lease.pages) == one.counters
            assert tuple(self.byte_at(page) for page in one.lease.pages) == one.held

    @invariant()
    def a_fenced_reader_delivers_nothing_but_what_it_was_lent_and_fetches_bytes_of_its_salt_only(self) -> None:
        for one in getattr(self, "behind_fences", ()):
            for page, counter, held in zip(one.lease.pages, one.counters, one.held, strict=True):
                record = self.lender.memory.generations.read(page)
                byte = self.byte_at(page)
                if record is not None and record.counter == counter:
                    assert byte == held
                assert byte & 1 == SALTS[one.salt]

    @invariant()
    def the_longest_prompt_of_any_salt_has_its_room(self) -> None:
        if hasattr(self, "lender"):
            self.lender.check()
            assert self.lender.statistics().pages.claimed <= PAGES - LONGEST


FenceMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


TestFencesAgainstFrozenReaders = FenceMachine.TestCase  # contract P5, 24, P26
