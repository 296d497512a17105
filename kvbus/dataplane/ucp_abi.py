"""UCX's C interface as ctypes sees it: struct layouts, function signatures and the loader; no behaviour.

Written against the headers of the libucx wheel (`libucx/include/ucp/api`). UCX structs carry a mask of the
fields that are valid, and keep their layout within major version 1. A newer field stands at the end of its
struct, so these layouts also serve older minor versions. Only `ucp.py` uses this module.
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbus.errors import ConfigError

VERSION_MAJOR = 1
VERSION_MINOR_MIN = 19
"""The oldest minor version in which every function, mask and status used here was checked in the headers."""
LOG_FILE = "UCX_LOG_FILE"

OK = 0
IN_PROGRESS = 1
BUSY = -15
CANCELED = -16

FEATURE_RMA, FEATURE_WAKEUP, FEATURE_AM = 1 << 1, 1 << 4, 1 << 6
PARAM_FEATURES = 1 << 0
WORKER_PARAM_THREAD_MODE = 1 << 0
THREAD_MODE_SERIALIZED = 1
WORKER_ATTR_MAX_AM_HEADER = 1 << 3
EP_PARAM_ADDRESS, EP_PARAM_ERR_MODE, EP_PARAM_ERR_HANDLER = 1 << 0, 1 << 1, 1 << 2
ERR_MODE_PEER = 1
MEM_MAP_ADDRESS, MEM_MAP_LENGTH, MEM_MAP_MEMORY_TYPE = 1 << 0, 1 << 1, 1 << 4
MEMORY_TYPE_HOST = 0
OP_FLAGS, OP_MEMORY_TYPE, OP_MEMH = 1 << 4, 1 << 6, 1 << 8
EP_CLOSE_FORCE = 1 << 0
AM_SEND_EAGER, AM_SEND_COPY_HEADER = 1 << 1, 1 << 3
AM_HANDLER_ID, AM_HANDLER_FLAGS, AM_HANDLER_CALLBACK = 1 << 0, 1 << 1, 1 << 2
AM_WHOLE_MESSAGE = 1 << 0
AM_RECV_RENDEZVOUS = 1 << 17

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_status = ctypes.c_int8  # ucs_status_t is packed into one byte
_u32, _u64, _enum = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int


class ContextParams(ctypes.Structure):
    """`ucp_params_t`."""

    _fields_ = (
        ("field_mask", _u64),
        ("features", _u64),
        ("request_size", _size),
        ("request_init", _pointer),
        ("request_cleanup", _pointer),
        ("tag_sender_mask", _u64),
        ("mt_workers_shared", ctypes.c_int),
        ("estimated_num_eps", _size),
        ("estimated_num_ppn", _size),
        ("name", _pointer),
        ("node_local_id", _size),
    )


class WorkerParams(ctypes.Structure):
    """`ucp_worker_params_t`."""

    _fields_ = (
        ("field_mask", _u64),
        ("thread_mode", _enum),
        ("cpu_mask", ctypes.c_ulong * (1024 // (8 * ctypes.sizeof(ctypes.c_ulong)))),
        ("events", ctypes.c_uint),
        ("user_data", _pointer),
        ("event_fd", ctypes.c_int),
        ("flags", _u64),
        ("name", _pointer),
        ("am_alignment", _size),
        ("client_id", _u64),
    )


class WorkerAttributes(ctypes.Structure):
    """`ucp_worker_attr_t`."""

    _fields_ = (
        ("field_mask", _u64),
        ("thread_mode", _enum),
        ("address_flags", _u32),
        ("address", _pointer),
        ("address_length", _size),
        ("max_am_header", _size),
        ("name", ctypes.c_char * 32),
        ("max_debug_string", _size),
    )


class SocketAddress(ctypes.Structure):
    """`ucs_sock_addr_t`: only here because the endpoint's struct holds two of them."""

    _fields_ = (("addr", _pointer), ("addrlen", _u32))


class ErrorHandler(ctypes.Structure):
    """`ucp_err_handler_t`."""

    _fields_ = (("cb", _pointer), ("arg", _pointer))


class EndpointParams(ctypes.Structure):
    """`ucp_ep_params_t`."""

    _fields_ = (
        ("field_mask", _u64),
        ("address", _pointer),
        ("err_mode", _enum),
        ("err_handler", ErrorHandler),
        ("user_data", _pointer),
        ("flags", ctypes.c_uint),
        ("sockaddr", SocketAddress),
        ("conn_request", _pointer),
        ("name", _pointer),
        ("local_sockaddr", SocketAddress),
    )


class MemoryMapParams(ctypes.Structure):
    """`ucp_mem_map_params_t`."""

    _fields_ = (
        ("field_mask", _u64),
        ("address", _pointer),
        ("length", _size),
        ("flags", ctypes.c_uint),
        ("prot", ctypes.c_uint),
        ("memory_type", _enum),
        ("exported_memh_buffer", _pointer),
    )


