"""Settings are checked when they enter, and what `kvbus up` leaves behind is its owner's alone."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvbus.commands.worker import worker
from kvbus.config import (
    TransferLimits,
    WorkerSettings,
    checked_settings,
    discover,
    read_state,
    state_dir,
    state_file,
    write_state,
)
from kvbus.errors import ConfigError, KvbusError

GOOD: dict[str, object] = {"instance": "b", "nats_url": "nats://127.0.0.1:4222", "run_dir": Path("/run/kvbus")}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own, and no hint of a broker."""
    for name in ("KVBUS_NATS_URL", "KVBUS_NATS_TOKEN", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVBUS_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


# --------------------------------------------------------------------------------------------------------- settings


def test_good_settings_come_back_frozen_with_their_defaults() -> None:
    settings = checked_settings(**GOOD)
    assert (settings.member, settings.engine, settings.limits.inflight_max, settings.limits.dedup_ttl_s) == (
        "m0", "toy", 4, 300.0,
    )  # fmt: skip
    assert settings.limits.source_allow == (), "no allowlist means that every source is refused"
    with pytest.raises(ValidationError):
        settings.pages = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pages", 1),
        ("pages", "many"),
        ("engine", "other"),
        ("backend", "ftp"),
        ("rate_limit_bytes_s", -1),
        ("instance", ""),
        ("instance", "é" * 40),
        ("member", "x" * 65),
        *(("ucx_tls", value) for value in ("infiniband", "RC", "rc,", "rc, tcp", "^tcp", 7)),
        ("limits.inflight_max", -1),
        ("limits.dedup_ttl_s", float("nan")),
        ("limits.lend_wait_s", 3.0),
        ("limits.dedup_entries_max", 0),
        ("limits.release_retry_s", 0),
        ("limits.no_such_limit", 1),
        ("no_such_setting", 1),
    ],
)
def test_a_setting_that_does_not_fit_is_named(name: str, value: object) -> None:
    outer, _, inner = name.partition(".")
    with pytest.raises(ConfigError, match=f"setting {name} does not fit"):
        checked_settings(**{**GOOD, outer: {inner: value} if inner else value})


def test_what_the_page_on_rdma_tells_a_worker_is_taken_as_it_stands() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "rdma.md"
    lines = [line.split()[2:] for line in page.read_text().splitlines() if line.startswith("kvbus worker ")]
    assert lines
    for words in lines:
        options = worker.make_context("worker", words).params
        found = checked_settings(**GOOD, ucx_tls=options["ucx_tls"], network_devices=options["devices"])
        assert (found.ucx_tls, found.network_devices) == ("rc,tcp,cma", "mlx5_0:1,eth0")


@pytest.mark.parametrize("missing", sorted(GOOD))
def test_a_missing_setting_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"setting {missing} does not fit: Field required"):
        checked_settings(**{name: value for name, value in GOOD.items() if name != missing})


def test_an_instance_is_not_its_own_source() -> None:
    with pytest.raises(ConfigError, match="source_allow names 'b' itself"):
        checked_settings(**GOOD, limits={"source_allow": ("a", "b")})
    assert checked_settings(**GOOD, limits={"source_allow": ("a",)}).limits.source_allow == ("a",)


# R23
@pytest.mark.parametrize("members", [(), ("m0",)])
def test_an_instance_has_one_member_unless_more_are_named(members: tuple[str, ...]) -> None:
    settings = checked_settings(**GOOD, members=members, engine_options={"seed": 1})
    assert settings.ranks == {"m0": 0}
    assert settings.options_for_engine == {"seed": 1}, "an engine on its own is told of no rank"


