"""The command line: one group, whose commands are imported only when they run, so that `kvbus --help` is quick."""

import importlib
import sys

import click

from kvbus.version import VERSION

COMMANDS = {
    "up": "Start a broker and two instances on this host.",
    "demo": "Show the story end to end, then exit.",
    "stage": "Bring the KV of a prompt from one instance to another.",
    "top": "Show the cluster live in this terminal.",
    "watch": "Follow the facts of all instances.",
    "story": "Tell one transfer's life.",
    "audit": "Prove or refute that ownership was kept.",
    "doctor": "Say what is wrong with this host, the broker or the workers.",
    "drain": "Let an instance finish what it has, and leave.",
    "migrate": "Bring what one instance holds to another.",
    "replicate": "Bring a prefix, or the hottest ones, to several instances.",
    "dump": "Write logs, states and a doctor's findings into one archive.",
    "worker": "Run one member of one instance.",
    "vllm": "Run a vLLM server together with a worker that lends and takes its KV.",
    "bridge": "Bring what an engine says of its own cache onto the bus, for routers.",
    "gateway": "Serve HTTP: transfers, their outcomes and counters, health, OpenAPI.",
    "auth": "Say who may speak: credentials for instances, requesters and observers.",
    "init": "Create the streams and buckets on a broker.",
    "completion": "Print the script by which a shell completes all this.",
    "sim": "Run simulated instances while everything goes wrong, and check each step.",
}
"""Each command lives in `kvbus/commands/<name>.py` under its own name."""


class LazyGroup(click.Group):
    """A group that knows its commands' names and first lines, and imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which people need them."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, or return None for an unknown name."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"kvbus.commands.{cmd_name}"), cmd_name)
        if not isinstance(command, click.Command):
            raise TypeError(f"kvbus.commands.{cmd_name}.{cmd_name} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="kvbus")
def kvbus() -> None:
    """Move KV-cache pages between LLM inference instances, with ownership that can be proved."""


def main() -> None:
    """Run the command line; errors that a person can mend end with status 2 and one sentence."""
    from kvbus.commands.common import run

    sys.exit(run(kvbus))
