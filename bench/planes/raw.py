"""The limit: process_vm_readv on the same pages, one call for each 1,024 of them, and nothing else."""

import ctypes
import errno
import os
from itertools import pairwise

IOV_MAX = 1024
"""The kernel's, for one call."""


class IoVec(ctypes.Structure):
    """One range of memory."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Batch:
    """Ranges of one call."""

    def __init__(self, pairs: list[tuple[int, int]], length_bytes: int) -> None:
        count = len(pairs)
        self.count = count
        self.length_bytes = count * length_bytes
        self.local = (IoVec * count)(*(IoVec(local, length_bytes) for local, _ in pairs))
        self.remote = (IoVec * count)(*(IoVec(remote, length_bytes) for _, remote in pairs))


class RawRead:
    """Copies ranges of another process's memory; addresses are (local, remote), each so many bytes."""

    def __init__(self, pid: int, pairs: list[tuple[int, int]], length_bytes: int) -> None:
        self.pid = pid
        cuts = [*range(0, len(pairs), IOV_MAX), len(pairs)]
        self.batches = [Batch(pairs[first:end], length_bytes) for first, end in pairwise(cuts)]
        self.readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self.readv.restype = ctypes.c_ssize_t
        self.readv.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]

    def move(self) -> None:
        """Copy everything; OSError where the kernel did not."""
        for batch in self.batches:
            moved = self.readv(self.pid, batch.local, batch.count, batch.remote, batch.count, 0)
            if moved != batch.length_bytes:
                code = ctypes.get_errno() or errno.EIO
                raise OSError(
                    code, f"process_vm_readv copied {moved} of {batch.length_bytes} bytes: {os.strerror(code)}"
                )
