"""Prompts by their page names: the hottest that are held, one name for all of a prefix, and no more than may be."""

from collections.abc import Callable, Sequence

from kvbus.pool.prompts import Prefix, Prompts


def chain(text: str, blocks: int) -> tuple[bytes, ...]:
    """Names that no other text has, and that its longer chains begin with."""
    return tuple(f"{text}:{number}".encode().ljust(16, b".") for number in range(blocks))


def all_of(names: Sequence[bytes]) -> int:
    return len(names)


def only(*held: bytes) -> Callable[[Sequence[bytes]], int]:
    """How many leading names are among these."""
    return lambda names: next((place for place, name in enumerate(names) if name not in held), len(names))


def test_those_most_often_asked_for_come_first_and_the_latest_among_equals() -> None:
    prompts = Prompts()
    for text, uses in (("once", 1), ("often", 3), ("also once", 1), ("twice", 2)):
        for _ in range(uses):
            prompts.note(chain(text, 2), "")
    found = prompts.hottest(3, all_of)
    assert [prefix.names for prefix in found] == [chain(text, 2) for text in ("often", "twice", "also once")]
    assert [prefix.uses for prefix in found] == [3, 2, 1]


def test_only_what_is_held_is_named_and_what_a_hotter_one_contains_is_not_named_again() -> None:
    prompts = Prompts()
    long, short = chain("system", 4), chain("system", 2)
    for _ in range(2):
        prompts.note(long, "tenant")
    prompts.note(short, "tenant")
    prompts.note(chain("gone", 3), "")
    prompts.note((), "")  # less than a block
    held = only(*long[:3])
    assert prompts.hottest(9, held) == [Prefix(long[:3], "tenant", 2)]
    assert prompts.hottest(9, only(*short)) == [Prefix(short, "tenant", 2)]
    assert prompts.hottest(9, only()) == []


def test_any_name_of_a_chain_stands_for_the_prefix_that_ends_with_it() -> None:
    prompts = Prompts()
    prompts.note(chain("one", 4), "salt of one")
    assert prompts.find(chain("one", 3)[-1]) == Prefix(chain("one", 3), "salt of one", 1)
    assert prompts.find(chain("other", 1)[-1]) is None


def test_the_chain_not_asked_for_longest_is_forgotten_where_there_are_too_many_or_they_are_too_long() -> None:
    few, short = Prompts(prompts_max=2), Prompts(names_max=5)
    for text in ("first", "second", "first", "third"):
        few.note(chain(text, 1), "")
        short.note(chain(text, 2), "")
    for prompts in (few, short):
        assert len(prompts) == 2
        assert prompts.find(chain("second", 1)[0]) is None
        assert prompts.find(chain("first", 1)[0]) is not None
    short.note(chain("longer than all", 6), "")
    assert short.find(chain("longer than all", 1)[0]) is None
