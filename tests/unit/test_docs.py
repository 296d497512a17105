"""What the pages show is what the files hold, and what they tell people to type is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvbus.cli import COMMANDS, kvbus

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "DESIGN.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


def test_readme_shows_the_script_that_docs_hold() -> None:
    script = (ROOT / "docs" / "request_transfer.py").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert f"```python\n{script}```" in readme


def test_every_command_of_the_makefile_is_listed_by_help() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for target in ("setup", "demo", "test", "lint", "bench", "clean"):
        assert any(line.startswith(f"{target}:") and " ## " in line for line in makefile.splitlines())


def test_the_prompt_that_readme_cuts_out_of_a_file_is_text() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cuts = re.findall(r"head -c (\d+) (\S+) > prompt.txt", readme)

    assert cuts
    for length, name in cuts:
        text = (ROOT / name).read_bytes()[: int(length)].decode()
        assert len(text) == int(length), "the toy engine's tokens are bytes, and README says how many there are"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_commands_and_options_that_a_page_shows_exist(page: str) -> None:
    wrong = []
    for name, rest, line in shown_commands((ROOT / page).read_text(encoding="utf-8")):
        command = kvbus.get_command(click.Context(kvbus), name)
        if name not in COMMANDS or command is None:
            wrong.append(f"no command {name}: {line}")
            continue
        words = rest.split()
        if isinstance(command, click.Group) and words and words[0] in command.commands:
            command = command.commands[words[0]]
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help", "-h"}
        asked = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", rest)
        wrong += [f"{name} has no {option}: {line}" for option in asked if option not in known]
    assert not wrong


def test_what_is_no_command_or_option_would_be_noticed() -> None:
    block = (
        "kvbus stage --from a \\\n    --too b   # --not-read\nFOO=1 kvbus vllm -- --model m\nrun --namespace kvbus wait"
    )
    text = f"Say `kvbus stag x`.\n```\n{block}\n```\n"

    assert [(name, rest.split()) for name, rest, _ in shown_commands(text)] == [
        ("stage", ["--from", "a", "--too", "b"]), ("vllm", []), ("stag", ["x"]),
    ]  # fmt: skip


@pytest.mark.parametrize("page", sorted({*PAGES, "GLOSSARY.md", "CHANGELOG.md"}))
def test_links_lead_to_files_and_headings_that_are_there(page: str) -> None:
    here = ROOT / page
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", here.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = here.parent / path if path else here
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def shown_commands(text: str) -> Iterator[tuple[str, str, str]]:
    """Each kvbus command that a page shows: its name, what follows it up to what is not kvbus's own, and the line."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in lines:
        for found in re.finditer(r"(?:^|[\s/;|&(])(?<!--namespace )kvbus ([a-z][a-z-]*)([^#;|&)]*)", line):
            yield found[1], re.split(r"\s--(?:\s|$)", found[2])[0], line


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}
