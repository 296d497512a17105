"""The UCX binding, between real processes: bytes, messages, ends of access, and what is refused."""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvbus.dataplane import ucp, ucp_abi
from kvbus.errors import BackendError, ConfigError
from tests.absent import absent
from tests.unit.ucp_peer import NOTICE_ID, PAGE_BYTES, RAISING_ID, Node, Peer, pattern, running_peer
from tests.waiting import stand_still, wait_until

BIG_PAGES = 128  # 8 MiB reads
TCP_ONLY = {"TLS": "tcp"}


def cma_is_permitted(pid: int) -> bool:
    """Whether this process may read that one's memory, asked of the kernel without UCX."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    status = libc.process_vm_readv(pid, None, 0, None, 0, 0)
    return bool(status == 0) and Path("/proc/self/ns/pid").readlink() == Path(f"/proc/{pid}/ns/pid").readlink()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with running_peer() as running:
        yield running


@pytest.fixture(scope="module")
def source() -> Iterator[Peer]:
    """A source that lives through many tests; one that dies or counts messages is a `peer`."""
    with running_peer() as running:
        yield running


@pytest.fixture
def node() -> Iterator[Node]:
    opened = Node({}, filled=False)
    yield opened
    opened.context.close()


@contextlib.contextmanager
def node_with(settings: dict[str, str]) -> Iterator[Node]:
    opened = Node(settings, filled=False)
    try:
        yield opened
    finally:
        opened.context.close()


def get(node: Node, connection: tuple[ucp.Endpoint, ucp.RemoteKey], base: int, pages: int = 1) -> ucp.Request:
    endpoint, rkey = connection
    return endpoint.get(node.pool.address, pages * PAGE_BYTES, base, rkey=rkey, memory=node.memory)


def test_a_get_brings_exactly_the_pages_that_were_asked_for(source: Peer, node: Node) -> None:
    exported = source.ask("export")
    endpoint, rkey = node.connect(exported)
    wanted = {0: 511, 7: 3, 8: 4, 100: 250}  # ours -> theirs
    requests = [
        endpoint.get(
            node.pool.page_address(ours),
            PAGE_BYTES,
            exported["base"] + theirs * PAGE_BYTES,
            rkey=rkey,
            memory=node.memory,
        )
        for ours, theirs in wanted.items()
    ]
    wait_until(lambda: node.drive(*requests))
    assert [request.status() for request in requests] == [ucp.OK] * len(wanted)
    for ours in range(512):
        expected = pattern(wanted[ours]) if ours in wanted else bytes(PAGE_BYTES)
        assert node.pool.page(ours) == expected, f"page {ours}"
    assert endpoint.unfinished() == 0
    assert node.memory.in_flight == 0


def test_the_lanes_are_tcp_and_cma_without_rendezvous(source: Peer, node: Node) -> None:
    exported = source.ask("export")
    if not cma_is_permitted(exported["pid"]):
        absent("this host does not let processes read each other")
    connection = node.connect(exported)
    request = get(node, connection, exported["base"])
    wait_until(lambda: node.drive(request))
    assert connection[0].lanes() == ["tcp/lo", "cma/memory"]
    assert "rendezvous" not in connection[0].description()


def test_an_operators_environment_undoes_no_setting(node: Node) -> None:
    weird = {"UCX_RNDV_THRESH": "0", "UCX_TLS": "self", "UCX_NET_DEVICES": "eth7", "UCX_KEEPALIVE_INTERVAL": "1s"}
    with running_peer(env=weird) as peer, running_peer() as source:
        lanes, description = peer.ask("read", source.ask("export"))
        assert lanes[0] == "tcp/lo"
        assert "rendezvous" not in description
        if cma_is_permitted(source.process.pid):
            assert lanes == ["tcp/lo", "cma/memory"]


def test_a_small_message_reaches_the_source_with_its_header(peer: Peer, node: Node) -> None:
    endpoint, _ = node.connect(peer.ask("export"))
    whole = bytes(range(256)) * 15
    sent = [endpoint.send_am(NOTICE_ID, b"released", whole), endpoint.send_am(NOTICE_ID, b"no body")]
    sent.append(endpoint.send_am(NOTICE_ID, b"", b"no header"))
    wait_until(lambda: node.drive(*sent) and len(peer.ask("messages")[0]) == 3)
    assert peer.ask("messages") == ([(b"released", whole), (b"no body", b""), (b"", b"no header")], 0)


def test_a_raising_handler_is_counted_and_harms_nobody(peer: Peer, node: Node) -> None:
    endpoint, _ = node.connect(peer.ask("export"))
    for _ in range(20):
        endpoint.send_am(RAISING_ID, b"x")
    endpoint.send_am(NOTICE_ID, b"after")
    wait_until(lambda: node.drive() and peer.ask("messages") == ([(b"after", b"")], 20))


def test_handler_errors_are_kept_within_a_bound(node: Node) -> None:
    def fail(header: bytes, body: bytes) -> None:
        raise RuntimeError(header.decode())

    node.worker.set_am_handler(NOTICE_ID, fail)
    with node_with({}) as sender:
        endpoint = ucp.Endpoint.open(sender.worker, node.worker.address())
        for number in range(40):
            endpoint.send_am(NOTICE_ID, str(number).encode())
        wait_until(lambda: sender.drive() and node.drive() and node.worker.handler_errors_count == 40)
        assert [str(error) for error in node.worker.handler_errors] == [str(n) for n in range(24, 40)]


def test_progress_inside_a_callback_is_refused(node: Node) -> None:
    def drive_again(header: bytes, body: bytes) -> None:
        node.worker.progress()

    node.worker.set_am_handler(NOTICE_ID, drive_again)
    with node_with({}) as sender:
        ucp.Endpoint.open(sender.worker, node.worker.address()).send_am(NOTICE_ID, b"x")
        wait_until(lambda: sender.drive() and node.drive() and node.worker.handler_errors_count == 1)
        assert "inside a UCX callback" in str(node.worker.handler_errors[0])


def test_a_message_larger_than_kvbus_sends_is_dropped_and_counted(node: Node) -> None:
    seen: list[bytes] = []
    node.worker.set_am_handler(NOTICE_ID, lambda header, _body: seen.append(header))
    with node_with({}) as sender:
        endpoint = ucp.Endpoint.open(sender.worker, node.worker.address())
        body, params = bytes(ucp.AM_BYTES_MAX + 1), ucp_abi.RequestParams()
        raw = sender.context.library.am_send_nbx(
            endpoint.live_handle(), NOTICE_ID, None, 0, body, len(body), ctypes.addressof(params)
        )
        after = endpoint.send_am(NOTICE_ID, b"after")
        wait_until(lambda: node.drive() and sender.drive(after) and seen == [b"after"])
        assert node.worker.messages_refused_count == 1
        if raw is not None:
            sender.context.library.request_free(raw)


def test_the_keys_of_an_endpoint_are_bounded(node: Node) -> None:
    with node_with({}) as reader:
        endpoint, _ = reader.connect(node.export())
        packed = node.context.pack_rkey(node.memory)
        with pytest.raises(BackendError, match="keep and reuse them"):
            [endpoint.unpack_rkey(packed) for _ in range(1000)]


def test_a_signal_wakes_a_thread_that_blocks_on_the_descriptor(node: Node) -> None:
    wait_until(lambda: node.drive() and node.worker.arm())
    node.worker.signal()
    readable, _, _ = select.select([node.worker.event_fd()], [], [], 10)
    assert readable == [node.worker.event_fd()]


# contract: the destination's evidence of ended access
def test_a_forced_close_ends_every_request_of_a_frozen_peer() -> None:
    with running_peer(TCP_ONLY) as peer, node_with(TCP_ONLY) as node:
        exported = peer.ask("export")
        connection = node.connect(exported)
        post_once(node, connection, exported["base"])
        stand_still(exported["pid"])
        try:
            requests = [get(node, connection, exported["base"], 16) for _ in range(64)]
            node.drive()
            endpoint = connection[0]
            assert endpoint.unfinished() > 0
            with pytest.raises(BackendError, match="may still write"):
                node.context.unmap(node.memory)
            with pytest.raises(BackendError, match="unfinished"):
                endpoint.close(force=False)
            with pytest.raises(BackendError, match="in progress"):
                requests[-1].free()
            closing = endpoint.close(force=True)
            wait_until(lambda: node.drive(closing, *requests))
            assert endpoint.unfinished() == 0
            assert node.memory.in_flight == 0
            assert requests[-1].status() == ucp.CANCELED
            assert endpoint.closed
            assert endpoint.close(force=False) is closing
            assert connection[1].closed
            before = node.pool.memory[:]
        finally:
            os.kill(exported["pid"], signal.SIGCONT)
        peer.ask("messages")  # the peer runs again, and what it still sends arrives nowhere
        node.drive()
        assert node.pool.memory[:] == before


# contract: the destination's evidence of ended access
def test_a_forced_close_ends_only_when_no_queued_get_can_write_any_more(source: Peer, node: Node) -> None:
    exported = source.ask("export")
    connection = node.connect(exported)
    post_once(node, connection, exported["base"])
    requests = [get(node, connection, exported["base"], BIG_PAGES) for _ in range(64)]
    closing = connection[0].close(force=True)
    while closing.status() == ucp.IN_PROGRESS:
        assert not connection[1].closed, "a queued get may still need the key"
        node.worker.progress()
    assert [request._status == ucp.IN_PROGRESS for request in requests] == [False] * 64
    assert node.memory.in_flight == 0
    assert connection[1].closed
    node.pool.memory[:] = bytes(node.pool.length_bytes)
    node.drive()
    assert node.pool.memory[:] == bytes(node.pool.length_bytes), "a late byte arrived"


@pytest.mark.parametrize("settings", [{}, TCP_ONLY], ids=["default lanes", "tcp"])
def test_a_killed_source_ends_every_get_with_an_error_and_the_reader_lives(settings: dict[str, str]) -> None:
    with running_peer(settings) as peer, node_with(settings) as node:
        exported = peer.ask("export")
        connection = node.connect(exported)
        post_once(node, connection, exported["base"])
        requests = [get(node, connection, exported["base"], BIG_PAGES) for _ in range(32)]
        node.worker.progress()
        peer.process.kill()
        peer.process.wait()
        wait_until(lambda: node.drive(*requests))
        ended = {request.status() for request in requests}
        assert min(ended) < 0, ended
        endpoint = connection[0]
        wait_until(lambda: node.drive() and endpoint.failed)
        with pytest.raises(BackendError, match="endpoint has failed"):
            get(node, connection, exported["base"])
        with pytest.raises(BackendError, match="endpoint has failed"):
            endpoint.send_am(NOTICE_ID, b"x")
        with pytest.raises(BackendError, match="endpoint has failed"):
            endpoint.flush()
        closing = endpoint.close(force=True)
        wait_until(lambda: node.drive(closing))


def test_the_death_of_an_idle_peer_is_seen_through_the_error_callback(peer: Peer, node: Node) -> None:
    exported = peer.ask("export")
    connection = node.connect(exported)
    post_once(node, connection, exported["base"])
    peer.process.kill()
    wait_until(lambda: node.drive() and connection[0].failed)
    assert connection[0].unfinished() == 0


def test_a_reader_that_posts_all_the_time_survives_the_death_of_its_source() -> None:
    for _ in range(3):
        with running_peer() as peer, node_with({}) as node:
            exported = peer.ask("export")
            connection = node.connect(exported)
            post_once(node, connection, exported["base"])
            peer.process.kill()
            with pytest.raises(BackendError, match=r"has failed|could not post"):
                post_for_ever(node, connection, exported["base"])


def post_once(node: Node, connection: tuple[ucp.Endpoint, ucp.RemoteKey], base: int) -> None:
    request = get(node, connection, base)
    wait_until(lambda: node.drive(request))
    assert request.status() == ucp.OK


def post_for_ever(node: Node, connection: tuple[ucp.Endpoint, ucp.RemoteKey], base: int) -> None:
    for _ in range(1_000_000):  # about 10 s
        get(node, connection, base).status()
        node.worker.progress()
        connection[0].unfinished()


def test_a_flush_ends_after_the_gets_before_it_and_a_graceful_close_after_that(source: Peer, node: Node) -> None:
    exported = source.ask("export")
    connection = node.connect(exported)
    requests = [get(node, connection, exported["base"], BIG_PAGES) for _ in range(8)]
    flushed = connection[0].flush()
    wait_until(lambda: node.drive(flushed))
    assert [request.status() for request in requests] == [ucp.OK] * 8
    requests[0].free()
    closing = connection[0].close(force=False)
    wait_until(lambda: node.drive(closing))
    assert closing.status() == ucp.OK
    with pytest.raises(BackendError, match="closed"):
        get(node, connection, exported["base"])
    with pytest.raises(BackendError, match="closed"):
        connection[0].lanes()


def test_closing_the_context_closes_all_and_repeats_do_nothing(source: Peer) -> None:
    node = Node({}, filled=False)
    exported = source.ask("export")
    connection = node.connect(exported)
    requests = [get(node, connection, exported["base"], BIG_PAGES) for _ in range(8)]
    node.context.close()
    node.context.close()
    node.worker.close()
    assert all(request.status() != ucp.IN_PROGRESS for request in requests)
    assert (node.context.closed, node.worker.closed, node.memory.closed) == (True, True, True)
    uses: list[Callable[[], object]] = [
        node.worker.progress,
        node.worker.address,
        node.worker.arm,
        lambda: node.context.map(node.pool.address, 1),
        lambda: node.context.pack_rkey(node.memory),
        lambda: node.connect(exported),
        lambda: get(node, connection, exported["base"]),
    ]
    for use in uses:
        with pytest.raises(BackendError, match="closed"):
            use()


def test_unfinished_requests_are_bounded() -> None:
    with running_peer(TCP_ONLY) as peer, node_with(TCP_ONLY) as node:
        exported = peer.ask("export")
        connection = node.connect(exported)
        stand_still(exported["pid"])
        for _ in range(ucp.REQUESTS_MAX):
            get(node, connection, exported["base"])
        with pytest.raises(BackendError, match="unfinished"):
            get(node, connection, exported["base"])


def test_wrong_arguments_of_a_get_are_refused_by_name_before_ucx_sees_them(source: Peer, node: Node) -> None:
    exported = source.ask("export")
    endpoint, rkey = node.connect(exported)
    other, other_rkey = node.connect(exported)
    start, end, base = node.pool.address, node.pool.address + node.pool.length_bytes, exported["base"]
    wrong: list[tuple[tuple[object, ...], object, object, type[Exception], str]] = [
        ((start, 0, base), rkey, node.memory, ValueError, "length_bytes"),
        ((start, -1, base), rkey, node.memory, ValueError, "length_bytes"),
        ((0, 8, base), rkey, node.memory, ValueError, "local_address"),
        ((start - 1, 8, base), rkey, node.memory, ValueError, "local_address"),
        ((end - 7, 8, base), rkey, node.memory, ValueError, "local_address"),
        ((start, 8, 2**64 - 7), rkey, node.memory, ValueError, "length_bytes"),
        ((start, 8, 2**64), rkey, node.memory, ValueError, "remote_address"),
        ((start, 8, 0), rkey, node.memory, ValueError, "remote_address"),
        ((float(start), 8, base), rkey, node.memory, TypeError, "local_address"),
        ((start, True, base), rkey, node.memory, TypeError, "length_bytes"),
        ((start, 8, None), rkey, node.memory, TypeError, "remote_address"),
        ((start, 8, base), None, node.memory, TypeError, "rkey"),
        ((start, 8, base), b"key", node.memory, TypeError, "rkey"),
        ((start, 8, base), rkey, None, TypeError, "memory"),
        ((start, 8, base), other_rkey, node.memory, ValueError, "rkey"),
    ]
    for numbers, key, memory, error, field in wrong:
        with pytest.raises(error, match=field):
            endpoint.get(*numbers, rkey=key, memory=memory)  # type: ignore[arg-type,misc]
    assert not endpoint.failed
    assert not other.failed


def pieces_of(node: Node, base: int, pages: Sequence[int]) -> list[ucp.Piece]:
    """One piece a page, each to the same place here as there."""
    return [(node.pool.address + PAGE_BYTES * page, PAGE_BYTES, base + PAGE_BYTES * page) for page in pages]


def test_gets_posted_together_end_together_and_bring_what_each_was_for(source: Peer, node: Node) -> None:
    exported = source.ask("export")
    endpoint, rkey = node.connect(exported)
    batch = endpoint.get_all(pieces_of(node, exported["base"], (5, 1, 3)), rkey, node.memory)
    assert batch.count == node.memory.in_flight == 3
    assert endpoint.unfinished() == 1
    with pytest.raises(BackendError, match="in progress"):
        batch.free()
    wait_until(lambda: node.drive(batch))
    assert batch.status() == ucp.OK
    assert node.memory.in_flight == endpoint.unfinished() == 0
    for page in range(7):
        held = node.pool.memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        assert held == (pattern(page) if page in {1, 3, 5} else bytes(PAGE_BYTES))
    batch.free()


def test_one_wrong_piece_posts_none_of_them(source: Peer, node: Node) -> None:
    exported = source.ask("export")
    endpoint, rkey = node.connect(exported)
    good = pieces_of(node, exported["base"], range(3))
    for wrong, field in (((1, 8, exported["base"]), "local_address"), ((good[0][0], 8, 0), "remote_address")):
        with pytest.raises(ValueError, match=field):
            endpoint.get_all([*good, wrong], rkey, node.memory)
    for count in (0, ucp.REQUESTS_MAX + 1):
        with pytest.raises(ValueError, match="pieces"):
            endpoint.get_all(good[:1] * count, rkey, node.memory)
    assert endpoint.unfinished() == node.memory.in_flight == 0
    assert not endpoint.failed


def test_what_ucx_has_taken_before_it_fails_is_waited_for(
    source: Peer, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:  # contract 33: what was posted may still write
    exported = source.ask("export")
    endpoint, rkey = node.connect(exported)
    post, posted = node.context.library.get_nbx, list[int]()

    def failing(*arguments: int) -> int | None:
        posted.append(arguments[1])
        return 2**64 - 3 if len(posted) == 3 else post(*arguments)  # UCX's status -3: input or output error

    monkeypatch.setattr(node.context.library, "get_nbx", failing)
    batch = endpoint.get_all(pieces_of(node, exported["base"], range(5)), rkey, node.memory)
    assert len(posted) == 3  # the rest was not tried
    assert endpoint.failed
    assert (batch.count, batch.status(), node.memory.in_flight) == (2, ucp.IN_PROGRESS, 2)
    closing = endpoint.close(force=True)
    wait_until(lambda: node.drive(closing))
    assert batch.status() == -3
    assert node.memory.in_flight == 0


def test_a_first_piece_that_ucx_refuses_leaves_nothing_under_way(
    source: Peer, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = source.ask("export")
    endpoint, rkey = node.connect(exported)
    monkeypatch.setattr(node.context.library, "get_nbx", lambda *_: 2**64 - 3)
    with pytest.raises(BackendError, match="post a get"):
        endpoint.get_all(pieces_of(node, exported["base"], range(2)), rkey, node.memory)
    assert endpoint.failed
    assert endpoint.unfinished() == node.memory.in_flight == 0


def test_a_forced_close_ends_a_batch_only_when_all_of_it_has_ended() -> None:
    with running_peer(TCP_ONLY) as peer, node_with(TCP_ONLY) as node:
        exported = peer.ask("export")
        endpoint, rkey = node.connect(exported)
        wait_until(lambda: node.drive(get(node, (endpoint, rkey), exported["base"])))
        stand_still(exported["pid"])
        batch = endpoint.get_all(pieces_of(node, exported["base"], range(4)), rkey, node.memory)
        assert not node.drive(batch)
        closing = endpoint.close(force=True)
        wait_until(lambda: node.drive(closing))
        assert batch.status() == ucp.CANCELED
        assert node.memory.in_flight == 0


def test_the_last_bytes_of_a_mapping_may_be_read_into(source: Peer, node: Node) -> None:
    exported = source.ask("export")
    endpoint, rkey = node.connect(exported)
    end = node.pool.address + node.pool.length_bytes
    request = endpoint.get(end - 8, 8, exported["base"], rkey=rkey, memory=node.memory)
    wait_until(lambda: node.drive(request))
    assert node.pool.memory[-8:] == pattern(0)[:8]


def test_memory_that_was_unmapped_or_belongs_elsewhere_is_refused(source: Peer, node: Node) -> None:
    exported = source.ask("export")
    endpoint, rkey = node.connect(exported)
    spare = node.context.map(node.pool.address, PAGE_BYTES)
    node.context.unmap(spare)
    with pytest.raises(BackendError, match="memory: closed"):
        endpoint.get(node.pool.address, 8, exported["base"], rkey=rkey, memory=spare)
    with pytest.raises(BackendError, match="closed"):
        node.context.unmap(spare)
    with node_with({}) as other:
        with pytest.raises(ValueError, match="another endpoint or context"):
            endpoint.get(other.pool.address, 8, exported["base"], rkey=rkey, memory=other.memory)
        with pytest.raises(ValueError, match="another context"):
            node.context.pack_rkey(other.memory)


def test_wrong_arguments_elsewhere_are_refused_by_name(source: Peer, node: Node) -> None:
    endpoint, _ = node.connect(source.ask("export"))
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: node.context.map(0, 8), ValueError, "address"),
        (lambda: node.context.map(node.pool.address, 0), ValueError, "length_bytes"),
        (lambda: node.context.map(2**64 - 4, 8), ValueError, "length_bytes"),
        (lambda: node.context.unmap(None), TypeError, "memory"),  # type: ignore[arg-type]
        (lambda: ucp.Endpoint.open(node.worker, b""), ValueError, "address"),
        (lambda: ucp.Endpoint.open(node.worker, "text"), TypeError, "address"),  # type: ignore[arg-type]
        (lambda: endpoint.unpack_rkey(b""), ValueError, "packed"),
        (lambda: endpoint.unpack_rkey(bytes(2**20)), ValueError, "packed"),
        (lambda: endpoint.send_am(-1, b"x"), ValueError, "am_id"),
        (lambda: endpoint.send_am(256, b"x"), ValueError, "am_id"),
        (lambda: endpoint.send_am(1, bytes(4097)), ValueError, "header"),
        (lambda: endpoint.send_am(1, bytes(4000), bytes(97)), ValueError, "body"),
        (lambda: endpoint.send_am(1, "x"), TypeError, "header"),  # type: ignore[arg-type]
        (lambda: node.worker.set_am_handler(1, None), TypeError, "handler"),  # type: ignore[arg-type]
        (lambda: node.worker.set_am_handler(1 << 20, print), ValueError, "am_id"),
    ]
    for use, error, field in wrong:
        with pytest.raises(error, match=field):
            use()


def test_a_setting_that_ucx_does_not_know_is_named() -> None:
    library = ucp.load()
    with pytest.raises(ConfigError, match="TCP_TX_SEG_SIZEX"):
        ucp.Context.open(library, {"TCP_TX_SEG_SIZEX": "1K"})
    with pytest.raises(ConfigError, match="KEEPALIVE_INTERVAL='soon'"):
        ucp.Context.open(library, {"KEEPALIVE_INTERVAL": "soon"})
    with pytest.raises(ConfigError, match="without UCX_, as TLS"):
        ucp.Context.open(library, {"UCX_TLS": "tcp"})
    with pytest.raises(ConfigError, match="RNDV_THRESH must stay 'inf'"):
        ucp.Context.open(library, {"RNDV_THRESH": "1M"})
    with pytest.raises(ConfigError, match=r"this host has no absent0; choose from .*lo"):
        ucp.Context.open(library, {"NET_DEVICES": "lo,absent0"})
    with pytest.raises(ConfigError, match="TLS and NET_DEVICES"):
        ucp.Context.open(library, {"TLS": "pigeon"})
    with pytest.raises(TypeError, match="settings: TLS"):
        ucp.Context.open(library, {"TLS": 1})  # type: ignore[dict-item]


def test_a_library_that_cannot_be_loaded_says_what_to_install(tmp_path: Path) -> None:
    absent, text = tmp_path / "libucp.so.0", tmp_path / "text.so"
    text.write_text("no library")
    for path in (absent, text, "libucp-of-nobody.so.0"):
        with pytest.raises(ConfigError, match=r"pip install libucx-cu12.*KVBUS_UCX_LIBRARY"):
            ucp.load(str(path))
    with pytest.raises(ConfigError, match="pip install libucx-cu12"):
        ucp.load("libc.so.6")  # a library, but not UCX


def test_an_older_ucx_is_refused_with_its_version(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or absent("no C compiler; on Debian: apt-get install gcc libc6-dev")
    names = [*ucp_abi._RELEASING_GIL, *ucp_abi._KEEPING_GIL]
    source = "".join(f"int ucp_{name}(void){{return 0;}}\n" for name in names if name != "get_version")
    source += "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) { *a = 1; *b = 18; *c = 1; }\n"
    source += "const char *ucs_status_string(int s) { return 0; }\n"
    source += "int ucs_global_opts_set_value(const char *n, const char *v) { return 0; }\n"
    (tmp_path / "old.c").write_text(source)
    subprocess.run([compiler, "-shared", "-o", tmp_path / "old.so", tmp_path / "old.c"], check=True)
    with pytest.raises(ConfigError, match=r"UCX 1\.18\.1 at .*old\.so does not fit: kvbus needs 1\.19"):
        ucp.load(str(tmp_path / "old.so"))


def test_the_struct_layouts_are_those_of_the_wheels_headers(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or absent("no C compiler is here: install gcc")
    include = Path(ucp.load().path).parents[1] / "include"
    structs = {
        "ucp_params_t": ucp_abi.ContextParams,
        "ucp_worker_params_t": ucp_abi.WorkerParams,
        "ucp_worker_attr_t": ucp_abi.WorkerAttributes,
        "ucs_sock_addr_t": ucp_abi.SocketAddress,
        "ucp_err_handler_t": ucp_abi.ErrorHandler,
        "ucp_ep_params_t": ucp_abi.EndpointParams,
        "ucp_mem_map_params_t": ucp_abi.MemoryMapParams,
        "ucp_request_param_t": ucp_abi.RequestParams,
        "ucp_am_handler_param_t": ucp_abi.AmHandlerParams,
        "ucp_am_recv_param_t": ucp_abi.AmReceiveParams,
    }
    newer = {"remote_datatype", "remote", "remote_count"}  # from 1.22 on
    fields = [
        (c_name, struct, str(field[0]))
        for c_name, struct in structs.items()
        for field in struct._fields_
        if str(field[0]) not in newer or ucp.load().version >= (1, 22, 0)
    ]
    constants = {
        "UCS_ERR_BUSY": ucp_abi.BUSY,
        "UCS_ERR_CANCELED": ucp_abi.CANCELED,
        "UCS_INPROGRESS": ucp_abi.IN_PROGRESS,
        "UCP_FEATURE_RMA|UCP_FEATURE_AM|UCP_FEATURE_WAKEUP": ucp_abi.FEATURE_RMA
        | ucp_abi.FEATURE_AM
        | ucp_abi.FEATURE_WAKEUP,
        "UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER": ucp_abi.WORKER_ATTR_MAX_AM_HEADER,
        "UCP_EP_PARAM_FIELD_ERR_HANDLER": ucp_abi.EP_PARAM_ERR_HANDLER,
        "UCP_ERR_HANDLING_MODE_PEER": ucp_abi.ERR_MODE_PEER,
        "UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE": ucp_abi.MEM_MAP_MEMORY_TYPE,
        "UCP_OP_ATTR_FIELD_MEMH": ucp_abi.OP_MEMH,
        "UCP_OP_ATTR_FIELD_MEMORY_TYPE": ucp_abi.OP_MEMORY_TYPE,
        "UCP_OP_ATTR_FIELD_FLAGS": ucp_abi.OP_FLAGS,
        "UCP_EP_CLOSE_FLAG_FORCE": ucp_abi.EP_CLOSE_FORCE,
        "UCP_AM_SEND_FLAG_EAGER": ucp_abi.AM_SEND_EAGER,
        "UCP_AM_SEND_FLAG_COPY_HEADER": ucp_abi.AM_SEND_COPY_HEADER,
        "UCP_AM_FLAG_WHOLE_MSG": ucp_abi.AM_WHOLE_MESSAGE,
        "UCP_AM_RECV_ATTR_FLAG_RNDV": ucp_abi.AM_RECV_RENDEZVOUS,
        "UCP_AM_HANDLER_PARAM_FIELD_CB": ucp_abi.AM_HANDLER_CALLBACK,
        "UCS_THREAD_MODE_SERIALIZED": ucp_abi.THREAD_MODE_SERIALIZED,
        "sizeof(ucs_status_t)": 1,
    }
    lines = [f'printf("%zu\\n", offsetof({c_name}, {field}));' for c_name, _, field in fields]
    lines += [f'printf("%d\\n", (int)({name}));' for name in constants]
    program = "#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\nint main(void) {\n"
    (tmp_path / "layout.c").write_text(program + "\n".join(lines) + "\nreturn 0; }\n")
    built = tmp_path / "layout"
    subprocess.run([compiler, "-I", include, "-o", built, tmp_path / "layout.c"], check=True)
    seen = subprocess.run([built], check=True, capture_output=True, text=True).stdout.split()
    ours = [getattr(struct, field).offset for _, struct, field in fields] + list(constants.values())
    names = [f"{c_name}.{field}" for c_name, _, field in fields] + list(constants)
    assert dict(zip(names, map(int, seen), strict=True)) == dict(zip(names, ours, strict=True))


FORKED = """
import os, sys
from tests.unit.ucp_peer import Node
from kvbus.errors import BackendError
node = Node({}, filled=False)
def refused(use):
    try:
        use()
    except BackendError as error:
        return "by spawn, not by fork" in str(error)
    return False
child = os.fork()
if child == 0:
    uses = [node.worker.progress, node.worker.close, node.context.close, lambda: node.context.map(4096, 1)]
    os._exit(0 if all(map(refused, uses)) else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
node.context.close()
sys.exit(code)
"""


def test_a_forked_child_is_refused_every_use() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", FORKED], check=True, cwd=root, timeout=150)


def test_every_object_can_be_printed(source: Peer, node: Node) -> None:
    exported = source.ask("export")
    endpoint, rkey = node.connect(exported)
    request = get(node, (endpoint, rkey), exported["base"])
    objects = (node.context, node.worker, node.memory, endpoint, rkey, request, node.context.library)
    for thing in objects:
        assert repr(thing).startswith(f"<{type(thing).__name__} ")
    wait_until(lambda: node.drive(request))
    assert request.status_text() == "Success"
