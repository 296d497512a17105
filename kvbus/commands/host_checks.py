"""What a doctor looks at on this host: Python and its packages, the kernel, limits, files, the model, the GPU.

Nothing here imports torch, asks the network, or writes.
"""

import importlib.metadata
import os
import platform
import re
import resource
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvbus.broker import find_server
from kvbus.commands.findings import Finding, Notes, address_of
from kvbus.commands.wording import size
from kvbus.config import read_state, state_dir, state_file
from kvbus.engines.model_cache import SMOLLM2, default_folder, is_ready
from kvbus.errors import ConfigError
from kvbus.pool.host_memory import available_bytes
from kvbus.version import VERSION

PYTHON_FLOOR = (3, 11)
FILES_MIN = 1024
"""The usual soft limit: half of it for watched processes, half for sockets and pools."""
MEMORY_MIN_BYTES = 1 << 30
"""A pool of 256 pages and an engine take less; with under a gigabyte left the kernel may kill one of them."""

Limit = tuple[int, int]
"""Soft and hard."""

_RANGE = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)")
_ROOT = Path("/")


# ------------------------------------------------------------------------------------------------------------- python


def check_python(wanted: Sequence[str] | None = None) -> list[Finding]:
    """Look at Python and at the packages that kvbus needs: its own metadata names them, unless they are given."""
    notes = Notes("python")
    version = platform.python_version()
    if sys.version_info[:2] < PYTHON_FLOOR:
        notes.wrong("python", version, "use Python 3.11 or newer")
    else:
        notes.ok("python", f"{version} at {sys.executable}")
    notes.ok("kvbus", VERSION)
    if wanted is None:
        try:
            wanted = importlib.metadata.requires("kvbus") or []
        except importlib.metadata.PackageNotFoundError:
            notes.warning("packages", "kvbus runs from a folder, so its needs are not known", "pip install kvbus")
            return notes.findings
    _packages(notes, [text for text in wanted if "extra ==" not in text])
    return notes.findings


def _packages(notes: Notes, wanted: list[str]) -> None:
    there: list[str] = []
    for text in wanted:
        name, bounds = _named(text)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            notes.wrong(name, "not installed", f'pip install "{name}{bounds}"')
            continue
        if fits(version, bounds):
            there.append(f"{name} {version}")
        else:
            notes.wrong(name, f"{version}, and kvbus needs {bounds}", f'pip install "{name}{bounds}"')
    if there:
        notes.ok("packages", ", ".join(there))


def _named(requirement: str) -> tuple[str, str]:
    matched = _RANGE.fullmatch(requirement.strip())
    if matched is None:
        return requirement, ""
    return matched[1], matched[2].strip().strip("()").replace(" ", "")


def fits(version: str, bounds: str) -> bool:
    """Tell whether a version lies within bounds such as `>=8.1,<9`; compared by its leading numbers."""
    found = _numbers(version)
    for operator, text in _BOUND.findall(bounds):
        limit = _numbers(text)
        length = max(len(found), len(limit))
        ours, theirs = (part + (0,) * (length - len(part)) for part in (found, limit))
        kept = {
            ">=": ours >= theirs,
            "<=": ours <= theirs,
            "==": ours == theirs,
            "!=": ours != theirs,
            "<": ours < theirs,
            ">": ours > theirs,
        }
        if not kept[operator]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    matched = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in matched[0].split(".")) if matched else (0,)


# ------------------------------------------------------------------------------------------------------------- kernel


def check_kernel(root: Path = _ROOT, limit_of: Callable[[int], Limit] = resource.getrlimit) -> list[Finding]:
    """Look at what kvbus asks of the kernel: memfds, pidfds, memory, huge pages, and the limits of this process."""
    notes = Notes("kernel")
    notes.ok("kernel", f"{platform.system()} {platform.release()}, {os.cpu_count()} cores")
    _calls(notes)
    _memory(notes, root)
    _huge_pages(notes, root)
    _limits(notes, root, limit_of)
    return notes.findings


