"""What `kvbus top` shows now: the picture, or one transfer's story; and what each key does to it."""

import asyncio
import io

from rich.console import Console
from rich.text import Text

from kvbus.commands.logs import LogReader
from kvbus.commands.recordings import EVENTS_MAX
from kvbus.commands.rendering import print_story
from kvbus.commands.stories import Story, tell
from kvbus.commands.top_view import Look, screen
from kvbus.errors import BusError
from kvbus.picture.following import Following
from kvbus.picture.whole import Picture
from kvbus.topics import Topics
from kvbus.transport import Bus

ROWS_MAX = 100
"""Rows of each kind that are kept for drawing: more than a screen holds."""
STORY_WAIT_S = 10.0
"""For reading the log and telling a story; a log of an hour of much traffic takes seconds."""
STORY_KEYS = "escape goes back · ↑ ↓ scroll · q quits"
AWAY = "the broker is away; what stands here was true then"
UNHEARD = "facts are not heard yet; what stands here may be old"


class TopScreen:
    """Turns keys and the picture into lines. The clock is the caller's."""

    def __init__(self, bus: Bus, topics: Topics, picture: Picture, following: Following) -> None:
        self._bus = bus
        self._topics = topics
        self._picture = picture
        self._following = following
        self._selected = ""
        self._story: list[Text] | None = None
        self._scrolled = 0
        self._width, self._height = 80, 24
        self._stale_ns = 0
        self._drawn: object = None

    def has_changed(self) -> bool:
        """Whether something is to be drawn anew."""
        return self._state() != self._drawn

    def lines(self, width: int, height: int, now_ns: int) -> list[Text]:
        """Return the lines of the screen as it is now."""
        self._width, self._height = width, height
        self._note_silence(now_ns)
        self._drawn = self._state()
        if self._story is not None:
            return self._story_lines(self._story)
        look = Look(now_ns, self._bus.health().server, self._stale_ns, self._why_stale(), self._selected)
        return screen(self._picture.show(ROWS_MAX), look, width=width, height=height)

    async def press(self, key: str) -> bool:
        """Act on a key; False where it ends it all."""
        if key == "q":
            return False
        if self._story is not None:
            self._press_in_story(key)
        elif key in {"up", "k"}:
            self._select(-1)
        elif key in {"down", "j"}:
            self._select(1)
        elif key == "enter" and self._selected:
            await self._open(self._selected)
        return True

    # ------------------------------------------------------------------------------------------------------- picture

    def _state(self) -> object:
        health = self._bus.health().connected
        return self._picture.events, health, self._following.listening, self._selected, id(self._story), self._scrolled

    def _note_silence(self, now_ns: int) -> None:
        if not self._why_stale():
            self._stale_ns = 0
        elif not self._stale_ns:
            self._stale_ns = now_ns

    def _why_stale(self) -> str:
        if not self._bus.health().connected:
            return AWAY
        return "" if self._following.listening else UNHEARD

    def _select(self, by: int) -> None:
        shown = self._picture.show(ROWS_MAX)
        names = [*(row.transfer for row in shown.transfers), *(row.transfer for row in shown.ended)]
        if not names:
            self._selected = ""
        elif self._selected in names:
            self._selected = names[max(0, min(len(names) - 1, names.index(self._selected) + by))]
        else:
            self._selected = names[0]

    # --------------------------------------------------------------------------------------------------------- story

    async def _open(self, transfer: str) -> None:
        self._scrolled = 0
        try:
            async with asyncio.timeout(STORY_WAIT_S):
                events = [seen.event async for seen in LogReader(self._bus, self._topics).newest(EVENTS_MAX)]
                told = await asyncio.to_thread(tell, events, transfer)
        except (BusError, TimeoutError) as error:
            why = str(error) or f"it took longer than {STORY_WAIT_S:g} s"
            self._story = [Text(f"the story of {transfer} cannot be read now: {why}", "yellow")]
            return
        self._story = self._told(told) if isinstance(told, Story) else [Text(told.reason, style="yellow")]

    def _told(self, story: Story) -> list[Text]:
        paper = Console(file=io.StringIO(), width=self._width, force_terminal=True, color_system="standard")
        print_story(paper, story)
        file = paper.file
        text = file.getvalue() if isinstance(file, io.StringIO) else ""
        return [Text.from_ansi(line, no_wrap=True) for line in text.splitlines()]

    def _press_in_story(self, key: str) -> None:
        by = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -self._room, "page down": self._room}.get(key)
        if by is not None and self._story is not None:
            self._scrolled = max(0, min(len(self._story) - self._room, self._scrolled + by))
        elif key in {"escape", "back", "left", "enter"}:
            self._story = None

    @property
    def _room(self) -> int:
        return max(1, self._height - 1)

    def _story_lines(self, story: list[Text]) -> list[Text]:
        lines = story[self._scrolled : self._scrolled + self._room]
        lines += [Text()] * (self._room - len(lines))
        return [*lines, Text(STORY_KEYS, style="dim", no_wrap=True)]
