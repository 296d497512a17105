"""Releases that no source has confirmed by the time a worker stops: kept in its folder, and brought by its next run.

The word is that of the run that read: it names its key and its nonce, and stands there because its access had ended.
Who brings it says nothing of its own (P4), and repeats it like any other until the source confirms it (P18).
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kvbus.config import WorkerSettings
from kvbus.parts import ProcessIdentity, ReaderKey

log = logging.getLogger(__name__)


class SourceProcess(BaseModel):
    """One process of a source: where it is told, and how its end is noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance: str
    member: str
    epoch: int
    process: ProcessIdentity


class OwedRelease(BaseModel):
    """One word that access has ended, and who has not confirmed it."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex")

    key: ReaderKey
    nonce: bytes
    source: SourceProcess


_ROWS = TypeAdapter(tuple[OwedRelease, ...])


def owed_path(settings: WorkerSettings) -> Path:
    """Return where a member keeps them between two runs."""
    return settings.lock_path.with_suffix(".owed")


def keep_owed(path: Path, owed: Sequence[OwedRelease]) -> None:
    """Keep these, and nothing else; a folder that cannot be written only costs the word."""
    try:
        if not owed:
            path.unlink(missing_ok=True)
            return
        part = path.with_suffix(".part")
        part.touch(mode=0o600)
        part.write_bytes(_ROWS.dump_json(tuple(owed)))
        part.replace(path)
    except OSError as error:
        log.warning("releases for the next run cannot be kept: %s", error)


def kept_owed(path: Path) -> tuple[OwedRelease, ...]:
    """Return what the last run kept; it stays there until `keep_owed`, so that a crash loses none."""
    try:
        return _ROWS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError) as error:
        log.warning("releases of the last run cannot be read: %s", error)
        return ()
