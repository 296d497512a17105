"""What a shell may offer while a command is typed: names that are known without asking anybody."""

import click
from click.shell_completion import CompletionItem

from kvbus.config import read_state
from kvbus.errors import ConfigError


def instance_names(context: click.Context, option: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the instances that `kvbus up` left in its state file and that begin so; none where there is no such file.

    A broker is not asked: a shell that waits for one while somebody types is worse than one that offers nothing.
    """
    del context, option
    try:
        sockets = read_state().get("sockets")
    except ConfigError:
        return []
    names = sorted(map(str, sockets)) if isinstance(sockets, dict) else []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
