"""Which transports a member opens, and what it offers to whom."""

import gc
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbus.config import WorkerSettings, checked_settings
from kvbus.errors import BackendError, ConfigError
from kvbus.events import LendRequested
from kvbus.grants import UcxAccess
from kvbus.processes import identity, network_namespace
from kvbus.roles.counting import way_counters
from kvbus.roles.offers import PoolAccess
from kvbus.roles.poolside import PoolSide
from kvbus.roles.transports import DataPlane, open_data_plane
from tests.unit.helpers import ucp_over_sockets
from tests.unit.helpers.lending_process import layout, reader_key
from tests.waiting import wait_until

UCX = UcxAccess(address=b"a", rkey=b"r")


def settings(folder: Path, **values: object) -> WorkerSettings:
    return checked_settings(instance="b", nats_url="nats://127.0.0.1:1", run_dir=folder, **values)


@contextmanager
def opened(folder: Path, **values: object) -> Iterator[DataPlane]:
    pool = PoolSide.create(layout(4096), pages=8, tokens_max=64, vocab_size=256, epoch=5 << 32 | 1)
    moving = open_data_plane(settings(folder, **values), pool, lambda: None)
    try:
        yield moving
    finally:
        moving.reader.shutdown(1.0)
        moving.reader.release_hold()
        moving.lending.release_hold()


def question(*transports: str, here: bool = True) -> LendRequested:
    process = identity() if here else identity().model_copy(update={"boot_id": "another"})
    return LendRequested(
        key=reader_key(), nonce=b"n" * 16, fingerprint="f", names=b"x" * 16, first_block=0, tokens=b"", salt="",
        on_miss="partial", budget_s=1.0, wait_s=1.0, process=process, transports=transports,
    )  # fmt: skip


def test_auto_takes_all_that_is_there(tmp_path: Path) -> None:
    with opened(tmp_path, backend="auto") as moving:
        assert moving.transports == ("ucx", "memory", "socket")
        assert moving.access.names() == ("ucx", "memory", "socket")
        assert moving.reader.name == "auto"


def test_auto_goes_without_ucx_where_it_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvbus")
    with opened(tmp_path, backend="auto", network_devices="nosuchdevice0") as moving:
        assert moving.transports == ("memory", "socket")
        assert moving.access.names() == ("memory", "socket")
        assert moving.plane is None
    assert "UCX cannot be used here" in caplog.text


def test_what_ucx_may_take_is_the_workers_setting_and_not_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "rc_mlx5")
    with opened(tmp_path, backend="ucx") as moving:
        assert moving.ucx_tls == "tcp,cma"
        assert way_counters(moving.reader.statistics(), ucx_tls=moving.ucx_tls)["ways_ucx_tls"] == "tcp,cma"
    with opened(tmp_path, backend="ucx", ucx_tls="tcp,sm,self") as moving:
        assert moving.ucx_tls == "tcp,sm,self"
    with opened(tmp_path, backend="socket", ucx_tls="rc,tcp") as moving:
        assert "ways_ucx_tls" not in way_counters(moving.reader.statistics(), ucx_tls=moving.ucx_tls)


def test_a_ucx_transport_that_this_host_lacks_ends_the_start_and_says_which(tmp_path: Path) -> None:
    missing = opened(tmp_path, backend="ucx", ucx_tls="xpmem")
    with pytest.raises(ConfigError, match=r"TLS.*xpmem|xpmem.*TLS"), missing:
        pass


def test_costs_that_make_no_sense_end_the_start(tmp_path: Path) -> None:
    for costs, word in (({"memory": (-1, 0, 0)}, "transport_costs"), ({"memory": (1,)}, "transport_costs")):
        with pytest.raises(ConfigError, match=word):
            settings(tmp_path, transport_costs=costs)
    with (
        pytest.raises(ConfigError, match="carrier pigeon"),
        opened(tmp_path, backend="memory", transport_costs={"carrier pigeon": (1, 1, 1)}),
    ):
        pass


def test_a_transport_that_was_named_is_the_only_one_and_its_absence_an_error(tmp_path: Path) -> None:
    with opened(tmp_path, backend="socket") as moving:
        assert (moving.transports, moving.access.names()) == (("socket",), ("socket",))
    with opened(tmp_path, backend="memory") as moving:
        assert (moving.transports, moving.access.names()) == (("memory",), ("memory",))
    missing = opened(tmp_path, backend="ucx", network_devices="nosuchdevice0")
    with pytest.raises(ConfigError, match="nosuchdevice0"), missing:
        pass


def open_descriptors() -> list[Path]:
    """The descriptors of this process, but for the one by which they are listed."""
    return [place for place in list(Path("/proc/self/fd").iterdir()) if place.is_symlink()]


@pytest.mark.parametrize(("values", "word"), [
    ({"backend": "auto"}, "socket-port"),
    ({"backend": "socket"}, "socket-port"),
    ({"backend": "ucx", "network_devices": "nosuchdevice0"}, "nosuchdevice0"),
    ({"backend": "ucx-py"}, "conda"),
])  # fmt: skip
def test_a_data_plane_that_cannot_start_keeps_no_pool_no_descriptor_and_no_thread(
    tmp_path: Path, values: dict[str, object], word: str
) -> None:
    def kept() -> tuple[int, list[str]]:
        gc.collect()
        pools = sum("kvbus-pool" in str(place.readlink()) for place in open_descriptors())
        return pools, sorted(one.name for one in threading.enumerate() if one.name.startswith("kvbus-"))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = kept()
        for _ in range(3):
            failing = opened(tmp_path, **values, socket_port=taken.getsockname()[1])
            with pytest.raises(ConfigError, match=word), failing:
                pass
        wait_until(lambda: kept() == before)


