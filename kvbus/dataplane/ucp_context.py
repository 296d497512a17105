"""UCX contexts: which library settings hold, which memory UCX may touch, and whose process that is."""

import ctypes
import os
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from kvbus.dataplane import ucp_abi as abi
from kvbus.dataplane.ucp_abi import Library
from kvbus.errors import BackendError, ConfigError

PINNED_SETTINGS: Final = MappingProxyType(
    {
        "RNDV_THRESH": "inf",  # with rendezvous and error handling UCX gives CMA up: 0.6 instead of 5 GB/s measured
        "TCP_TX_SEG_SIZE": "512K",  # gets over tcp: 0.7 -> 2.3 GB/s measured between 256K and 1M
        "TCP_RX_SEG_SIZE": "512K",
    }
)
TURN_BYTES_MAX: Final = 504 << 10
"""A get that the peer's UCX answers by one message: a segment of TCP_TX_SEG_SIZE, less more than its headers take."""

DEFAULT_SETTINGS: Final = MappingProxyType(
    {
        "TLS": "tcp,cma",  # measured lanes: tcp for control and keepalive, cma for gets on one host
        # Whoever connects can read this process, so other hosts can only when the operator says so.
        "NET_DEVICES": "lo",
        "CMA_TX_QUOTA": "16",  # segments per progress call: 16 KiB pages 1.5 -> 2.1 GB/s measured
        # UCX's own messages that look for a peer: over tcp and cma a dead process is seen without them, and a source's
        # would be the message after which the kernel refuses its answer (ucx_strands.py).
        "KEEPALIVE_INTERVAL": "inf",
    }
)

_ADDRESS_END: Final = 2**64


class Closable(Protocol):
    """Something that a context closes before it closes itself."""

    def close(self) -> None:
        """Close it; repeats do nothing."""
        ...


class Owned:
    """What every handle shares: the process it belongs to, and being closed."""

    def __init__(self, library: Library, noun: str, handle: int | None) -> None:
        self.library = library
        self._noun = noun
        self.handle = handle
        """UCX's handle, or None once it is given up; public for the hot path alone."""
        self.pid = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether this object has given up its UCX handle; it then refuses every use."""
        return self.handle is None

    def live_handle(self) -> int:
        """Give UCX's handle; BackendError if it is closed or belongs to another process."""
        self.require_own_process()
        if self.handle is None:
            raise BackendError(f"the UCX {self._noun} is closed; open a new one")
        return self.handle

    def forget(self) -> None:
        """Note that UCX has released the handle."""
        self.handle = None

    def require_own_process(self) -> None:
        """Refuse use after a fork (BackendError)."""
        if os.getpid() != self.pid:
            raise BackendError(
                f"the UCX {self._noun} belongs to process {self.pid}; start children by spawn, not by fork"
            )

    def check(self, status: int, action: str) -> None:
        """Raise BackendError with UCX's own words if the status is an error."""
        if status < 0:
            raise BackendError(f"UCX could not {action}: {self.library.status_text(status)}", status=status)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'closed' if self.closed else hex(self.handle or 0)}>"


class MemoryHandle(Owned):
    """Local memory that UCX may write into, or let peers read.

    Unmapping revokes nothing on tcp and cma: a peer that holds the key can still read. So memory that was
    ever exported must stay mapped in the process while the process lives.
    """

    def __init__(self, context: "Context", handle: int, address: int, length_bytes: int) -> None:
        super().__init__(context.library, "memory handle", handle)
        self.context = context
        self.address = address
        self.length_bytes = length_bytes
        self.end = address + length_bytes
        self.in_flight = 0
        """Gets that may still write here; the handle cannot be unmapped before it is 0."""
        self.get_params = abi.RequestParams(
            op_attr_mask=abi.OP_MEMH | abi.OP_MEMORY_TYPE, memory_type=abi.MEMORY_TYPE_HOST, memh=handle
        )
        self.get_params_address = ctypes.addressof(self.get_params)

    def require_range(self, address: int, length_bytes: int) -> None:
        """ValueError unless the range lies inside this memory."""
        if address < self.address or address + length_bytes > self.end:
            raise ValueError(
                f"local_address: [{address:#x}, +{length_bytes}) is not inside the mapped memory "
                f"[{self.address:#x}, +{self.length_bytes})"
            )


