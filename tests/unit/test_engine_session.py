"""The flow that every engine shares: what is reused, what is stored, and what is given back."""

from collections.abc import Sequence

import pytest

from kvbus.engines.base import Cancelled, EngineSession, PageArray, Prefilled, Request, TextStream, Token
from kvbus.engines.desk import Hello, Refusal
from kvbus.engines.toy import ToyEngine, ToyRun
from kvbus.errors import PeerError
from kvbus.processes import identity
from tests.unit.engine_parts import PROMPT, TOY, DeskCalls, SmallDesk

IDS = tuple(PROMPT.encode())
BLOCK = 8
WHOLE = len(IDS) // BLOCK


class WatchedRun(ToyRun):
    """A toy run that notes the generations of the pages that it fills."""

    watching: "WatchedToy"

    def export(self, first_block: int, pages: Sequence[PageArray]) -> None:
        self.watching.note("fill")
        super().export(first_block, pages)


class WatchedToy(ToyEngine):
    """A toy engine that notes what holds while it works; it may be told to fail."""

    desk: SmallDesk
    fails_at = ""

    def note(self, step: str) -> None:
        pages = self.desk.pool.statistics().pages
        self.notes.append((step, pages.pinned, pages.writing))
        if step == self.fails_at:
            raise RuntimeError(f"planted at {step}")

    def resume(self, ids: Sequence[int], pages: Sequence[PageArray], cancelled: Cancelled) -> WatchedRun:
        self.notes: list[tuple[str, int, int]] = []
        self.note("resume")
        run = WatchedRun(self._options, ids, pages, cancelled)
        run.watching = self
        return run


class Instance:
    """A session with its engine and its desk, all in this process."""

    def __init__(self, pages: int = 64) -> None:
        self.engine = WatchedToy.load(TOY)
        about = self.engine.describe()
        self.desk = self.engine.desk = SmallDesk(pages)
        layout: dict[str, object] = dict(about.layout.to_plain())
        hello = Hello("toy", "1", "toy", about.model_digest, layout, about.vocab_size, about.tokens_max, identity())
        assert not isinstance(self.desk.welcome(hello), Refusal)
        self.session = EngineSession(self.engine, about, DeskCalls(self.desk), self.desk.pool.memory)

    def answer(
        self,
        ids: tuple[int, ...] = IDS,
        *,
        max_tokens: int = 12,
        store: bool = True,
        reuse: bool = True,
        salt: str = "",
        cancelled: Cancelled = lambda: False,
    ) -> tuple[str, int, int, str]:
        """The answer's text, cached tokens, stored blocks and reason; nothing may be held afterwards."""
        tokens: list[Token] = []
        end = self.session.generate(Request(ids, max_tokens, store, reuse, salt), tokens.append, cancelled)
        assert tuple(token.token for token in tokens) == end.tokens
        assert "".join(token.text for token in tokens) == end.text
        assert end.prompt_tokens == len(ids)
        self.desk.check_nothing_held()
        return end.text, end.cached_tokens, end.stored_blocks, end.reason

    def held(self, ids: tuple[int, ...] = IDS, salt: str = "") -> int:
        return self.desk.held(ids, salt)

    def prefilled(self, ids: tuple[int, ...] = IDS) -> Prefilled:
        return self.session.prefill(ids, "", lambda: False)


@pytest.fixture
def instance() -> Instance:
    return Instance()


def test_the_second_answer_reuses_what_the_first_stored_and_gives_the_same_tokens(instance: Instance) -> None:
    cold, *counts = instance.answer()
    assert counts == [0, WHOLE, "length"]
    assert instance.answer() == (cold, WHOLE * BLOCK, 0, "length")


def test_the_last_prompt_token_is_computed_also_where_every_block_is_cached(instance: Instance) -> None:
    ids = IDS[: 4 * BLOCK]
    cold, *_ = instance.answer(ids)
    assert instance.held(ids) == 4
    assert instance.answer(ids) == (cold, 3 * BLOCK, 0, "length")


