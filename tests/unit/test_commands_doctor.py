"""The doctor's single checks, on states that are wrong: what it finds, and what it says to do next."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvbus.broker import EmbeddedBroker, find_server
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.commands.broker_checks import check_assets, check_round_trip, check_server, connected, hello
from kvbus.commands.doctor import doctor
from kvbus.commands.findings import Finding, Level, Notes, address_of, document_of, first_step, is_well, show
from kvbus.commands.host_checks import check_files, check_kernel, check_python, fits
from kvbus.commands.transport_checks import check_transports
from kvbus.commands.worker_checks import check_workers
from kvbus.config import write_state
from kvbus.engines.model_cache import SMOLLM2
from kvbus.topics import Topics
from tests.waiting import until


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@asynccontextmanager
async def greeting(line: bytes) -> AsyncIterator[str]:
    """A server that says one line to whoever comes, and its address."""

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(line)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def broker(folder: Path) -> AsyncIterator[tuple[EmbeddedBroker, NatsBus]]:
    async with EmbeddedBroker.started(folder) as server:
        bus = await NatsBus.connect(server.url, name="tester", token=server.token, limits=EMBEDDED)
        try:
            yield server, bus
        finally:
            await bus.close()


# ----------------------------------------------------------------------------------------------------------- findings


def test_only_what_is_wrong_fails_and_what_to_do_first_is_about_it() -> None:
    notes = Notes("kernel")
    notes.ok("one", "fine")
    notes.warning("two", "slow", "make it fast")
    assert is_well(notes.findings)
    assert first_step(notes.findings) == "kernel, two: make it fast"
    running = Notes("workers")
    running.warning("a/m0", "full", "give it more pages")
    assert first_step(notes.findings + running.findings) == "workers, a/m0: give it more pages"
    notes.wrong("three", "broken", "mend it")
    assert not is_well(notes.findings)
    assert first_step(notes.findings + running.findings) == "kernel, three: mend it"
    assert document_of(notes.findings)["ok"] is False
    assert document_of([])["first"] == ""


def test_a_screen_is_aligned_plain_where_nobody_sees_colours_and_ends_with_what_to_do() -> None:
    notes = Notes("kernel")
    notes.ok("one", "fine [bold]really[/]")
    notes.wrong("a longer name", "broken", "mend it")
    out = io.StringIO()
    show(notes.findings, Console(file=out, width=100))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[0] == "kernel"
    assert lines[1].index("fine [bold]really[/]") == lines[2].index("broken") == lines[3].index("→ mend it")
    assert lines[-1] == "1 wrong. First: kernel, a longer name: mend it"
    assert "\x1b" not in out.getvalue()


def test_a_screen_without_a_fault_says_so() -> None:
    notes = Notes("kernel")
    notes.ok("one", "fine")
    out = io.StringIO()
    show(notes.findings, Console(file=out, width=100))
    assert out.getvalue().splitlines()[-1] == "All is as it should be."


# --------------------------------------------------------------------------------------------------------------- host


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("2.16.0", ">=2.16,<3", True),
        ("2.15.9", ">=2.16,<3", False),
        ("3.0", ">=2.16,<3", False),
        ("8.1", ">=8.1,<9", True),
        ("1.21.0", ">=1.21,<1.23", True),
        ("1.23", ">=1.21,<1.23", False),
        ("2.0rc1", ">=2", True),
        ("2.0", "!=2.0", False),
        ("nonsense", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, bounds: str, expected: bool) -> None:  # noqa: FBT001
    assert fits(version, bounds) is expected


def test_a_package_that_is_missing_or_too_old_is_named_with_what_to_install() -> None:
    assert is_well(check_python())
    wanted = ["nats-py>=99", "no-such-package-here<2,>=1", "rich<16", 'torch; extra == "transformers"']
    found = by_name(check_python(wanted))
    assert found["nats-py"].level is Level.WRONG
    assert found["nats-py"].next_step == 'pip install "nats-py>=99"'
    assert found["no-such-package-here"].found == "not installed"
    assert found["no-such-package-here"].next_step == 'pip install "no-such-package-here<2,>=1"'
    assert found["packages"].found.startswith("rich ")
    assert "torch" not in found


def test_the_kernel_is_judged_by_what_it_says(tmp_path: Path) -> None:
    assert is_well(check_kernel())
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1000 kB\n")
    found = by_name(check_kernel(tmp_path, lambda _which: (256, 4096)))
    assert {name for name, one in found.items() if one.level is Level.WARNING} == {
        "memory", "huge pages", "open files", "locked memory",
    }  # fmt: skip
    assert found["memory"].found == "1.0 MB left"
    assert "mlx5_0" in found["locked memory"].found
    assert found["open files"].next_step == "ulimit -n 1024"
    (pages / "shmem_enabled").write_text("always within_size [advise] never\n")
    assert by_name(check_kernel(tmp_path))["huge pages"].level is Level.OK


def test_a_state_folder_that_is_odd_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state"
    monkeypatch.setenv("KVBUS_STATE", str(folder))
    environ = {"KVBUS_MODEL_HOME": str(tmp_path)}

    def levels() -> dict[str, Level]:
        return {finding.name: finding.level for finding in check_files(environ)}

    assert levels()["state folder"] is Level.OK
    folder.write_text("a file")
    assert levels()["state folder"] is Level.WRONG
    folder.unlink()
    path = write_state({"nats_url": "nats://127.0.0.1:1", "token": "secret"})
    assert levels()["state file"] is Level.OK
    folder.chmod(0o777)
    assert levels()["state folder"] is Level.WARNING
    path.chmod(0o644)
    assert levels()["state file"] is Level.WARNING
    path.write_text("{ nope")
    found = by_name(check_files(environ))["state file"]
    assert found.level is Level.WRONG
    assert found.next_step == f"stop kvbus, remove {path}, start again"
    path.unlink()
    path.mkdir()
    assert levels()["state file"] is Level.WRONG


def test_a_model_folder_that_is_half_there_and_a_server_that_is_not_are_warnings(tmp_path: Path) -> None:
    (tmp_path / SMOLLM2.name).mkdir()
    found = by_name(check_files({"KVBUS_MODEL_HOME": str(tmp_path), "KVBUS_NATS_SERVER": "/no/such/server"}))
    assert found["model"].level is Level.WARNING
    assert found["nats-server"].level is Level.WARNING
    assert found["nats-server"].next_step.startswith("unset KVBUS_NATS_SERVER")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n")
    assert by_name(check_files({}, tmp_path))["gpu"].found == "nvidia0, driver 550.54.15"


# --------------------------------------------------------------------------------------------------------- transports


async def test_two_siblings_read_from_each_other_or_the_reason_is_told() -> None:
    found = by_name(await check_transports({}))
    assert found["memory"].level is Level.OK
    assert found["ucx"].found.startswith("1.")
    assert "tcp/lo" in found["ucx read"].found


async def test_a_ucx_that_an_environment_variable_hides_is_wrong_and_memory_still_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = "/no/such/libucp.so.0"
    monkeypatch.setenv("KVBUS_UCX_LIBRARY", hidden)
    found = by_name(await check_transports({"KVBUS_UCX_LIBRARY": hidden, "UCX_TLS": "rc"}))
    assert found["memory"].level is Level.OK
    assert found["ucx"].level is Level.WRONG
    assert hidden in found["ucx"].found
    assert found["ucx"].next_step.startswith("unset KVBUS_UCX_LIBRARY")


# -------------------------------------------------------------------------------------------------------------- broker


async def test_a_server_is_known_by_its_greeting_before_anybody_logs_in() -> None:
    old = json.dumps({"version": "2.10.22", "jetstream": True}).encode()
    bare = json.dumps({"version": "2.11.1"}).encode()
    notes = Notes("broker")
    async with greeting(b"INFO " + old + b"\r\n") as url:
        assert not await check_server(notes, url)
    async with greeting(b"INFO " + bare + b"\r\n") as url:
        assert not await check_server(notes, url)
    async with greeting(b"SSH-2.0-OpenSSH_9.2\r\n") as url:
        assert not await check_server(notes, url)
    assert not await check_server(notes, url)  # gone by now
    wrong = [(one.name, one.next_step) for one in notes.findings if one.level is Level.WRONG]
    assert [name for name, _ in wrong] == ["server", "jetstream", "server", "server"]
    assert wrong[0][1] == "upgrade it to 2.11 or newer"
    found = [one.found.partition(": ")[2] for one in notes.findings if one.name == "server"]
    assert found[2:] == ["something answers there, and it is no NATS server", "nothing listens there"]


async def test_each_node_that_an_address_names_is_greeted_and_one_of_them_may_be_away() -> None:
    greets = b"INFO " + json.dumps({"version": "2.11.1", "jetstream": True}).encode() + b"\r\n"
    both, half, none = Notes("broker"), Notes("broker"), Notes("broker")
    async with greeting(greets) as one:
        async with greeting(greets) as two:
            assert await check_server(both, f"{one}, {two}")
        assert await check_server(half, f"{one},{two}")
    assert not await check_server(none, f"{one},{two}")
    told = [[(found.name, found.level) for found in notes.findings] for notes in (both, half, none)]
    assert told == [
        [("server", Level.OK), ("server", Level.OK), ("jetstream", Level.OK)],
        [("server", Level.OK), ("server", Level.WARNING), ("jetstream", Level.OK)],
        [("server", Level.WRONG), ("server", Level.WRONG)],
    ]
    assert is_well(half.findings)


def test_a_screen_shows_no_password() -> None:
    assert address_of("nats://user:secret@one:4222,nats://user:secret@two:4222") == "nats://one:4222,nats://two:4222"
    assert address_of("nats://user:secret@host:4222") == "nats://host:4222"
    assert address_of("token@host") == "host"
    assert address_of("nats://host:4222") == "nats://host:4222"


async def test_addresses_that_lead_nowhere_are_answered_in_words() -> None:
    for url in ("nats://127.0.0.1:notaport", "nats://no.such.host.invalid:4222"):
        assert isinstance(await hello(url), str)


async def test_a_broker_without_streams_with_others_and_with_the_right_ones(tmp_path: Path) -> None:
    async with broker(tmp_path / "nats") as (server, bus):
        bare = Notes("broker")
        assert await check_server(bare, server.url)
        await check_round_trip(bare, bus)
        assert not await check_assets(bare, bus, "kv")
        assert by_name(bare.findings)["streams"].next_step == "kvbus init"
        assert {one.level for one in bare.findings if one.name != "streams"} <= {Level.OK, Level.WARNING}

        odd = {"name": "KVB_SETTLE", "subjects": ["kv.settle.*"], "retention": "limits", "max_age": 10**9}
        await bus.ask("$JS.API.STREAM.CREATE.KVB_SETTLE", json.dumps(odd).encode(), wait_s=30)
        drifted = Notes("broker")
        assert not await check_assets(drifted, bus, "kv")
        found = by_name(drifted.findings)["KVB_SETTLE"]
        assert found.level is Level.WRONG
        assert "max_age is 1000000000, needed 3600000000000" in found.found
        assert "KVB_SETTLE" not in by_name(drifted.findings)["streams"].found  # looked at, and not made anew

        await bus.ask("$JS.API.STREAM.DELETE.KVB_SETTLE", b"", wait_s=30)
        await bus.ensure_assets()
        right = Notes("broker")
        assert await check_assets(right, bus, "kv")
        assert is_well(right.findings)
        assert not await check_assets(right, bus, "other")
        assert right.findings[-1].next_step == "kvbus init --prefix other"

        nobody = Notes("workers")
        await check_workers(nobody, bus, "kv")
        assert [(one.name, one.level) for one in nobody.findings] == [("registry", Level.WARNING)]


GUARDED = """
listen: "127.0.0.1:-1"
ports_file_dir: "{folder}"
jetstream {{ store_dir: "{folder}/store" }}
authorization {{ users: [{{
  user: guest, password: g
  permissions: {{ publish: {{ allow: ["kv.nothing"] }}, subscribe: {{ allow: ["_INBOX.>"] }} }}
}}] }}
"""


def _listening(folder: Path) -> str:
    """Where the server of a folder listens, or "" before it does."""
    told = [path.read_text() for path in folder.glob("*.ports")]
    return str(json.loads(told[0])["nats"][0]).removeprefix("nats://") if any(told) else ""


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[str]:
    """A server that lets a guest in, and do next to nothing."""
    config = folder / "guarded.conf"
    config.write_text(GUARDED.format(folder=folder))
    server = await asyncio.create_subprocess_exec(
        str(find_server()), "-c", str(config), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await until(lambda: _listening(folder), what="the server listens")
        yield f"nats://guest:g@{_listening(folder)}"
    finally:
        server.kill()
        await server.wait()


async def test_a_user_who_may_not_look_is_told_so_and_nothing_is_called_wrong(tmp_path: Path) -> None:
    async with guarded(tmp_path) as url:
        notes, workers = Notes("broker"), Notes("workers")
        assert await check_server(notes, url)
        bus = await connected(notes, url, "", "kv")
        assert bus is not None
        try:
            await check_round_trip(notes, bus)
            assert await check_assets(notes, bus, "kv")
            await check_workers(workers, bus, "kv")
        finally:
            await bus.close()
    found = by_name(notes.findings + workers.findings)
    assert is_well(list(found.values()))
    assert found["round trip"].level is found["KVB_FACTS"].level is found["registry"].level is Level.WARNING
    assert "observer" in found["registry"].next_step
    assert "guest:g" not in json.dumps(document_of(notes.findings))  # a screen is shown to others


async def test_a_wrong_token_is_told_from_a_server_that_is_away(tmp_path: Path) -> None:
    async with EmbeddedBroker.started(tmp_path / "nats") as server:
        notes = Notes("broker")
        assert await connected(notes, server.url, "wrong", "kv") is None
        assert notes.findings[0].name == "login"
        assert "refused these credentials" in notes.findings[0].found
        bus = await connected(notes, server.url, server.token, Topics().prefix)
        assert bus is not None
        await bus.close()


def test_the_command_prints_one_document_and_fails_only_on_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVBUS_NATS_URL", "KVBUS_NATS_TOKEN", "KVBUS_UCX_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVBUS_STATE", str(tmp_path))
    quiet = CliRunner().invoke(doctor, ["--json"], standalone_mode=False)
    document = json.loads(quiet.stdout)
    assert (quiet.return_value, document["ok"]) == (0, True)
    groups = {check["group"] for check in document["checks"]}
    assert groups == {"python", "kernel", "files", "transports", "broker"}
    stale = CliRunner().invoke(doctor, ["--nats", "nats://127.0.0.1:1"], standalone_mode=False)
    assert stale.return_value == 1
    last = " ".join(stale.stdout.split())
    assert "First: broker, server: start it, or name another with --nats URL" in last