def _calls(notes: Notes) -> None:
    try:
        os.close(os.memfd_create("kvbus-doctor", os.MFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        notes.wrong("memfd, pidfd", f"not usable: {error}", "run a kernel of 5.3 or newer, without a filter on these")
    else:
        notes.ok("memfd, pidfd", "usable: pools are memfds, deaths of processes are proved by pidfds")


def _memory(notes: Notes, root: Path) -> None:
    left = available_bytes(root)
    if left is None:
        notes.warning("memory", "cannot be told", "mount /proc")
    elif left < MEMORY_MIN_BYTES:
        notes.warning("memory", f"{size(left)} left", "free some, or start workers with fewer --pages")
    else:
        notes.ok("memory", f"{size(left)} left{_shared_memory(root)}")


def _shared_memory(root: Path) -> str:
    try:
        space = os.statvfs(root / "dev/shm")
    except OSError:
        return ", no /dev/shm: kvbus needs none, pools are memfds"
    return f", {size(space.f_bavail * space.f_frsize)} in /dev/shm, of which kvbus needs none"


def _huge_pages(notes: Notes, root: Path) -> None:
    path = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    chosen = re.search(r"\[(\w+)\]", _text(path))
    if chosen is None:
        notes.warning("huge pages", "the kernel does not say whether memfds get them", "go on: pools get small ones")
    elif chosen[1] in {"always", "advise", "within_size", "force"}:
        notes.ok("huge pages", f"for shared memory: {chosen[1]}")
    else:
        notes.warning(
            "huge pages",
            f"for shared memory: {chosen[1]}, so that reading pools is up to a fifth slower",
            f"as root: echo advise > {path}",
        )


def _limits(notes: Notes, root: Path, limit_of: Callable[[int], Limit]) -> None:
    soft, hard = limit_of(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_MIN:
        notes.warning("open files", f"at most {_limit(soft)} (hard limit {_limit(hard)})", f"ulimit -n {FILES_MIN}")
    else:
        notes.ok("open files", f"at most {_limit(soft)} (hard limit {_limit(hard)})")
    locked, _ = limit_of(resource.RLIMIT_MEMLOCK)
    shown = "any amount" if locked == resource.RLIM_INFINITY else f"at most {size(locked)}"
    if locked != resource.RLIM_INFINITY and _rdma(root):
        notes.warning("locked memory", f"{shown}, and this host has RDMA: {_rdma(root)}", "ulimit -l unlimited")
    else:
        notes.ok("locked memory", f"{shown}; only RDMA and GPUs would need it")


def _limit(value: int) -> str:
    return "any number" if value == resource.RLIM_INFINITY else str(value)


def _rdma(root: Path) -> str:
    try:
        return ", ".join(sorted(path.name for path in (root / "sys/class/infiniband").iterdir()))
    except OSError:
        return ""


# --------------------------------------------------------------------------------------------------------------- files


def check_files(environ: Mapping[str, str], root: Path = _ROOT) -> list[Finding]:
    """Look at the state folder, the broker's program, the model of the demo, and at whether there is a GPU."""
    notes = Notes("files")
    _state(notes)
    _server(notes, environ)
    folder = default_folder(environ)
    if is_ready(folder):
        notes.ok("model", f"{SMOLLM2.name} at {folder}")
    elif folder.exists():
        notes.warning("model", f"{folder} is not whole", f"remove it, and run scripts/get_model: {SMOLLM2.name}")
    else:
        notes.ok("model", f"not here; the real-model demo fetches it to {folder}")
    _gpu(notes, root)
    return notes.findings


def _state(notes: Notes) -> None:
    folder = state_dir()
    try:
        found = folder.stat()
    except FileNotFoundError:
        notes.ok("state folder", f"{folder}: not there yet, `kvbus up` makes it")
        return
    except OSError as error:
        notes.wrong("state folder", f"{folder}: {error.strerror}", "set KVBUS_STATE to a folder of your own")
        return
    if not stat.S_ISDIR(found.st_mode):
        notes.wrong("state folder", f"{folder} is no folder", "remove it, or set KVBUS_STATE to a folder of your own")
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        notes.wrong("state folder", f"{folder} cannot be written by you", f"sudo chown -R $USER {folder}")
    elif found.st_mode & 0o022:
        notes.warning("state folder", f"{folder} can be written by others", f"chmod 700 {folder}")
    else:
        notes.ok("state folder", f"{folder}, mode {stat.S_IMODE(found.st_mode):o}")
    _state_file(notes)


def _state_file(notes: Notes) -> None:
    path = state_file()
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        notes.ok("state file", "not there: no `kvbus up` runs with this state folder")
        return
    except OSError as error:
        notes.wrong("state file", f"{path}: {error.strerror}", f"make {path.parent} readable for you")
        return
    try:
        document = read_state()
    except ConfigError as error:
        notes.wrong("state file", str(error).split(";")[0], f"stop kvbus, remove {path}, start again")
        return
    if mode & 0o077:
        notes.warning("state file", f"{path} holds a token, and others can read it", f"chmod 600 {path}")
    else:
        notes.ok("state file", f"{path} names the broker {address_of(str(document['nats_url']))}")


def _server(notes: Notes, environ: Mapping[str, str]) -> None:
    try:
        notes.ok("nats-server", str(find_server(environ.get("KVBUS_NATS_SERVER"))))
    except ConfigError as error:
        step = "unset KVBUS_NATS_SERVER" if environ.get("KVBUS_NATS_SERVER") else "pip install 'kvbus[server]'"
        notes.warning("nats-server", str(error), f"{step}; only `kvbus up` and `kvbus demo` need it")


def _gpu(notes: Notes, root: Path) -> None:
    cards = sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))
    driver = re.search(r"\d+(?:\.\d+)+", _text(root / "proc/driver/nvidia/version"))
    if cards:
        notes.ok("gpu", f"{', '.join(cards)}{f', driver {driver[0]}' if driver else ''}")
    elif (root / "dev/kfd").exists():
        notes.ok("gpu", "an AMD card (/dev/kfd); kvbus keeps pages in host memory")
    else:
        notes.ok("gpu", "none, and none is needed")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