def test_ucx_py_is_taken_where_it_is_named_and_its_absence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--transport ucx-py.*conda"), opened(tmp_path, backend="ucx-py"):
        pass
    monkeypatch.setattr("kvbus.dataplane.ucxpy.load", lambda: ucp_over_sockets)
    with opened(tmp_path, backend="ucx-py") as moving:
        assert (moving.transports, moving.access.names()) == (("ucx",), ("ucx", "memory"))
        assert moving.reader.name == "ucx-py"
        assert moving.access.offer(question("ucx")).ucx is not None
        assert moving.plane is None


def test_each_lease_gets_a_secret_of_its_own_and_only_what_was_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path, backend="auto", network_devices="nosuchdevice0") as moving:
        first, second = (moving.access.offer(question("memory", "socket")) for _ in range(2))
        assert first.secret != second.secret
        assert not first.by_socket_only
        assert moving.access.offer(question("socket")).by_socket_only
        assert moving.access.offer(question("ucx", "memory")).socket is None


def test_a_reader_of_another_host_is_offered_nothing_that_keeps_its_lease_from_being_closed(tmp_path: Path) -> None:
    reached_at = ("192.0.2.7",)
    with opened(tmp_path, backend="auto", network_devices="nosuchdevice0", socket_advertise=reached_at) as moving:
        offer = moving.access.offer(question("ucx", "memory", "socket", here=False))
        assert (offer.memory, offer.by_socket_only) == (None, True)
        own = moving.access
    through = PoolAccess(ucx=UCX, memory=own.memory, socket=own.socket, ucx_is_local=False)
    assert through.offer(question("ucx", "socket", here=False)).ucx is UCX
    looped = PoolAccess(ucx=UCX, memory=own.memory, socket=own.socket, ucx_is_local=True)
    assert looped.offer(question("ucx", "socket", here=False)).by_socket_only  # its address would lead nowhere
    assert looped.offer(question("ucx", "socket")).ucx is UCX
    without = PoolAccess(ucx=None, memory=moving.access.memory).offer(question("memory", here=False))
    assert without.memory is not None  # whether it can be reached is its reader's to find out


def test_a_page_server_on_loopback_is_offered_to_nobody_elsewhere(tmp_path: Path) -> None:
    """It would lead a reader to whatever listens on that port of its own host."""
    with opened(tmp_path, backend="auto", network_devices="nosuchdevice0") as moving:
        assert moving.access.offer(question("socket", here=False)).socket is None
        assert moving.access.offer(question("socket")).socket is not None
        apart = identity().model_copy(update={"pid_namespace": 1})
        same_pod = question("socket").model_copy(update={"process": apart, "network": network_namespace()})
        assert moving.access.offer(same_pod).socket is not None
        other_pod = same_pod.model_copy(update={"network": network_namespace() + 1})
        assert moving.access.offer(other_pod).socket is None


@pytest.mark.parametrize("values", [
    {"socket_address": "localhost"},
    {"socket_address": "0.0.0.0"},  # noqa: S104 - refused, as it should be
    {"socket_address": "0.0.0.0", "socket_advertise": ("::",)},  # noqa: S104
    {"socket_advertise": ("a.host",)},
    {"socket_port": 70_000},
    {"backend": "carrier pigeon"},
])  # fmt: skip
def test_where_the_page_server_listens_and_is_reached_must_be_addresses(
    tmp_path: Path, values: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=next(reversed(values))):
        settings(tmp_path, **values)
    wild = settings(tmp_path, socket_address="::", socket_advertise=("192.0.2.7",))
    assert wild.socket_advertise == ("192.0.2.7",)


def test_a_page_server_that_does_not_run_is_offered_to_nobody_and_the_other_ways_go_on(tmp_path: Path) -> None:
    with opened(tmp_path, backend="auto", network_devices="nosuchdevice0") as moving:
        assert moving.access.offer(question("memory", "socket")).socket is not None
        moving.lending.release_hold()
        offer = moving.access.offer(question("memory", "socket"))
        assert (offer.socket, offer.secret, offer.memory) == (None, b"", moving.access.memory)


def test_a_ucx_plane_that_has_failed_is_offered_to_nobody_and_is_counted(tmp_path: Path) -> None:
    class BadTask:
        def step(self, now: float) -> float | None:
            raise RuntimeError(f"planted at {now:.0f}")

        def failed(self, text: str) -> None:
            assert "planted" in text

        def closed(self, *, is_quiet: bool) -> None:
            assert is_quiet

    with opened(tmp_path, backend="auto") as moving:
        assert moving.plane is not None
        assert moving.access.offer(question("ucx", "memory")).ucx is not None
        moving.plane.attach(BadTask())
        wait_until(lambda: not moving.plane or not moving.plane.statistics().running)
        offer = moving.access.offer(question("ucx", "memory"))
        assert (offer.ucx, offer.memory) == (None, moving.access.memory)
        assert moving.reader.changes() == []  # the other transports go on: the binding does too
        counters = way_counters(moving.reader.statistics())
        assert "planted" in str(counters["ways_failed_ucx"])
    with opened(tmp_path, backend="ucx") as alone:
        assert alone.plane is not None
        alone.plane.attach(BadTask())
        wait_until(lambda: not alone.plane or not alone.plane.statistics().running)
        with pytest.raises(BackendError, match="planted"):
            alone.reader.changes()
        assert alone.reader.changes() == []
