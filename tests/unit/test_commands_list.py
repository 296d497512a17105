"""What every command keeps: `--json`, its name, and what a shell completes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvbus.cli import COMMANDS, kvbus
from kvbus.commands.completion import SHELLS
from tests.absent import absent

WORDS = (
    'eval "$1"; COMP_WORDS=({words}); COMP_CWORD={place}; _kvbus_completion kvbus; printf "%s\\n" "${{COMPREPLY[@]}}"'
)
COMMAND_S = 60.0


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands that one can run, with the groups before them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_every_command_gives_a_document_where_it_is_asked_for() -> None:
    found = dict(commands(kvbus))
    assert {name.split()[0] for name in found} == set(COMMANDS)
    silent = [name for name, command in found.items() if not any("--json" in option.opts for option in command.params)]
    assert silent == []


def test_every_command_says_what_it_is_for_in_its_first_line() -> None:
    assert [name for name, command in commands(kvbus) if not command.get_short_help_str()] == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_of_each_shell_is_a_script_that_asks_kvbus(shell: str) -> None:
    ran = CliRunner().invoke(kvbus, ["completion", shell, "--json"])

    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.output)
    assert document["shell"] == shell
    assert f"_KVBUS_COMPLETE={shell}_complete" in document["script"]


def test_a_shell_that_nobody_knows_is_refused() -> None:
    assert CliRunner().invoke(kvbus, ["completion", "tcsh"]).exit_code == 2


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with a program called kvbus, for a path to search."""
    path = tmp_path / "bin" / "kvbus"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nfrom kvbus.cli import main\n\nmain()\n")
    path.chmod(0o755)
    return path.parent


def completed(program: Path, state: Path, *words: str) -> list[str]:
    """What bash offers for the last of some words."""
    bash = shutil.which("bash")
    if bash is None:
        absent("no bash here")
    script = CliRunner().invoke(kvbus, ["completion", "bash"]).output
    assert subprocess.run([bash, "-n"], input=script, text=True, check=False, timeout=COMMAND_S).returncode == 0
    typed = WORDS.format(words=" ".join(f'"{word}"' for word in ("kvbus", *words)), place=len(words))
    environment = {
        **os.environ,
        "PATH": f"{program}{os.pathsep}{os.environ['PATH']}",
        "KVBUS_STATE": str(state),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    ran = subprocess.run(
        [bash, "--norc", "-c", typed, "bash", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_bash_completes_commands_and_the_names_of_instances_that_run_here(program: Path, tmp_path: Path) -> None:
    assert completed(program, tmp_path, "st") == ["stage", "story"]

    assert completed(program, tmp_path, "stage", "--from", "") == [], "nothing runs here"
    (tmp_path / "up.json").write_text(json.dumps({"nats_url": "nats://x", "sockets": {"left": "", "right": ""}}))
    assert completed(program, tmp_path, "stage", "--from", "") == ["left", "right"]
    assert completed(program, tmp_path, "stage", "--from", "left", "--to", "r") == ["right"]
