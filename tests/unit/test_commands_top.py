"""`kvbus top`: a picture on a screen of any size, readable without colour; keys; the story of a transfer."""

import io
import os
import pty
import termios
from collections.abc import AsyncIterator

import pytest
from rich.console import Console
from rich.text import Text

from kvbus.commands.keys import named, pressed
from kvbus.commands.top_screen import AWAY, UNHEARD, TopScreen
from kvbus.commands.top_view import KEYS, Look, age, epoch_text, page, screen, shares, took
from kvbus.picture.following import Following, begin
from kvbus.picture.rows import EndedRow, IsolatedRow, LeaseRow, MemberRow, OutOfUseRow, Shown, Totals, TransferRow
from kvbus.picture.whole import Picture
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Topics
from tests.unit.story_parts import TRANSFER, Pair, flushed
from tests.waiting import until

NOW_NS = 1_700_000_100_000_000_000
S = 1_000_000_000


def member(name: str = "a", **more: object) -> MemberRow:
    told: dict[str, object] = {
        "registered": True, "engine": "toy", "pages": 256, "pages_free": 220, "pages_cached": 30, "pages_lent": 4,
        "pages_quarantined": 2, "leases_held": 3, "heard_ns": NOW_NS - S // 2,
    }  # fmt: skip
    return MemberRow(name, "m0", (1 << 32) | 0xBEEF, **(told | more))  # type: ignore[arg-type] # names of its fields


def ended(number: int, outcome: str = "settled", reason: str = "") -> EndedRow:
    failure = "source_misses" if outcome == "failed" else ""
    name = f"b-b187d3e2-{number}"
    return EndedRow(name, "0" * 32, "a", "b", outcome, failure, reason, 31, 0, 31, 2_031_616, 0, 0, 0, 0.2, NOW_NS)


def shown(rows: int = 1) -> Shown:
    """A picture with so many rows of each kind, of names as long as names may be."""
    long = "an-instance-with-a-long-name-that-fills-what-a-subject-may-hold"
    return Shown(
        members=tuple(member(f"{long}{number}") for number in range(rows)),
        transfers=tuple(
            TransferRow(f"b-00000007-{n}", "0" * 32, "a", "b", "moving", "by ucx", NOW_NS - 90 * S, NOW_NS, 31, 12)
            for n in range(rows)
        ),
        transfers_count=rows,
        leases=tuple(
            LeaseRow("b", "m0", 1, n, TRANSFER, 0, "write", "a", 31, "reading", NOW_NS - 7_200 * S, n % 2 == 0)
            for n in range(rows)
        ),
        leases_count=rows,
        leases_local=12,
        out_of_use=tuple(OutOfUseRow("b", "m0", 3, "the reader is silent", NOW_NS - S, n) for n in range(rows)),
        out_of_use_pages=3 * rows,
        isolated=tuple(IsolatedRow("a", "m0", "c", "no answer", NOW_NS - 60 * S) for _ in range(rows)),
        ended=tuple(ended(n, "failed" if n % 2 else "settled", "a holds 0 of 31 blocks") for n in range(rows)),
        totals=Totals({"settled": 5, "failed": 2}, 155, 10_158_080),
        events=9,
        lost=0,
    )


def plain(lines: list[Text]) -> list[str]:
    """The lines as a terminal without colour shows them."""
    paper = Console(file=io.StringIO(), width=500, no_color=True, force_terminal=False)
    for line in lines:
        paper.print(line, soft_wrap=True)
    file = paper.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


# -------------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("rows", [0, 1, 7, 100])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 10), (200, 60), (40, 12)])
def test_a_screen_is_as_tall_as_the_terminal_and_never_wider(rows: int, width: int, height: int) -> None:
    lines = screen(shown(rows), Look(NOW_NS, stale_ns=NOW_NS - S, why_stale=AWAY), width=width, height=height)

    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width
    assert lines[-1].plain.startswith(KEYS[:30])


def test_a_small_screen_shows_some_of_each_kind_and_how_many_there_are_in_all() -> None:
    text = "\n".join(plain(screen(shown(50), Look(NOW_NS), width=80, height=24)))
    for words in (
        "instances: 50 members",
        "transfers in flight: 50",
        "leases held: 50 for transfers, 12 of the engines' own",
        "quarantine: 150 pages out of use",
        "isolated peers: 50",
        "outcomes, the newest first: 2 failed, 5 settled",
        "b-00000007-0",
        "the reader is silent",
        "b-b187d3e2-0",
    ):
        assert words in text, text