def test_without_store_nothing_is_stored_and_without_reuse_nothing_is_reused(instance: Instance) -> None:
    cold, *counts = instance.answer(store=False)
    assert (counts, instance.held()) == ([0, 0, "length"], 0)
    instance.answer(store=True)
    assert instance.answer(reuse=False) == (cold, 0, 0, "length")
    assert instance.answer(reuse=False, store=False) == (cold, 0, 0, "length")


def test_only_the_blocks_that_the_pool_lacks_are_stored(instance: Instance) -> None:
    instance.answer(IDS[: 5 * BLOCK])
    _, cached, stored, _ = instance.answer()
    assert (cached, stored) == (5 * BLOCK, WHOLE - 5)


def test_another_salt_shares_nothing(instance: Instance) -> None:
    cold, *_ = instance.answer(salt="one")
    assert instance.answer(salt="two") == (cold, 0, WHOLE, "length")


@pytest.mark.contract("P9")
def test_cached_pages_are_pinned_while_they_are_read(instance: Instance) -> None:
    instance.answer()
    instance.answer(store=False)
    assert instance.engine.notes == [("resume", WHOLE, 0)]


@pytest.mark.contract("P1")
def test_pages_are_being_written_by_generation_while_they_are_filled_and_sealed_afterwards(instance: Instance) -> None:
    instance.answer()
    assert instance.engine.notes == [("resume", 0, 0), ("fill", 0, WHOLE)]
    pages = instance.desk.pool.pages_held(instance.desk._names(IDS, ""))
    read = instance.desk.pool.memory.generations.read
    assert all((generation := read(page)) is not None and generation.sealed for page in pages)


def test_a_pool_without_room_costs_only_the_storing() -> None:
    small, large = Instance(pages=3), Instance()
    cold, *_ = large.answer()
    assert small.answer() == (cold, 0, 0, "length")


def test_a_pool_with_room_for_some_blocks_stores_those() -> None:
    small, large = Instance(pages=10), Instance()
    small.desk.grants_fewer = True
    cold, *_ = large.answer()
    assert small.answer(IDS[: 4 * BLOCK])[2] == 4
    assert small.answer() == (cold, 4 * BLOCK, 6, "length")
    assert small.answer() == (cold, 10 * BLOCK, 0, "length")


def test_a_prefill_into_a_pool_with_room_for_some_blocks_says_how_many() -> None:
    small = Instance(pages=10)
    small.desk.grants_fewer = True
    prefilled = small.prefilled()
    assert (prefilled.blocks, prefilled.computed_tokens) == (10, 10 * BLOCK)
    assert prefilled.refused == f"the pool had room for 10 of {WHOLE} blocks"
    small.desk.release(prefilled.handle)
    small.desk.check_nothing_held()


def test_a_model_that_fails_while_it_fills_pages_leaves_nothing_behind(instance: Instance) -> None:
    instance.engine.fails_at = "fill"
    with pytest.raises(RuntimeError, match="planted"):
        instance.answer()
    with pytest.raises(RuntimeError, match="planted"):
        instance.prefilled()
    instance.desk.check_nothing_held()
    assert instance.held() == 0


def test_a_cancelled_answer_ends_with_what_it_has(instance: Instance) -> None:
    whole, *_ = instance.answer(store=False)
    asked: list[bool] = []

    def later() -> bool:
        asked.append(True)
        return len(asked) > len(IDS) + 6

    text, *_, reason = instance.answer(store=False, cancelled=later)
    assert reason == "cancelled"
    assert len(text) < len(whole)
    assert whole.startswith(text)
    assert instance.answer(cancelled=lambda: True) == ("", 0, 0, "cancelled")


def test_an_answer_ends_at_the_models_last_position(instance: Instance) -> None:
    ids = tuple([65] * 2040)
    text, _, _, reason = instance.answer(ids, max_tokens=100, store=False)
    assert (len(text), reason) == (8, "length")


