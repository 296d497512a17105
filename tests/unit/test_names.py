"""Names: equal ones mean interchangeable bytes, so nothing that differs may share one."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.names import (
    NAME_LENGTH_BYTES,
    TOKEN_ID_MAX,
    epoch_counter,
    epoch_from,
    epoch_text,
    namespace_digest,
    page_names,
    request_hash,
    token_bytes,
    tokens_from_bytes,
)
from kvbus.parts import Message, Prompt

SPACE = namespace_digest(model="m", dtype="bf16", block_tokens=4)
tokens = st.lists(st.integers(0, TOKEN_ID_MAX), max_size=40)
short = st.text(max_size=6)
parts = st.dictionaries(st.from_regex(r"\A[a-z]{1,4}\Z"), st.text(max_size=4) | st.integers(-3, 300), max_size=4)


# ------------------------------------------------------------------------------------------------------- page names


@settings(deadline=None)
@given(tokens, tokens, st.integers(1, 8))
def test_a_longer_prompt_keeps_the_names_of_its_prefix(first: list[int], more: list[int], block: int) -> None:
    # contract 37
    names = page_names(SPACE, first, block)
    longer = page_names(SPACE, first + more, block)
    assert longer[: len(names)] == names


@settings(deadline=None)
@given(tokens, st.integers(1, 8))
def test_each_whole_block_has_one_name_and_a_partial_one_none(ids: list[int], block: int) -> None:
    # contract 34 of the merged path: a partly filled last block must not count as whole
    names = page_names(SPACE, ids, block)
    assert len(names) == len(ids) // block
    assert all(len(name) == NAME_LENGTH_BYTES for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 7, 8, 9])
def test_the_block_boundary_counts_to_the_token(length: int) -> None:
    assert len(page_names(SPACE, range(length), 4)) == length // 4


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKEN_ID_MAX), min_size=12, max_size=12), st.integers(0, 11))
def test_a_changed_token_changes_its_block_and_all_after_it(ids: list[int], where: int) -> None:
    # contract 37
    other = [*ids]
    other[where] ^= 1
    before, after = page_names(SPACE, ids, 4), page_names(SPACE, other, 4)
    assert [one == two for one, two in zip(before, after, strict=True)] == [n < where // 4 for n in range(3)]


@settings(deadline=None)
@given(parts, parts)
def test_spaces_that_differ_in_anything_share_no_name(one: dict[str, str | int], other: dict[str, str | int]) -> None:
    # contract 37
    same = one == other
    assert (namespace_digest(**one) == namespace_digest(**other)) is same
    names = page_names(namespace_digest(**one), range(8), 4), page_names(namespace_digest(**other), range(8), 4)
    assert bool(set(names[0]) & set(names[1])) is same


def test_key_order_does_not_matter_and_types_and_seams_do() -> None:
    assert namespace_digest(a="1", b="2") == namespace_digest(b="2", a="1")
    assert namespace_digest(a="1") != namespace_digest(a=1)
    assert namespace_digest(a="bc") != namespace_digest(ab="c")
    assert namespace_digest(a="", b="x") != namespace_digest(a="x", b="")


def test_another_block_size_gives_other_names() -> None:
    four, eight = page_names(SPACE, range(8), 4), page_names(SPACE, range(8), 8)
    assert not set(four) & set(eight)


def test_names_are_fixed_for_ever() -> None:
    # Two versions of kvbus must agree on names; computed here without the code under test.
    packed = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 4))
    expected = hashlib.blake2b(SPACE + packed, digest_size=16, person=b"kvbus-page").digest()
    assert page_names(SPACE, [1, 2, 3, 4], 4) == (expected,)
    assert (
        namespace_digest(model="m").hex()
        == hashlib.blake2b(
            b"\x05\0\0\0model\x03\0\0\0str\x01\0\0\0m", digest_size=16, person=b"kvbus-space"
        ).hexdigest()
    )


@pytest.mark.parametrize("bad", [-1, TOKEN_ID_MAX + 1, 2**70])
def test_a_token_id_out_of_range_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="token ids must lie"):
        page_names(SPACE, [0, bad], 1)
    with pytest.raises(OverflowError):
        token_bytes([bad])


@pytest.mark.parametrize("block", [0, -4])
def test_a_block_has_tokens(block: int) -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        page_names(SPACE, [1], block)


@settings(deadline=None)
@given(tokens)
def test_token_ids_travel_as_little_endian_u32(ids: list[int]) -> None:
    packed = token_bytes(ids)
    assert packed == b"".join(token.to_bytes(4, "little") for token in ids)
    assert tokens_from_bytes(packed) == tuple(ids)


def test_token_bytes_of_a_broken_length_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        tokens_from_bytes(b"abcde")


# --------------------------------------------------------------------------------------------------- request hashes


def hash_of(prompt: Prompt, *, model: str = "m", salt: str = "s", source: str = "a") -> str:
    return request_hash(model=model, salt=salt, source=source, prompt=prompt.canonical())


def test_a_request_is_another_for_another_model_salt_or_source() -> None:
    # contract 2.1.8: elsewhere the same prompt from another source, or for another model, counts as a repeat
    prompt = Prompt(text="hello")
    assert len({
        hash_of(prompt),
        hash_of(prompt, model="n"),
        hash_of(prompt, salt="t"),
        hash_of(prompt, source="b"),
        request_hash(model="ms", salt="", source="a", prompt=prompt.canonical()),
    }) == 5  # fmt: skip


def test_a_text_that_spells_out_messages_is_another_request() -> None:
    # contract 2.1.7: there, a prompt equal to the JSON text of messages collides
    messages = Prompt(messages=(Message(role="user", content="x"),))
    for text in ('[{"content": "x", "role": "user"}]', '[["user","x"]]', str(messages.messages), repr(messages)):
        assert hash_of(Prompt(text=text)) != hash_of(messages)


def test_numbers_and_their_spelling_are_different_requests() -> None:
    # contract 2.1.7: there, 1 and "1" collide, and a list with its text
    as_tokens = Prompt(tokens=token_bytes([0x31]))
    assert len({hash_of(as_tokens), hash_of(Prompt(text="1")), hash_of(Prompt(text="1\0\0\0"))}) == 3


def test_messages_do_not_run_into_each_other() -> None:
    one = Prompt(messages=(Message(role="user", content="a"), Message(role="user", content="b")))
    other = Prompt(messages=(Message(role="user", content="ab"),))
    assert hash_of(one) != hash_of(other)


@settings(deadline=None)
@given(st.tuples(short, short, short, st.binary(max_size=6)), st.tuples(short, short, short, st.binary(max_size=6)))
def test_requests_that_differ_anywhere_have_other_hashes(
    one: tuple[str, str, str, bytes], other: tuple[str, str, str, bytes]
) -> None:
    def of(pieces: tuple[str, str, str, bytes]) -> str:
        return request_hash(model=pieces[0], salt=pieces[1], source=pieces[2], prompt=pieces[3])

    assert (of(one) == of(other)) is (one == other)
    assert len(of(one)) == 32


# ----------------------------------------------------------------------------------------------------------- epochs


@settings(deadline=None)
@given(st.integers(1, 2**31 - 1), st.integers(0, 2**32 - 1))
def test_an_epoch_keeps_its_counter_and_fits_63_bits(counter: int, nonce: int) -> None:
    # P16
    epoch = epoch_from(counter, nonce)
    assert 0 < epoch < 2**63
    assert epoch_counter(epoch) == counter
    assert epoch_from(counter, nonce ^ 1) != epoch


@pytest.mark.parametrize(("counter", "nonce"), [(0, 1), (-1, 1), (2**31, 1), (1, -1), (1, 2**32)])
def test_an_epoch_out_of_range_is_refused(counter: int, nonce: int) -> None:
    with pytest.raises(ValueError, match="epoch"):
        epoch_from(counter, nonce)


def test_an_epoch_is_shown_short() -> None:
    assert epoch_text(epoch_from(12, 0xABCD_00FF)) == "12-00ff"
