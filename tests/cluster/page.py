"""The page of failure stories: what was played, what came of it, and the trail of facts of the transfer it met."""

import inspect
import json
import re
from pathlib import Path

from tests.cluster.stack import ROOT
from tests.cluster.stories import STORIES
from tests.cluster.story import Story
from tests.cluster.table import Row

PAGE = ROOT / "docs" / "failure-stories.md"
WHEN = re.compile(r" +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$")
LINES_MAX = 44
"""Of a trail: the beginning and the end of longer ones are shown."""
HEAD = """\
# Failure stories

What goes wrong in a cluster, played on containers, and the facts that were left behind. Each is a story of
`make cluster`; `docker compose -f compose/FILE.yaml up` gives the same containers to anyone. The text is what
`python -m tests.cluster --trails FOLDER` kept of a run, written by `--page FOLDER`: ids and times are of that run.

How to read a trail: one line for each fact, in the column of whoever told it, with the milliseconds since the request.
A lease ends by evidence: `completed`, `peer_ack`, `endpoint_destroyed`, `process_dead`, or `never_submitted`. Where
there is none, it is kept.
"""


def write_trail(folder: Path, story: Story, row: Row) -> None:
    """Keep what one story came to."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{_name(story)}.json").write_text(json.dumps(row.document(), indent=2) + "\n", encoding="utf-8")


def page(folder: Path) -> str:
    """Return the page of all stories of which something clean was kept, in their order."""
    parts = [HEAD]
    for story in STORIES:
        kept = folder / f"{_name(story)}.json"
        if kept.is_file():
            document = json.loads(kept.read_text(encoding="utf-8"))
            if document["clean"]:
                parts.append(_section(story, document))
    return "\n".join(parts)


def _section(story: Story, row: dict[str, object]) -> str:
    counts = ", ".join(f"{row[name]} {name}" for name in ("transfers", "settled", "failed", "lost", "leaked", "wrong"))
    text = inspect.getdoc(story.play) or story.fault
    lines = [f"## {story.title}", "", text, "", f"`compose/{story.stack}.yaml`: {counts}; audit {row['audit']}.", ""]
    notes = row["notes"]
    lines += [f"- {note}" for note in notes] if isinstance(notes, list) else []
    trail = row["trail"]
    if isinstance(trail, list) and trail:
        lines += ["", "```", *_trimmed([WHEN.sub("", str(line)) for line in trail]), "```"]
    return "\n".join([*lines, ""])


def _trimmed(trail: list[str]) -> list[str]:
    if len(trail) <= LINES_MAX:
        return trail
    half = LINES_MAX // 2
    return [*trail[:half], f"… {len(trail) - 2 * half} lines …", *trail[-half:]]


def _name(story: Story) -> str:
    return story.title.replace(", ", "-").replace(" ", "-").replace("'", "")