def test_everything_that_matters_can_be_read_in_80_columns_without_colour() -> None:
    lines = plain(page(shown(2), Look(NOW_NS, "nats://127.0.0.1:4222", selected="b-00000007-1"), width=80))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    for words in (
        "kvbus top · nats://127.0.0.1:4222",
        "155 pages, 10.2 MB moved",
        "1-beef  toy          256    220     30     4     2      3 0.5 s",
        "  b-00000007-0       a → b           moving           12/31  1 min by ucx",
        "> b-00000007-1",
        "b/m0          T1      write a             31 reading          > 2 h",
        "b/m0              3   1.0 s T1: the reader is silent",
        "a/m0          c               1 min no answer",
        "  b-b187d3e2-1       a → b         failed      31/31   2.0 MB  200 ms source_",
    ):
        assert words in text, text


def test_a_member_that_is_gone_and_one_that_has_said_nothing_are_told_apart_without_colour() -> None:
    said = Shown(
        (member("a", registered=False, heard_ns=NOW_NS - 20 * S), member("b", heard_ns=0, pages=None)),
        (), 0, (), 0, 0, (), 0, (), (), Totals(), 0, 0,
    )  # fmt: skip
    gone, silent = plain(page(said, Look(NOW_NS), width=80))[4:6]
    assert "GONE" in gone
    assert silent.endswith("never")
    assert "    –    220" in silent


def test_a_member_that_drains_is_named_as_that_in_80_columns_without_colour() -> None:
    members = tuple(member(state, state=state) for state in ("draining", "drained", "leaving"))
    silent = member("silent", state="draining", heard_ns=NOW_NS - 20 * S)
    said = Shown((*members, silent, member("b")), (), 0, (), 0, 0, (), 0, (), (), Totals(), 0, 0)
    *drain, _, takes_part = plain(page(said, Look(NOW_NS), width=80))[4:9]
    assert [line.split()[-1] for line in drain] == ["draining", "drained", "leaving"]
    assert takes_part.endswith("0.5 s")
    assert "20 s, draining" in plain(page(said, Look(NOW_NS), width=120))[7]


def test_a_stale_picture_says_since_when_and_why() -> None:
    lines = plain(screen(shown(), Look(NOW_NS, stale_ns=NOW_NS - 17 * S, why_stale=AWAY), width=80, height=24))
    assert lines[1].startswith("STALE since ")
    assert "(17 s ago)" in lines[1]


def test_lost_events_are_said() -> None:
    said = Shown((), (), 0, (), 0, 0, (), 0, (), (), Totals(), 5, 2)
    assert "the log lost events 2 times" in "\n".join(plain(page(said, Look(NOW_NS), width=80)))


def test_control_characters_of_others_do_not_reach_the_terminal() -> None:
    evil = TransferRow("b-1", "0" * 32, "a\x1b[2J", "b", "mov\ning", "\x07\u202e", NOW_NS, NOW_NS, 0, 0)
    said = Shown((), (evil,), 1, (), 0, 0, (), 0, (), (), Totals(), 1, 0)
    text = "".join(line.plain for line in page(said, Look(NOW_NS), width=120))
    assert not {"\x1b", "\n", "\x07", "\u202e"} & set(text)


def test_rows_are_shared_out_so_that_no_kind_takes_all() -> None:
    assert shares([100, 2, 0, 100], 11) == [5, 2, 0, 4]
    assert shares([1, 1], 10) == [1, 1]
    assert shares([5, 5], -3) == [0, 0]


def test_what_a_transfer_took_is_rounded_and_short() -> None:
    assert [took(seconds) for seconds in (0.0, 0.0142, 0.9994, 0.9996, 11.96, 599.9, 600.0)] == [
        "0 ms", "14 ms", "999 ms", "1.0 s", "12.0 s", "599.9 s", "10 min",
    ]  # fmt: skip