class RequestParams(ctypes.Structure):
    """`ucp_request_param_t`; the last three fields exist from 1.22 on."""

    _fields_ = (
        ("op_attr_mask", _u32),
        ("flags", _u32),
        ("request", _pointer),
        ("cb", _pointer),
        ("datatype", _u64),
        ("user_data", _pointer),
        ("reply_buffer", _pointer),
        ("memory_type", _enum),
        ("recv_info", _pointer),
        ("memh", _pointer),
        ("remote_datatype", _u64),
        ("remote", _pointer),
        ("remote_count", _size),
    )


class AmHandlerParams(ctypes.Structure):
    """`ucp_am_handler_param_t`."""

    _fields_ = (
        ("field_mask", _u64),
        ("id", ctypes.c_uint),
        ("flags", _u32),
        ("cb", _pointer),
        ("arg", _pointer),
    )


class AmReceiveParams(ctypes.Structure):
    """`ucp_am_recv_param_t`."""

    _fields_ = (("recv_attr", _u64), ("reply_ep", _pointer))


ERROR_CALLBACK = ctypes.CFUNCTYPE(None, _pointer, _pointer, _status)
# The result is a full int: UCX reads its low byte, and a wider write leaves no garbage above it.
AM_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, _pointer, _pointer, _size, _pointer, _size, ctypes.POINTER(AmReceiveParams)
)

_out = ctypes.POINTER(_pointer)
_out_size = ctypes.POINTER(_size)
_out_uint = ctypes.POINTER(ctypes.c_uint)

# Each name is UCX's own without `ucp_`: (result, arguments).
_RELEASING_GIL: dict[str, tuple[object, tuple[object, ...]]] = {
    "get_version": (None, (_out_uint, _out_uint, _out_uint)),
    "config_read": (_status, (ctypes.c_char_p, ctypes.c_char_p, _out)),
    "config_modify": (_status, (_pointer, ctypes.c_char_p, ctypes.c_char_p)),
    "config_release": (None, (_pointer,)),
    "init_version": (_status, (ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ContextParams), _pointer, _out)),
    "cleanup": (None, (_pointer,)),
    "mem_map": (_status, (_pointer, ctypes.POINTER(MemoryMapParams), _out)),
    "mem_unmap": (_status, (_pointer, _pointer)),
    "rkey_pack": (_status, (_pointer, _pointer, _out, _out_size)),
    "rkey_buffer_release": (None, (_pointer,)),
    "worker_create": (_status, (_pointer, ctypes.POINTER(WorkerParams), _out)),
    "worker_query": (_status, (_pointer, ctypes.POINTER(WorkerAttributes))),
    "worker_destroy": (None, (_pointer,)),
    "worker_get_address": (_status, (_pointer, _out, _out_size)),
    "worker_release_address": (None, (_pointer, _pointer)),
    "worker_progress": (ctypes.c_uint, (_pointer,)),
    "worker_get_efd": (_status, (_pointer, ctypes.POINTER(ctypes.c_int))),
    "worker_arm": (_status, (_pointer,)),
    "worker_signal": (_status, (_pointer,)),
    "worker_set_am_recv_handler": (_status, (_pointer, ctypes.POINTER(AmHandlerParams))),
    "ep_create": (_status, (_pointer, ctypes.POINTER(EndpointParams), _out)),
    "ep_close_nbx": (_pointer, (_pointer, ctypes.POINTER(RequestParams))),
    "ep_print_info": (None, (_pointer, _pointer)),
    "ep_rkey_unpack": (_status, (_pointer, _pointer, _out)),
    "rkey_destroy": (None, (_pointer,)),
}
# These only queue or look (the copying happens in worker_progress), so giving the GIL away and waiting to get
# it back, up to a switch interval under load, would cost more than the call.
_KEEPING_GIL: dict[str, tuple[object, tuple[object, ...]]] = {
    "get_nbx": (_pointer, (_pointer, _pointer, _size, _u64, _pointer, _pointer)),
    "ep_flush_nbx": (_pointer, (_pointer, _pointer)),
    "am_send_nbx": (
        _pointer,
        (_pointer, ctypes.c_uint, ctypes.c_char_p, _size, ctypes.c_char_p, _size, _pointer),
    ),
    "request_check_status": (_status, (_pointer,)),
    "request_free": (None, (_pointer,)),
}