class Context(Owned):
    """One UCX instance of this process: its settings, its mapped memory and what was opened on it."""

    def __init__(self, library: Library, handle: int, settings: Mapping[str, str]) -> None:
        super().__init__(library, "context", handle)
        self.settings = settings
        self._memory: set[MemoryHandle] = set()
        self.users: set[Closable] = set()
        """What must be closed before the context: its workers."""

    @classmethod
    def open(cls, library: Library, settings: Mapping[str, str] | None = None) -> "Context":
        """Open UCX with these settings over DEFAULT_SETTINGS; an operator's UCX_* variables cannot undo them.

        ConfigError, naming the setting, for a name or a value that UCX refuses and for a pinned one.
        """
        merged = {**DEFAULT_SETTINGS, **PINNED_SETTINGS, **_checked_settings(settings or {})}
        _require_devices(merged["NET_DEVICES"])
        status, handle = _init(library, merged)
        if status < 0:
            raise ConfigError(
                f"UCX {_dotted(library)} cannot start with these settings: {library.status_text(status)}; "
                "TLS and NET_DEVICES must name what this host has",
                settings=dict(merged),
            )
        return cls(library, handle, MappingProxyType(merged))

    def map(self, address: int, length_bytes: int) -> MemoryHandle:
        """Let UCX use this host memory, which the caller keeps alive and mapped until the context is
        closed.
        """
        handle = self.live_handle()
        require_range("address", address, length_bytes)
        params = abi.MemoryMapParams(
            field_mask=abi.MEM_MAP_ADDRESS | abi.MEM_MAP_LENGTH | abi.MEM_MAP_MEMORY_TYPE,
            address=address,
            length=length_bytes,
            memory_type=abi.MEMORY_TYPE_HOST,
        )
        out = ctypes.c_void_p()
        status = self.library.mem_map(handle, ctypes.byref(params), ctypes.byref(out))
        self.check(status, f"map {length_bytes} bytes")
        memory = MemoryHandle(self, out.value or 0, address, length_bytes)
        self._memory.add(memory)
        return memory

    def unmap(self, memory: MemoryHandle) -> None:
        """Take the memory from UCX; BackendError while gets may still write into it."""
        handle = self.live_handle()
        self._require_mine(memory)
        if memory.in_flight:
            raise BackendError(
                f"{memory.in_flight} gets may still write into this memory; end them, or close the endpoint by force"
            )
        status = self.library.mem_unmap(handle, memory.live_handle())
        memory.forget()
        self._memory.discard(memory)
        self.check(status, "unmap memory")

    def pack_rkey(self, memory: MemoryHandle) -> bytes:
        """Give the key with which a connected peer can read this memory, and in truth all of this process."""
        handle = self.live_handle()
        self._require_mine(memory)
        buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
        status = self.library.rkey_pack(handle, memory.live_handle(), ctypes.byref(buffer), ctypes.byref(size))
        self.check(status, "pack a key")
        try:
            return ctypes.string_at(buffer.value or 0, size.value)
        finally:
            self.library.rkey_buffer_release(buffer)

    def close(self) -> None:
        """Close the workers, unmap the memory and end UCX, in this order; repeats do nothing."""
        if self.handle is None:
            return
        self.require_own_process()
        for user in tuple(self.users):
            user.close()
        for memory in tuple(self._memory):
            self.unmap(memory)
        self.library.cleanup(self.handle)
        self.handle = None

    def _require_mine(self, memory: MemoryHandle) -> None:
        require_type("memory", memory, MemoryHandle)
        if memory.context is not self:
            raise ValueError("memory: mapped in another context")


