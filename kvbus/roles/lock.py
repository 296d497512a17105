"""One worker per name and host: a lock on a file, which the kernel lets go when its process ends, however that was."""

import fcntl
import os
from typing import IO, Self

from kvbus.config import WorkerSettings
from kvbus.errors import ConfigError


class WorkerLock:
    """Keeps a second worker from starting under the same instance and member on this host."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._path = settings.lock_path
        self._who = f"{settings.instance}/{settings.member}"
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            pid = file.read().strip() or "unknown"
            file.close()
            raise ConfigError(
                f"a worker of {self._who} is running already (process {pid}): stop it, or give another --member"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
