"""What a doctor tries out between two processes of this host: reading mapped memory, and reading by UCX."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from kvbus.commands.findings import Finding, Notes

START_S = 15.0
"""Two interpreters that import numpy and load UCX take half a second, and some seconds on a busy host."""
END_S = 2.0

_ROOT = Path("/")
_MARK = b"neighbour "


async def check_transports(environ: Mapping[str, str], root: Path = _ROOT) -> list[Finding]:
    """Start two siblings, let one read from the other in both ways, and say what came of it; within two START_S."""
    notes = Notes("transports")
    offered, said = await _try()
    if offered is None or said is None:
        notes.wrong("trial", "two processes of kvbus did not get to reading from each other", _trial_step(environ))
    else:
        _memory(notes, str(said.get("memory", "")), root)
        _ucx(notes, offered, said.get("ucx"), environ)
    _network(notes, root)
    return notes.findings


def _memory(notes: Notes, problem: str, root: Path) -> None:
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope").strip()
    rule = f"ptrace_scope {scope}" if scope else "no ptrace restriction"
    if not problem:
        notes.ok("memory", f"one process can map another's pool ({rule})")
        return
    step = "sysctl kernel.yama.ptrace_scope=0" if scope not in {"", "0"} else "give the container CAP_SYS_PTRACE"
    notes.warning("memory", f"one process cannot read another: {problem} ({rule})", f"{step}; else pages take a socket")


def _ucx(notes: Notes, offered: Mapping[str, object], read: object, environ: Mapping[str, str]) -> None:
    library = offered.get("ucx")
    if not isinstance(library, dict) or not isinstance(read, dict):
        problem = str(offered.get("ucx_error") or "the reading side could not start it").partition(";")[0]
        step = "unset KVBUS_UCX_LIBRARY" if environ.get("KVBUS_UCX_LIBRARY") else "pip install libucx-cu12"
        notes.wrong("ucx", problem, f"{step}; until then --transport memory or socket")
        return
    path = Path(str(library["path"]))
    origin = "named by KVBUS_UCX_LIBRARY" if environ.get("KVBUS_UCX_LIBRARY") else "wheel"
    notes.ok("ucx", f"{library['version']} ({origin}) at {path}")
    notes.ok("ucx modules", _modules(path))
    if foreign := sorted(name for name in environ if name.startswith("UCX_")):
        notes.ok("ucx variables", f"{', '.join(foreign)}: kvbus's own settings come first")
    lanes, problem = [str(lane) for lane in read["lanes"]], str(read["problem"])
    if problem:
        notes.wrong("ucx read", f"over {', '.join(lanes) or 'no lane'}: {problem}", "use --transport memory or socket")
    elif any(lane.startswith("cma") for lane in lanes):
        notes.ok("ucx read", f"between two processes over {', '.join(lanes)}")
    else:
        notes.warning(
            "ucx read",
            f"between two processes over {', '.join(lanes)} only: half as fast as cma",
            "let workers of one host share their pid and ipc namespaces, and give them CAP_SYS_PTRACE",
        )


def _modules(library: Path) -> str:
    """Name the transports that this UCX was built with beside its own tcp; their files tell."""
    folder = library.resolve().parent / "ucx"
    found = sorted({path.name.split(".")[0].removeprefix("libuct_") for path in folder.glob("libuct_*.so*")})
    rdma = "RDMA" if {"ib", "rdmacm", "ib_mlx5"} & set(found) else "no RDMA"
    return f"tcp{''.join(f', {name}' for name in found)}; {rdma}"


def _network(notes: Notes, root: Path) -> None:
    try:
        rdma = sorted(path.name for path in (root / "sys/class/infiniband").iterdir())
    except OSError:
        rdma = []
    devices = ", ".join(sorted(name for _, name in socket.if_nameindex()))
    found = f"RDMA {', '.join(rdma)}" if rdma else "no RDMA device"
    notes.ok("network", f"{devices}; {found}")


def _trial_step(environ: Mapping[str, str]) -> str:
    if environ.get("KVBUS_UCX_LIBRARY"):
        return "unset KVBUS_UCX_LIBRARY and try again: that library may end whoever loads it"
    return "run `python -m kvbus.commands.neighbour offer` and see how it ends"


# ------------------------------------------------------------------------------------------------------------ siblings


async def _try() -> tuple[dict[str, object] | None, dict[str, object] | None]:
    async with _sibling("offer") as offering:
        offered = await _document(offering)
        if offered is None:
            return None, None
        async with _sibling("read") as reading:
            if reading.stdin is not None:
                with suppress(OSError):
                    reading.stdin.write(json.dumps(offered).encode() + b"\n")
                    await reading.stdin.drain()
            return offered, await _document(reading)


@asynccontextmanager
async def _sibling(what: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A neighbour process for the length of the block; gone afterwards, whatever it does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvbus.commands.neighbour", what),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env=dict(os.environ),
    )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _document(process: asyncio.subprocess.Process) -> dict[str, object] | None:
    """Return what a neighbour says, or None where it ends, or says nothing within START_S."""
    if process.stdout is None:
        return None
    with suppress(TimeoutError, ValueError):
        async with asyncio.timeout(START_S):
            async for line in process.stdout:
                if line.startswith(_MARK):
                    said = json.loads(line.removeprefix(_MARK))
                    return said if isinstance(said, dict) else None
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
