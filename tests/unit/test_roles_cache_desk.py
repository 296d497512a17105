"""The counter for questions about a cache: pins that hold within their bound, and refusals that change nothing."""

import math
from dataclasses import dataclass, field

import pytest

from kvbus.caching import PINS_MAX, CacheAsked, CacheChangeAsked, CacheChanged
from kvbus.engines.desk import Refusal
from kvbus.errors import BusError
from kvbus.names import token_bytes, tokens_from_bytes
from kvbus.parts import Prompt
from kvbus.roles.cache_desk import CacheDesk
from kvbus.roles.poolside import PoolSide
from tests.unit.pool_parts import EPOCH, TOY, fill

PAGES, LONGEST = 16, 4
ROOM = PAGES - LONGEST


@dataclass(slots=True)
class TokenIds:
    """Takes token ids as they come; text is what it cannot read, and with `lost` it is away."""

    lost: bool = False

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...] | Refusal:
        if self.lost:
            raise BusError("the engine went away")
        return tokens_from_bytes(prompt.tokens) if prompt.tokens is not None else Refusal("this is no text of mine")


@dataclass(slots=True)
class Counter:
    """A pool, its desk, and what the desk told others."""

    now: float = 0.0
    evicted: int = 0
    tokenizer: TokenIds = field(default_factory=TokenIds)
    pool: PoolSide = field(
        default_factory=lambda: PoolSide.create(TOY, pages=PAGES, tokens_max=4 * LONGEST, vocab_size=1_000, epoch=EPOCH)
    )
    desk: CacheDesk = field(init=False)

    def __post_init__(self) -> None:
        self.desk = CacheDesk(
            pool=self.pool,
            tokenizer=self.tokenizer,
            forget=self.pool.lender.forget_names,
            on_evict=self.note_evicted,
            clock=lambda: self.now,
        )

    def note_evicted(self) -> None:
        self.evicted += 1

    def hold(self, prompt: int, blocks: int) -> Prompt:
        """Bring a prompt in, and return it."""
        ids = [prompt] * (4 * blocks)
        fill(self.pool.lender, self.pool.names(ids, ""))
        return Prompt(tokens=token_bytes(ids))

    async def change(self, action: str, prompt: Prompt | None = None, pin: str = "") -> CacheChanged:
        asked = CacheChangeAsked.model_validate({"action": action, "pin": pin, "prompt": prompt})
        return await self.desk.change(asked)

    def still(self) -> tuple[object, ...]:
        """What a refusal must leave as it is."""
        return (self.pool.allocator.statistics(), self.pool.lender.statistics())


@pytest.fixture
def counter() -> Counter:
    return Counter()


async def test_what_is_held_is_told_by_blocks_and_nothing_is_pinned_by_asking(counter: Counter) -> None:
    prompt = counter.hold(1, 3)
    before = counter.still()
    told = await counter.desk.look(CacheAsked(prompt=prompt))
    assert (told.blocks_wanted, told.blocks_held) == (3, 3)
    assert (told.pages, told.pages_free, told.pages_cached) == (PAGES, PAGES - 3, 3)
    other = await counter.desk.look(CacheAsked(prompt=prompt, salt="another"))
    assert (other.blocks_wanted, other.blocks_held) == (3, 0)
    assert counter.still() == before


# P26
async def test_pins_take_up_what_peers_may_and_no_more_and_a_refused_one_changes_nothing(counter: Counter) -> None:
    prompts = [counter.hold(number, 4) for number in range(1, 5)]
    for number, prompt in enumerate(prompts[:3]):
        assert (await counter.change("pin", prompt, f"p{number}")).blocks == 4
    assert counter.pool.allocator.claimed == ROOM
    before = counter.still()

    refused = await counter.change("pin", prompts[3], "one too many")

    assert refused.blocks == 0
    assert f"4 pages more than may be kept: {ROOM} in all" in refused.refusal
    assert counter.still() == before
    counter.pool.lender.check()
    assert (await counter.change("unpin", pin="p0")).blocks == 4
    assert (await counter.change("pin", prompts[3], "now")).blocks == 4


async def test_a_pin_of_one_name_grows_and_is_let_go_whole(counter: Counter) -> None:
    one, two = counter.hold(1, 2), counter.hold(2, 3)
    for prompt, blocks in ((one, 2), (two, 3), (one, 2)):
        assert (await counter.change("pin", prompt, "both")).blocks == blocks
    counter.now = 12.0
    (row,) = (await counter.desk.look(CacheAsked())).pins
    assert (row.pin, row.blocks, row.held_s) == ("both", 5, 12.0)
    assert (await counter.change("evict", one)).blocks == 0
    assert (await counter.change("unpin", pin="both")).blocks == 5
    assert (await counter.change("evict", one)).blocks == 2
    assert counter.evicted == 1
    counter.pool.lender.check()


async def test_two_pins_of_one_prompt_keep_it_until_both_are_let_go(counter: Counter) -> None:
    prompt = counter.hold(1, 2)
    for name in ("one", "two"):
        await counter.change("pin", prompt, name)
    await counter.change("unpin", pin="one")
    assert (await counter.change("evict", prompt)).blocks == 0
    await counter.change("unpin", pin="two")
    assert (await counter.change("evict", prompt)).blocks == 2


# contract 24
async def test_forgetting_lets_every_pin_go_and_gives_the_pages_back(counter: Counter) -> None:
    prompt = counter.hold(1, 3)
    await counter.change("pin", prompt, "kept")
    assert (await counter.change("forget")).blocks == 3
    told = await counter.desk.look(CacheAsked(prompt=prompt))
    assert (told.blocks_held, told.pins, told.pages_free, told.pages_lent) == (0, (), PAGES, 0)
    counter.pool.lender.check()


async def test_what_cannot_be_served_is_said_and_changes_nothing(counter: Counter) -> None:
    held = counter.hold(1, 2)
    before = counter.still()
    text, absent = Prompt(text="x"), Prompt(tokens=token_bytes([9] * 8))
    for action, prompt, pin, words in (
        ("pin", held, "", "a pin needs a name"),
        ("pin", absent, "p", "none of the 2 blocks is held"),
        ("pin", None, "p", "no prompt was given"),
        ("pin", text, "p", "this is no text of mine"),
        ("evict", None, "", "no prompt was given"),
        ("evict", text, "", "this is no text of mine"),
        ("unpin", None, "p", "no pin of this name is held"),
    ):
        assert words in (await counter.change(action, prompt, pin)).refusal
    counter.tokenizer.lost = True
    assert "the engine went away" in (await counter.change("pin", held, "p")).refusal
    assert "the engine went away" in (await counter.desk.look(CacheAsked(prompt=held))).refusal
    assert counter.still() == before


async def test_pins_have_a_bound_and_an_old_one_is_told_within_the_wires(counter: Counter) -> None:
    prompt = counter.hold(1, 1)
    for number in range(PINS_MAX):
        assert not (await counter.change("pin", prompt, f"p{number}")).refusal
    assert "are pinned already" in (await counter.change("pin", prompt, "one more")).refusal
    assert not (await counter.change("pin", prompt, "p7")).refusal  # it is held already
    counter.now = 1e9
    pins = (await counter.desk.look(CacheAsked())).pins
    assert len(pins) == PINS_MAX
    assert math.isclose(pins[0].held_s, 86_400.0)
