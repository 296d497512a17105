"""The toy engine: pages that depend on every token before, answers that depend on every byte of every page."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.engines.base import StoppedError
from kvbus.engines.toy import ROLE_END, TURN_END, TURN_START, ToyEngine
from kvbus.errors import ConfigError, PeerError

BLOCK = 8
OPTIONS: dict[str, object] = {"block_tokens": BLOCK, "page_bytes": 1024, "work_rounds": 1}
IDS = list(b"pages of a prompt, and a tail")  # 29 tokens: three whole blocks
Page = npt.NDArray[np.generic]


def engine(**options: object) -> ToyEngine:
    return ToyEngine.load(OPTIONS | options)


def never() -> bool:
    return False


def answer(pages: Sequence[Page] = (), count: int = 12, ids: Sequence[int] = IDS, toy: ToyEngine | None = None) -> str:
    run = (toy or engine()).resume(ids, pages, never)
    return bytes(token for token in (run.next_token() for _ in range(count)) if token is not None).decode()


def pages_of(ids: Sequence[int] = IDS, toy: ToyEngine | None = None) -> list[Page]:
    toy = toy or engine()
    layout = toy.describe().layout
    pages: list[Page] = [np.zeros(layout.shape, layout.element) for _ in range(len(ids) // BLOCK)]
    run = toy.resume(ids, (), never)
    run.prefill()
    run.export(0, pages)
    return pages


def test_any_cached_prefix_gives_the_tokens_of_the_cold_run() -> None:
    cold = answer()
    pages = pages_of()
    assert [answer(pages[:count]) for count in range(4)] == [cold] * 4


def test_answers_vary_with_the_prompt_and_are_printable() -> None:
    answers = {answer(ids=list(text.encode())) for text in ("one prompt", "two prompts", "one prompt ", "")}
    assert len(answers) == 4
    assert all(text.isprintable() for text in answers)


@given(page=st.integers(0, 2), byte=st.integers(0, 1023), bit=st.integers(0, 7))
def test_any_wrong_bit_of_any_page_changes_the_answer(page: int, byte: int, bit: int) -> None:
    pages = pages_of()
    pages[page].reshape(-1).view(np.uint8)[byte] ^= 1 << bit
    assert answer(pages) != answer()


def test_a_page_of_another_prompt_a_torn_page_and_pages_out_of_order_change_the_answer() -> None:
    cold = answer()
    other = pages_of(list(b"PAGES of a prompt, and a tail"))
    pages = pages_of()
    torn = pages[1].copy()
    torn.reshape(-1)[512:] = 0
    for wrong in ([other[0], *pages[1:]], [pages[0], torn, pages[2]], [pages[1], pages[0], pages[2]]):
        assert answer(wrong) != cold


def test_a_block_has_other_bytes_behind_another_prefix() -> None:
    same_block = list(b"xxxxxxxxyyyyyyyy"), list(b"zzzzzzzzyyyyyyyy")
    first, second = (pages_of(ids)[1] for ids in same_block)
    assert not np.array_equal(first, second)


def test_blocks_exported_after_a_resume_are_those_of_the_cold_run() -> None:
    toy, pages = engine(), pages_of()
    run = toy.resume(IDS, pages[:1], never)
    run.next_token()
    later = [np.zeros_like(page) for page in pages[1:]]
    run.export(1, later)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(later, pages[1:], strict=True))
    with pytest.raises(ValueError, match="block 0 was not computed"):
        run.export(0, later[:1])


def test_an_engine_of_another_seed_name_or_work_has_another_digest_and_other_pages() -> None:
    digests = {
        engine(**change).describe().model_digest for change in ({}, {"seed": 1}, {"work_rounds": 2}, {"name": "b"})
    }
    assert len(digests) == 4
    assert answer(toy=engine(seed=1)) != answer()


def test_ranks_have_one_model_but_rows_and_page_names_of_their_own() -> None:
    alone, first, second = engine(), engine(ranks=2), engine(rank=1, ranks=2)
    digests = {toy.describe().model_digest for toy in (alone, first, second)}
    assert len(digests) == 1
    layouts = [toy.describe().layout for toy in (alone, first, second)]
    assert [(layout.rank, layout.ranks) for layout in layouts] == [(0, 1), (0, 2), (1, 2)]
    assert len({layout.fingerprint() for layout in layouts}) == 3
    assert len({answer(toy=toy) for toy in (alone, first, second)}) == 3


@pytest.mark.parametrize("options", [{"rank": 1}, {"rank": -1, "ranks": 2}, {"rank": 2, "ranks": 2}, {"ranks": 0}])
def test_a_rank_that_does_not_exist_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="toy option rank"):
        engine(**options)


def test_a_cancelled_prefill_stops_between_two_tokens() -> None:
    asked: list[bool] = []

    def after_three() -> bool:
        asked.append(True)
        return len(asked) > 3

    run = engine().resume(IDS, (), after_three)
    with pytest.raises(StoppedError):
        run.prefill()
    assert len(asked) == 4


def test_text_goes_to_tokens_and_back_also_where_characters_have_several_bytes() -> None:
    toy = engine()
    assert toy.decode(toy.tokenize("Zoë ⊕ 😀")) == "Zoë ⊕ 😀"
    ids = toy.tokenize_chat([{"role": "user", "content": "hi"}])
    marks = [token for token in ids if token > 255]
    assert marks == [TURN_START, ROLE_END, TURN_END, TURN_START, ROLE_END]
    assert toy.decode(ids) == "userhiassistant"


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(PeerError, match="surrogate"):
        engine().tokenize("\ud800")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pages": 3}, "'pages' is unknown"),
        ({"seed": "1"}, "'seed' is str"),
        ({"work_rounds": 0}, "work_rounds is 0"),
        ({"page_bytes": 1001}, "page_bytes is 1001"),
        ({"page_bytes": 128}, "page_bytes is 128"),
        ({"tokens_max": 1}, "tokens_max is 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ToyEngine.load(OPTIONS | options)


def test_the_default_page_is_64_kib_of_32_tokens() -> None:
    layout = ToyEngine.load({}).describe().layout
    assert (layout.page_bytes, layout.block_tokens) == (65536, 32)