def test_ages_and_epochs_are_short() -> None:
    texts = [age(seconds * S) for seconds in (0, 9, 59, 60, 3_599, 3_600, 86_400, 1_000_000)]
    assert texts == ["0.0 s", "9.0 s", "59 s", "1 min", "59 min", "1 h", "24 h", "11 d"]
    assert age(-5 * S) == "0.0 s"
    assert epoch_text((3 << 32) | 0xABCD1234) == "3-1234"


# ---------------------------------------------------------------------------------------------------------------- keys


def test_keys_are_named_and_unknown_sequences_are_passed_over_whole() -> None:
    assert list(named(b"q\x1b[A\x1bOBj\r\x7f")) == ["q", "up", "down", "j", "enter", "back"]
    assert list(named(b"\x1b[15~q\x1b[1;5Ax")) == ["q", "x"]
    assert list(named(b"\x1b[5~\x1b[6~")) == ["page up", "page down"]
    assert list(named(b"\x1b")) == ["escape"]
    assert list(named(b"\x1b[")) == ["escape"]
    assert not list(named("é€".encode()))


async def test_a_terminal_reads_keys_one_by_one_and_is_as_before_afterwards() -> None:
    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        async with pressed(theirs) as keys:
            assert termios.tcgetattr(theirs) != before
            os.write(ours, b"\x1b[Bq")
            assert [await keys.get(), await keys.get()] == ["down", "q"]
        assert termios.tcgetattr(theirs) == before
        with pytest.raises(RuntimeError, match="broken"):
            async with pressed(theirs):
                raise RuntimeError("broken")
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)


# -------------------------------------------------------------------------------------------------------------- screen


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    made = MemoryBus(MemoryBroker())
    yield made
    await made.close()


async def test_a_transfer_is_chosen_and_its_story_opened_scrolled_and_closed(bus: MemoryBus) -> None:
    pair, picture = Pair(bus), Picture()
    pair.whole()
    async with flushed(pair.a, pair.b):
        await begin(bus, Topics(), picture)
    top = TopScreen(bus, Topics(), picture, Following(bus, Topics(), picture))

    def text(height: int = 30) -> str:
        return "\n".join(plain(top.lines(100, height, NOW_NS)))

    assert "> b-" not in text()
    assert await top.press("enter"), "nothing is chosen, so nothing opens"
    assert await top.press("down")
    assert top.has_changed()
    assert f"> {TRANSFER}" in text()
    assert not top.has_changed()

    assert await top.press("enter")
    assert text(60).splitlines()[0].startswith(f"Transfer {TRANSFER}   a → b")
    assert "complete" in text(60)
    first = text(8)
    assert await top.press("page down")
    assert text(8) != first
    assert await top.press("page up")
    assert text(8) == first
    assert len(text(8).splitlines()) == 8

    assert await top.press("escape")
    assert f"> {TRANSFER}" in text()
    assert not await top.press("q")


async def test_a_broker_that_is_away_makes_the_picture_stale_from_then_on(bus: MemoryBus) -> None:
    picture = Picture()
    following = Following(bus, Topics(), picture)
    top = TopScreen(bus, Topics(), picture, following)
    assert UNHEARD[:30] in plain(top.lines(100, 20, NOW_NS))[1]
    following.listening = True
    assert "STALE" not in "\n".join(plain(top.lines(100, 20, NOW_NS)))
    bus.cut()
    assert top.has_changed(), "drawn at once"
    top.lines(100, 20, NOW_NS)
    assert "(5.0 s ago): the broker is away" in plain(top.lines(100, 20, NOW_NS + 5 * S))[1]
    bus.restore()
    assert "STALE" not in "\n".join(plain(top.lines(100, 20, NOW_NS)))


async def test_a_story_that_cannot_be_read_says_so(bus: MemoryBus) -> None:
    picture = Picture()
    pair = Pair(bus)
    pair.whole()
    async with flushed(pair.a, pair.b):
        await begin(bus, Topics(), picture)
    top = TopScreen(bus, Topics(), picture, Following(bus, Topics(), picture))
    await top.press("j")
    bus.cut()
    await top.press("enter")
    assert f"the story of {TRANSFER} cannot be read now" in plain(top.lines(120, 20, NOW_NS))[0]
    bus.restore()
    await until(lambda: bus.health().connected)