class Library:
    """The loaded UCX: where it came from, its version, and the functions that kvbus calls.

    A function of type `int | None` returns UCX's "status pointer": None (at once ok), a request, or an error
    code in the top hundred values.
    """

    get_version: Callable[..., None]
    config_read: Callable[..., int]
    config_modify: Callable[..., int]
    config_release: Callable[..., None]
    init_version: Callable[..., int]
    cleanup: Callable[..., None]
    mem_map: Callable[..., int]
    mem_unmap: Callable[..., int]
    rkey_pack: Callable[..., int]
    rkey_buffer_release: Callable[..., None]
    worker_create: Callable[..., int]
    worker_query: Callable[..., int]
    worker_destroy: Callable[..., None]
    worker_get_address: Callable[..., int]
    worker_release_address: Callable[..., None]
    worker_progress: Callable[..., int]
    worker_get_efd: Callable[..., int]
    worker_arm: Callable[..., int]
    worker_signal: Callable[..., int]
    worker_set_am_recv_handler: Callable[..., int]
    ep_create: Callable[..., int]
    ep_close_nbx: Callable[..., int | None]
    ep_print_info: Callable[..., None]
    ep_rkey_unpack: Callable[..., int]
    rkey_destroy: Callable[..., None]
    get_nbx: Callable[..., int | None]
    ep_flush_nbx: Callable[..., int | None]
    am_send_nbx: Callable[..., int | None]
    request_check_status: Callable[..., int]
    request_free: Callable[..., None]
    status_string: Callable[..., bytes]

    def __init__(self, path: str) -> None:
        self.path = path
        self.version: tuple[int, int, int] = (0, 0, 0)

    def __repr__(self) -> str:
        return f"<Library ucx={'.'.join(map(str, self.version))} path={self.path}>"

    def status_text(self, status: int) -> str:
        """Give UCX's own words for a status code."""
        return self.status_string(status).decode()


def load(library_path: str | None = None) -> Library:
    """Load the wheel's UCX, or the one at a path (or soname) that the operator chose.

    No search and no second choice: a library that nobody named must not end up moving pages. ConfigError if
    it is missing, lacks a function, or is of another version.
    """
    path = library_path or _wheel_path()
    try:
        with _complaints_on_stderr():
            for sibling in ("libucs.so.0", "libuct.so.0"):
                # Should libucp not know its own folder, it finds its parts because they are already loaded.
                if (beside := Path(path).parent / sibling).is_file():
                    ctypes.CDLL(str(beside))
            loaded = ctypes.CDLL(path)
        library = Library(path)
        _bind(library, loaded, _RELEASING_GIL)
        _bind(library, ctypes.PyDLL(path), _KEEPING_GIL)
        ucs = ctypes.CDLL(path)
        ucs.ucs_status_string.restype, ucs.ucs_status_string.argtypes = ctypes.c_char_p, (_status,)
        library.status_string = ucs.ucs_status_string
        # Other packages set UCX_* variables that this build does not know; UCX would complain of each.
        ucs.ucs_global_opts_set_value(b"WARN_UNUSED_ENV_VARS", b"n")
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"UCX cannot be loaded from {path}: {error}; install it with `pip install libucx-cu12`, "
            "or set KVBUS_UCX_LIBRARY to the full path of a libucp.so.0",
            library_path=path,
        ) from error
    _check_version(library)
    return library


@contextmanager
def _complaints_on_stderr() -> Iterator[None]:
    """Let UCX, which opens its log as it is loaded, write to stderr: stdout is for what commands print."""
    if LOG_FILE in os.environ:  # an operator wants it elsewhere
        yield
        return
    os.environ[LOG_FILE] = "stderr"
    try:
        yield
    finally:
        os.environ.pop(LOG_FILE, None)  # another thread may have loaded it at the same time


def _wheel_path() -> str:
    package = importlib.util.find_spec("libucx")
    for folder in (package.submodule_search_locations or ()) if package else ():
        if (path := Path(folder) / "lib" / "libucp.so").is_file():
            return str(path)
    raise ConfigError(
        "no UCX library: the libucx wheel is not installed; install it with `pip install libucx-cu12`, "
        "or set KVBUS_UCX_LIBRARY to the full path of a libucp.so.0"
    )


def _bind(library: Library, loader: ctypes.CDLL, table: dict[str, tuple[object, tuple[object, ...]]]) -> None:
    for name, (result, arguments) in table.items():
        function = getattr(loader, f"ucp_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)


def _check_version(library: Library) -> None:
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    library.get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    library.version = (major.value, minor.value, release.value)
    if major.value != VERSION_MAJOR or minor.value < VERSION_MINOR_MIN:
        raise ConfigError(
            f"UCX {'.'.join(map(str, library.version))} at {library.path} does not fit: kvbus needs "
            f"{VERSION_MAJOR}.{VERSION_MINOR_MIN} or a later {VERSION_MAJOR}.x; "
            "`pip install libucx-cu12`, or point KVBUS_UCX_LIBRARY at such a libucp.so.0",
            library_path=library.path,
        )


def captured_text(write: Callable[[int], None]) -> str:
    """Return what `write` prints into the C stream that it is given."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype, libc.open_memstream.argtypes = _pointer, (_out, _out_size)
    libc.fclose.argtypes = libc.free.argtypes = (_pointer,)
    text, size = _pointer(), _size()
    stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
    if not stream:
        raise MemoryError("open_memstream")
    try:
        write(stream)
    finally:
        libc.fclose(stream)
    try:
        return ctypes.string_at(text, size.value).decode(errors="replace")
    finally:
        libc.free(text)