def require_count(name: str, value: int, at_least: int, at_most: int) -> None:
    """TypeError or ValueError, naming the field, unless the value is a plain int within both bounds."""
    if type(value) is not int:  # bool and numpy's integers convert in surprising ways on their way into C
        raise TypeError(f"{name}: an int expected, got {type(value).__name__}; convert it with int()")
    if not at_least <= value <= at_most:
        raise ValueError(f"{name}: {value} is not between {at_least} and {at_most}")


def require_range(name: str, address: int, length_bytes: int) -> None:
    """TypeError or ValueError unless this is a range of at least one byte that does not wrap around."""
    require_count(name, address, 1, _ADDRESS_END - 1)
    require_count("length_bytes", length_bytes, 1, _ADDRESS_END - address)


def require_type(name: str, value: object, expected: type) -> None:
    """TypeError, naming the field, unless the value is of this class."""
    if not isinstance(value, expected):
        raise TypeError(f"{name}: {expected.__name__} expected, got {type(value).__name__}")


def require_bytes(name: str, value: bytes, at_least: int, at_most: int) -> None:
    """TypeError or ValueError, naming the field, unless these are bytes of an accepted length."""
    require_type(name, value, bytes)
    if not at_least <= len(value) <= at_most:
        raise ValueError(f"{name}: {len(value)} bytes are not between {at_least} and {at_most}")


def _checked_settings(settings: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in settings.items():
        require_type("settings: name", name, str)
        require_type(f"settings: {name}", value, str)
        if name.startswith("UCX_"):
            raise ConfigError(f"UCX setting {name}: write it without UCX_, as {name[4:]}")
        if name in PINNED_SETTINGS and value != PINNED_SETTINGS[name]:
            raise ConfigError(
                f"UCX setting {name} must stay {PINNED_SETTINGS[name]!r}, got {value!r}; remove it: "
                "any other value would silently leave the fast lane, or one that cannot end its source"
            )
    return settings


def _require_devices(names: str) -> None:
    """ConfigError for a network device that the host lacks: UCX would go on without it, then reach nobody."""
    present = {name for _, name in socket.if_nameindex()}
    # "all", and RDMA devices such as mlx5_0:1, are not network interfaces of the kernel: UCX judges them.
    missing = [name for name in names.split(",") if name != "all" and ":" not in name and name not in present]
    if missing:
        raise ConfigError(
            f"UCX setting NET_DEVICES: this host has no {', '.join(missing)}; choose from {', '.join(sorted(present))}"
        )


def _init(library: Library, settings: Mapping[str, str]) -> tuple[int, int]:
    """Return UCX's status and, if that is OK, the new context's handle."""
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    status = library.config_read(None, None, ctypes.byref(config))
    if status < 0:
        raise ConfigError(f"UCX cannot read its configuration (UCX_* variables): {library.status_text(status)}")
    try:
        for name, value in settings.items():
            status = library.config_modify(config, name.encode(), value.encode())
            if status < 0:
                raise ConfigError(
                    f"UCX setting {name}={value!r} is refused: {library.status_text(status)}; "
                    "correct its value, or its name (`ucx_info -c` lists them, with UCX_ before the name)",
                    name=name,
                )
        params = abi.ContextParams(
            field_mask=abi.PARAM_FEATURES, features=abi.FEATURE_RMA | abi.FEATURE_AM | abi.FEATURE_WAKEUP
        )
        status = library.init_version(
            abi.VERSION_MAJOR, abi.VERSION_MINOR_MIN, ctypes.byref(params), config, ctypes.byref(context)
        )
    finally:
        library.config_release(config)
    return status, context.value or 0


def _dotted(library: Library) -> str:
    return ".".join(map(str, library.version))
