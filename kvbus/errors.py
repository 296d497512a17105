"""One tree of errors; the class says who is at fault, the message what to do next.

KvbusError
├── ConfigError               the operator: a setting, a file, a missing program
├── PeerError                 they: another instance or a requester broke the rules
├── BackendError              the transport: UCX, a socket, a memory mapping
├── BusError                  the broker or the way to it
└── LedgerContradictionError  we: the ledger was told two things that exclude each other

A refusal that is expected in normal work (busy, deduped, source not allowed, pool full) is a value, never an exception.
"""


class KvbusError(Exception):
    """An error that keeps its parts: a sentence for people, and named details for programs."""

    def __init__(self, message: str, /, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        if not self.details:
            return self.message
        parts = ", ".join(f"{name}={value!r}" for name, value in self.details.items())
        return f"{self.message} ({parts})"


class ConfigError(KvbusError):
    """The operator can mend this: the message names the setting and says how."""


class PeerError(KvbusError):
    """Another party sent something that the protocol forbids; it is counted, and this worker goes on."""


class BackendError(KvbusError):
    """A data-plane transport failed; the message carries the transport's own status."""


class BusError(KvbusError):
    """The broker could not be reached, or it refused."""


class LedgerContradictionError(KvbusError):
    """The ledger was given facts that exclude each other: a fault of ours, the only one that may stop a worker."""
