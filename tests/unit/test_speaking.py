"""What a speaker says has the bytes of an event whose header and body were made as models."""

import pytest

from kvbus.codec import begun_map, pack, packer
from kvbus.events import Header, LeaseReleased, PlanAsked, ReaderKey, encode
from kvbus.parts import Body
from kvbus.speaking import Speaker

KEY = ReaderKey(instance="b", member="m0", epoch=7, transfer="T1", attempt=1, rank=0)
BODIES: tuple[Body, ...] = (PlanAsked(transfer="T1"), LeaseReleased(key=KEY, nonce=bytes(16)), PlanAsked(transfer="T2"))


@pytest.mark.parametrize("number", [0, 127, 128, 1 << 16, 1 << 32, (1 << 63) - 1])
def test_an_event_that_is_said_has_the_bytes_of_one_that_was_encoded(number: int) -> None:
    speaker = Speaker("a", "m0", 1 << 40)
    for body in BODIES:  # a kind comes again behind another one
        header = Header(k=body.KIND, i="a", m="m0", e=1 << 40, s=number, t=number, c="why")
        assert speaker.said(body, "why", number, number) == encode(header, body)


def test_a_requester_has_neither_member_nor_epoch() -> None:
    said = Speaker("someone").said(BODIES[0], "", 1, 2)
    assert said == encode(Header(k="plan_asked", i="someone", s=1, t=2), BODIES[0])


def test_no_speaker_has_a_name_that_fits_no_subject() -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        Speaker("")


def test_a_map_that_was_begun_goes_on_with_the_pairs_of_another() -> None:
    first: dict[str, object] = {"a": 1, "b": [2]}
    then: dict[str, object] = {"c": b"3", "d": {"e": None}}
    assert begun_map(first, 2) + pack(then)[1:] == pack(first | then)


def test_a_map_too_long_for_a_short_head_is_not_begun() -> None:
    with pytest.raises(ValueError, match="at most 15 pairs, got 16"):
        begun_map({"a": 1}, 15)


def test_a_packer_goes_on_after_a_message_that_it_could_not_pack() -> None:
    packs = packer()
    with pytest.raises(TypeError):
        packs({"a": "b" * 100, "c": object()})
    assert packs({"a": 1}) == pack({"a": 1})
