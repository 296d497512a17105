"""What a demo shows while it waits: what is going on, and for how long."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def working(screen: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show what is going on, with a moving bar and the time, while the block runs."""
    if not screen.is_terminal:  # a log file has no use for a moving bar, but for what it would have said
        screen.print(f"{text} …")
        yield lambda said: screen.print(f"{said} …")
        return
    columns = (TextColumn("[dim]{task.description}[/]"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        bar = progress.add_task(text, total=None)
        yield lambda said: progress.update(bar, description=said)