def test_a_members_place_is_its_rank_and_a_toy_is_told() -> None:
    settings = checked_settings(**GOOD, member="y", members=("x", "y", "z"), engine_options={"seed": 1})
    assert settings.ranks == {"x": 0, "y": 1, "z": 2}
    assert settings.options_for_engine == {"rank": 1, "ranks": 3, "seed": 1}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"members": ("m1", "m2")}, "members are m1, m2, and member 'm0' is none of them"),
        ({"members": ("m0", "m1", "m0")}, "m0 stands there twice"),
        ({"members": ("m0", "")}, "setting members does not fit"),
        ({"members": ("m0", "x" * 65)}, "setting members does not fit"),
        ({"members": "m0,m1"}, "setting members does not fit"),
        ({"members": ("m0", "m1"), "engine": "transformers"}, "the transformers engine has one rank"),
    ],
)
def test_members_that_do_not_fit_are_named(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        checked_settings(**GOOD, **values)


def test_no_error_shows_the_brokers_token() -> None:
    secret = "s3cret"  # noqa: S105 - the token of no broker
    for values in (
        {"nats_token": secret, "instance": "b"},
        {"nats_token": secret, **GOOD, "limits": {"source_allow": ("b",)}},
        {**GOOD, "nats_token": [secret]},
        {**GOOD, "nats_token": {"x": secret}},
    ):
        with pytest.raises(ConfigError) as caught:
            checked_settings(**values)
        assert secret not in str(caught.value)


def test_socket_and_lock_are_named_after_instance_and_member() -> None:
    settings = checked_settings(**{**GOOD, "instance": "a.b/c"})
    assert settings.socket_path == Path("/run/kvbus/a=2Eb=2Fc.m0.sock")
    assert settings.lock_path == Path("/run/kvbus/a=2Eb=2Fc.m0.lock")
    assert isinstance(settings, WorkerSettings)
    assert isinstance(settings.limits, TransferLimits)


# ------------------------------------------------------------------------------------------------------------ state


def test_the_state_folder_is_found_by_environment(monkeypatch: pytest.MonkeyPatch, own_state: Path) -> None:
    assert state_dir() == own_state
    monkeypatch.delenv("KVBUS_STATE")
    assert state_dir() == Path.home() / ".local" / "state" / "kvbus"
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert state_dir() == Path("/var/state/kvbus")


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_state_file_is_its_owners_alone_whatever_the_umask(umask: int) -> None:
    before = os.umask(umask)
    try:
        path = write_state({"nats_url": "nats://x", "token": "t"})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert json.loads(path.read_text()) == {"nats_url": "nats://x", "token": "t"}


def test_the_state_file_is_replaced_whole_and_stays_private(own_state: Path) -> None:
    own_state.mkdir()
    state_file().write_text("old")
    state_file().chmod(0o644)
    state_file().with_suffix(".partial").write_text("left by a run that died")
    path = write_state({"nats_url": "nats://new"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_state() == {"nats_url": "nats://new"}
    assert [one.name for one in own_state.iterdir()] == ["up.json"]


def test_a_partial_file_that_is_a_link_is_not_followed(own_state: Path, tmp_path: Path) -> None:
    own_state.mkdir()
    target = tmp_path / "target"
    target.write_text("mine")
    state_file().with_suffix(".partial").symlink_to(target)
    write_state({"nats_url": "nats://x"})
    assert target.read_text() == "mine"


# --------------------------------------------------------------------------------------------------------- discovery


def test_the_environment_wins_over_the_state_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write_state({"nats_url": "nats://file", "token": "file"})
    assert discover() == ("nats://file", "file")
    monkeypatch.setenv("KVBUS_NATS_URL", "nats://environment")
    assert discover() == ("nats://environment", "")
    monkeypatch.setenv("KVBUS_NATS_TOKEN", "environment")
    assert discover() == ("nats://environment", "environment")


def test_a_state_without_a_token_means_none() -> None:
    write_state({"nats_url": "nats://file"})
    assert discover() == ("nats://file", "")


def test_where_nothing_runs_the_error_says_how_to_start() -> None:
    with pytest.raises(ConfigError, match="kvbus up"):
        discover()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"nats_url": 1}', "\ud800"])
def test_a_broken_state_file_is_named_with_what_to_do(content: str, own_state: Path) -> None:
    own_state.mkdir()
    state_file().write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match="stop kvbus, remove the file, start again") as caught:
        discover()
    assert str(state_file()) in str(caught.value)


def test_a_state_file_that_cannot_be_read_is_named(own_state: Path) -> None:
    state_file().mkdir(parents=True)
    with pytest.raises(ConfigError, match="is unreadable"):
        read_state()


def test_an_error_keeps_its_parts_and_shows_them() -> None:
    assert str(KvbusError("plain")) == "plain"
    error = ConfigError("no such port", port=7)
    assert (str(error), error.message, error.details) == ("no such port (port=7)", "no such port", {"port": 7})
    assert isinstance(error, KvbusError)