@pytest.mark.contract("P9")
def test_a_prefill_leaves_the_whole_blocks_pinned_under_its_handle(instance: Instance) -> None:
    first = instance.prefilled()
    assert (first.blocks, first.computed_tokens, first.cached_tokens, first.refused) == (WHOLE, WHOLE * BLOCK, 0, "")
    assert instance.desk.pool.statistics().pages.pinned == WHOLE
    again = instance.prefilled()
    assert (again.blocks, again.computed_tokens, again.cached_tokens) == (WHOLE, 0, WHOLE * BLOCK)
    assert instance.desk.evict(IDS, "") == 0
    instance.desk.release(first.handle)
    instance.desk.release(again.handle)
    instance.desk.check_nothing_held()
    cold, *_ = instance.answer(reuse=False, store=False)
    assert instance.answer() == (cold, WHOLE * BLOCK, 0, "length")


def test_a_prefill_of_a_prompt_shorter_than_a_block_holds_nothing(instance: Instance) -> None:
    prefilled = instance.prefilled(IDS[:5])
    assert (prefilled.blocks, prefilled.computed_tokens, prefilled.refused) == (0, 0, "")
    instance.desk.release(prefilled.handle)


def test_a_prefill_for_which_there_is_no_room_says_so_and_computes_nothing() -> None:
    small = Instance(pages=3)
    prefilled = small.prefilled()
    assert (prefilled.blocks, prefilled.computed_tokens) == (0, 0)
    assert "pages asked for" in prefilled.refused
    small.desk.release(prefilled.handle)
    small.desk.check_nothing_held()


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ((), "no tokens"),
        (tuple([65] * 2048), "takes at most 2047"),
        ((65, 259), "out of range"),
        ((65, -1), "out of range"),
    ],
)
def test_a_prompt_that_the_engine_cannot_take_is_refused(instance: Instance, ids: tuple[int, ...], says: str) -> None:
    with pytest.raises(PeerError, match=says):
        instance.answer(ids)
    with pytest.raises(PeerError, match=says):
        instance.prefilled(ids)
    instance.desk.check_nothing_held()


def test_an_answer_of_no_tokens_is_refused(instance: Instance) -> None:
    with pytest.raises(PeerError, match="max_tokens"):
        instance.answer(max_tokens=0)


def test_either_text_or_messages_is_tokenized(instance: Instance) -> None:
    assert instance.session.tokenize("ab", None) == [97, 98]
    assert instance.session.tokenize(None, [{"role": "user", "content": "hi"}])
    with pytest.raises(PeerError, match="exactly one"):
        instance.session.tokenize(None, None)
    with pytest.raises(PeerError, match="exactly one"):
        instance.session.tokenize("a", [])


def test_text_comes_in_whole_characters() -> None:
    toy = ToyEngine.load(TOY)
    stream = TextStream(toy.decode)
    pushed = [stream.push(byte) for byte in "aé😀b".encode()]
    assert pushed == ["a", "", "é", "", "", "", "😀", "b"]


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever() -> None:
    stream = TextStream(ToyEngine.load(TOY).decode)
    pushed = [stream.push(0x80) for _ in range(64)]
    assert "".join(pushed)
    assert stream._context > 50


def test_after_a_change_of_weights_nothing_of_before_is_used_and_what_follows_counts() -> None:
    # contract 24
    one = Instance()
    before, *_ = one.answer()
    assert one.answer()[1] > 0, "the prompt is reused"
    one.engine.change_weights(7)
    assert one.session.forget() == WHOLE
    assert one.held() == 0
    after, cached, stored, _ = one.answer()
    fresh = WatchedToy.load({**TOY, "seed": 7})
    assert (cached, stored) == (0, WHOLE)
    assert after == one.answer()[0] == fresh_answer(fresh)
    assert after != before


def fresh_answer(engine: ToyEngine) -> str:
    """What an engine answers that never had other weights."""
    run = ToyRun(engine._options, IDS, (), lambda: False)
    return engine.decode([token for token in (run.next_token() for _ in range(12)) if token is not None])
