"""`kvbus completion`: the script by which a shell completes commands, options and the names of instances."""

import click
from click.shell_completion import get_completion_class

from kvbus.commands.common import json_option, print_document

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_KVBUS_COMPLETE"
"""By which the script asks `kvbus` for what may follow; click makes this name of the program's."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
def completion(shell: str, *, as_json: bool) -> None:
    """Print the script by which a shell completes `kvbus`.

    \b
    bash:  eval "$(kvbus completion bash)"     in ~/.bashrc
    zsh:   eval "$(kvbus completion zsh)"      in ~/.zshrc
    fish:  kvbus completion fish | source      in ~/.config/fish/config.fish
    """  # noqa: D301 - click reads the sign itself
    from kvbus.cli import kvbus

    made = get_completion_class(shell)
    if made is None:
        raise click.BadParameter(f"this version of click has no script for {shell}", param_hint="SHELL")
    script = made(kvbus, {}, "kvbus", VARIABLE).source_vars()
    source = made.source_template % script
    if as_json:
        print_document({"shell": shell, "script": source})
    else:
        click.echo(source)
