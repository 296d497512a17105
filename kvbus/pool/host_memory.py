"""How much memory this process may still take: asked before a pool is made, since too much may mean a kill."""

from pathlib import Path

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return the smaller of what the host and the control groups above this process leave; None where nothing tells.

    `root` is the file system to read /proc and /sys under. Memory that a group uses for file pages counts as free:
    the kernel takes it back on demand.
    """
    answers = [amount for amount in (_host_bytes(root), *_group_bytes(root)) if amount is not None]
    return min(answers, default=None)


def _host_bytes(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        if key == "MemAvailable" and rest.split():
            return int(rest.split()[0]) * 1024
    return None


def _group_bytes(root: Path) -> list[int | None]:
    place = next((line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), None)
    if place is None:
        return []
    mount = root / "sys/fs/cgroup"
    folder = mount / place.lstrip("/")
    return [_left_in(group) for group in (folder, *folder.parents) if group.is_relative_to(mount)]


def _left_in(group: Path) -> int | None:
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():  # "max", or a group without this controller
        return None
    cached = 0
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in {"active_file", "inactive_file"}:
            cached += int(value)
    return max(0, int(limit) - int(used) + cached)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
