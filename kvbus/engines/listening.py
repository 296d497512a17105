"""The worker's listening socket: in a folder of its user's own, and never taken from a worker that still listens."""

import os
import socket
import stat
from pathlib import Path

from kvbus.engines.link import check_path
from kvbus.errors import ConfigError

_BACKLOG = 16  # who connects is accepted within milliseconds


def listen(path: Path) -> socket.socket:
    """Return a listening socket at path, for our user only; a socket that nobody listens on any more is replaced."""
    check_path(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.parent.stat()
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ConfigError(
            "the socket's folder must belong to this user alone; chmod 700 it, or choose another state folder",
            folder=str(path.parent),
            mode=oct(stat.S_IMODE(about.st_mode)),
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        _remove_stale(path)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError):
            raise ConfigError("the worker's socket cannot be made", path=str(path), reason=str(error)) from error
        raise
    return listener


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # its backlog is full: somebody listens
    raise ConfigError(
        "a worker listens on this socket already; stop it, or give this one another instance or member name",
        path=str(path),
    )
