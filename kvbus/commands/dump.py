"""`kvbus dump`: everything that somebody needs who looks for a fault from elsewhere, in one archive."""

import asyncio
import io
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from kvbus.commands.common import EXIT_FAILED, broker_options, connect, console, json_option, print_document
from kvbus.commands.doctor import examine
from kvbus.commands.dumping import (
    ARCHIVE_LENGTH_MAX_BYTES,
    Dump,
    host_document,
    logs,
    members_document,
    registered,
    registry_document,
    streams_document,
)
from kvbus.commands.findings import document_of
from kvbus.commands.recordings import LOGS_NAME
from kvbus.commands.wording import counted, size
from kvbus.errors import ConfigError, KvbusError
from kvbus.topics import Topics


@click.command()
@click.option("-o", "--output", "path", type=click.Path(path_type=Path, dir_okay=False), help="Where it goes.")
@click.option("--since", "since_s", type=click.FloatRange(min=0), metavar="SECONDS", help="Logs of that time only.")
@broker_options
@json_option
def dump(path: Path | None, since_s: float | None, nats_url: str, token: str, prefix: str, *, as_json: bool) -> int:
    """Write logs, states, versions and a doctor's findings into one archive, to attach to a report.

    It holds no prompts and no secrets, and is at most 64 MiB: of longer logs, the newest part. `kvbus audit` and
    `kvbus story --file` read it as it is.

    \b
    Exit status:
      0  all of it is there
      1  it was written, and some of it could not be had: its README says why
      2  it could not be written
    """  # noqa: D301 - click reads the sign itself
    path = path or Path(f"kvbus-dump-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.tar.gz")
    screen = console(as_json=as_json)
    since_ns = time.time_ns() - int(since_s * 1e9) if since_s is not None else 0
    collected = asyncio.run(
        _collected(nats_url, token, prefix, since_ns, lambda text: screen.print(f"[dim]{text} …[/]"))
    )
    length_bytes = write(path, collected)
    if as_json:
        files = {name: len(data) for name, data in collected.files.items()}
        print_document({"file": str(path), "length_bytes": length_bytes, "files": files, "missing": collected.missing})
    for name, why in collected.missing.items():
        screen.print(f"missing: {name}: {why}", soft_wrap=True, markup=False)
    parts = counted(len(collected.files), "file")
    screen.print(f"{path}: {parts}, {size(length_bytes)}", soft_wrap=True, markup=False)
    return EXIT_FAILED if collected.missing else 0


async def _collected(nats_url: str, token: str, prefix: str, since_ns: int, progress: Callable[[str], None]) -> Dump:
    found, topics = Dump(), Topics(prefix)
    found.add("host.json", "versions, the platform, and which variables are set", host_document())
    findings = await examine(nats_url, token, prefix, progress)
    found.add("doctor.json", "what `kvbus doctor` finds, UCX and its lanes among it", document_of(findings))
    progress("reading the logs")
    try:
        bus = await connect(nats_url, token, prefix, name="kvbus-dump")
    except KvbusError as error:
        found.missing[LOGS_NAME] = found.missing["members.json"] = str(error)
        return found
    try:
        members = []
        try:
            members = await registered(bus)
            found.add("registry.json", "what members say of themselves", registry_document(members))
        except KvbusError as error:
            found.missing["registry.json"] = str(error)
        about = "each member's leases and transfers now, and each instance's counters"
        await found.gather("members.json", about, lambda: members_document(bus, topics, members))
        about = "streams, buckets and consumers as the broker has them"
        await found.gather("streams.json", about, lambda: streams_document(bus, topics, members))
        about = "facts and settle decisions: a recording, compressed"
        await found.gather(LOGS_NAME, about, lambda: logs(bus, topics, since_ns))
    finally:
        await bus.close()
    return found


def write(path: Path, collected: Dump) -> int:
    """Write the archive, readable by its owner only, and return its length; ConfigError where that cannot be."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in {"README.txt": collected.readme(), **collected.files}.items():
            entry = tarfile.TarInfo(f"kvbus-dump/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    if len(data := file.getvalue()) > ARCHIVE_LENGTH_MAX_BYTES:
        raise ConfigError("the dump is too long: give --since", length_bytes=len(data), most=ARCHIVE_LENGTH_MAX_BYTES)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            os.fchmod(out.fileno(), 0o600)  # one that was there before keeps the mode that it had
            out.write(data)
    except OSError as error:
        raise ConfigError(f"the dump cannot be written: {error}; give another FILE with -o") from error
    return len(data)
