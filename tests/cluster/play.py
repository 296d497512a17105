"""Who is played when: what needs all processors first and by itself, then the other scenes some at a time.

A scene is what shares containers. Most of a story is waiting: for an election, for a peer that is missed, for a broker
that comes back. So scenes are played beside each other, each in a process, and the longest begin first.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType

from rich.console import Console

from tests.cluster.actors import Actors
from tests.cluster.files import make_model
from tests.cluster.page import write_trail
from tests.cluster.stack import ROOT, TRANSFORMERS, Stack, StackError, build, stack
from tests.cluster.stories import STORIES
from tests.cluster.story import Story
from tests.cluster.table import Row

KEPT = ROOT / "test-results" / "cluster"

Scene = tuple[Story, ...]


def turns(stories: Sequence[Story]) -> tuple[list[Scene], list[Scene]]:
    """Return the scenes that are played by themselves, and those that are played beside each other, longest first."""
    scenes = [tuple(group) for _, group in groupby(stories, lambda story: story.scene)]
    alone = [scene for scene in scenes if any(story.by_itself for story in scene)]
    beside = [scene for scene in scenes if scene not in alone]
    return alone, sorted(beside, key=lambda scene: sum(story.about_s for story in scene), reverse=True)


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to play: where to keep trails, whether images are built, and whether anything is said meanwhile."""

    trails: Path | None = None
    builds: bool = True
    quiet: bool = False


def play_all(stories: Sequence[Story], jobs: int, wishes: Wishes) -> list[Row]:
    """Play stories, so many scenes at a time; return their rows, in the order of the stories."""
    alone, beside = turns(stories)
    rows = [row for scene in alone for row in play_scene(scene, wishes)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, max(1, len(beside))), spawn, _interrupted_once) as pool:
        titles = [tuple(story.title for story in scene) for scene in beside]
        plays = [pool.submit(_play_named, scene, wishes) for scene in titles]
        try:
            rows += [row for play in plays for row in play.result()]
        except KeyboardInterrupt:  # each process takes its containers down
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                os.kill(child.pid or os.getpid(), signal.SIGINT)
            raise
    places = {(story.stack, story.fault): place for place, story in enumerate(stories)}
    return sorted(rows, key=lambda row: places[row.story, row.fault])


def _interrupted_once() -> None:
    """Let the first interrupt end what is played, and none after it what then takes containers down."""

    def end(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, end)


def _play_named(titles: Sequence[str], wishes: Wishes) -> list[Row]:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what waited already in this process's own queue
        raise KeyboardInterrupt
    return play_scene(tuple(story for story in STORIES if story.title in titles), wishes)


def play_scene(stories: Scene, wishes: Wishes) -> list[Row]:
    """Play the stories of one scene, on the same containers for as long as all is clean."""
    screen, rows = Console(stderr=True, quiet=wishes.quiet), list[Row]()
    if stories[0].stack == TRANSFORMERS:
        try:
            _prepare(screen, wishes)
        except StackError as error:
            return [Row(story.stack, story.fault, problems=[str(error)]) for story in stories]
    while len(rows) < len(stories):
        left, began = stories[len(rows) :], time.monotonic()
        try:
            with stack(left[0].stack, left[0].overlay, left[0].part, without=left[0].without) as one:
                for story in left:
                    rows.append(_play(story, one, began, wishes.trails))
                    began = time.monotonic()
                    _tell(story, rows[-1], screen)
                    if not rows[-1].is_clean:
                        break
        except StackError as error:
            if len(rows) == len(stories) - len(left):
                rows.append(Row(left[0].stack, left[0].fault))
            rows[-1].problems.append(str(error))
            screen.print(f"{left[0].title}: {error}", style="red", highlight=False, markup=False)
    return rows


def _prepare(screen: Console, wishes: Wishes) -> None:
    """Make what a real model needs: others play meanwhile, since torch is long in coming where it was never fetched."""
    if wishes.builds:
        screen.print(f"the image with torch: {build(TRANSFORMERS):.0f} s", style="dim")
    make_model()


def _play(story: Story, one: Stack, began: float, trails: Path | None) -> Row:
    row = Row(story.stack, story.fault, must_settle=story.must_settle)
    actors = Actors(one, row)
    try:
        story.play(actors)
        actors.until_home(story.workers)
        actors.judge()
        if trails is not None:
            actors.tell()
            write_trail(trails, story, row)
    except (StackError, AssertionError, OSError, KeyError, ValueError) as error:
        row.problems.append(f"{type(error).__name__}: {error}")
    if not row.is_clean:
        row.notes.append(f"logs: {one.keep_logs(KEPT / story.title.replace(', ', '-').replace(' ', '-'))}")
    row.seconds = time.monotonic() - began
    return row


def _tell(story: Story, row: Row, screen: Console) -> None:
    how = "clean" if row.is_clean else "NOT CLEAN"
    screen.print(f"{story.title}: {how}, {row.seconds:.0f} s", style="dim", highlight=False, markup=False)
    for text in row.wrongs():
        screen.print(f"  {text}", style="red", highlight=False, markup=False)
