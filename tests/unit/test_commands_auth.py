"""Credentials: written for their owner only, kept, and refused in one sentence where they do not fit; and TLS."""

import asyncio
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
import yaml
from click.testing import CliRunner, Result

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_access import DeniedError, TlsFiles, is_exposed, new_credential, read_credential
from kvbus.bus_assets import EMBEDDED, Assets
from kvbus.cli import kvbus
from kvbus.commands.auth import RULES, credential_path, rules, write_folder
from kvbus.errors import BusError, ConfigError, PeerError
from kvbus.events import decode
from kvbus.permissions import Role, User
from kvbus.publisher import Publisher
from kvbus.testing.cluster import free_ports
from kvbus.topics import Command, Topics
from kvbus.transport import BUCKET_INSTANCES, Delivery
from tests.absent import absent
from tests.waiting import until

TOPICS = Topics()
MANIFESTS = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
SOMEBODY_ELSE = 10_002
OPERATOR = User(Role.OPERATOR, "operator")
A, B = User(Role.INSTANCE, "a", ("m0", "m1")), User(Role.INSTANCE, "b", ("m0",))
GATEWAY, DASH = User(Role.REQUESTER, "gateway"), User(Role.OBSERVER, "dash")
USERS = (OPERATOR, A, B, GATEWAY, DASH)
INIT = "--instances a,b --members a=m0,m1 --requesters gateway --observers dash".split()


def auth(*arguments: str) -> Result:
    return CliRunner().invoke(kvbus, ["auth", *arguments])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    write_folder(folder, USERS, TOPICS)
    return folder


@pytest.fixture
async def guarded(tmp_path: Path, keys: Path) -> AsyncIterator[EmbeddedBroker]:
    """A broker with users, streams and buckets."""
    (port,) = free_ports(1)
    async with EmbeddedBroker.started(tmp_path / "broker", port=port, include=keys / RULES) as broker:
        async with entered(broker, keys, OPERATOR) as bus:
            await bus.ensure_assets()
        yield broker


@asynccontextmanager
async def entered(broker: EmbeddedBroker, keys: Path, user: User) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(broker.url, name="t", credentials=credential_path(keys, user), limits=EMBEDDED)
    try:
        yield bus
    finally:
        await bus.close()


# ------------------------------------------------------------------------------------------------------------- writing


def test_init_writes_rules_and_a_file_for_each_user_that_only_its_owner_may_read(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    told = auth("init", *INIT, "--dir", str(folder), "--json")
    assert told.exit_code == 0, told.output
    assert {Path(path) for path in json.loads(told.output)["written"]} == {credential_path(folder, u) for u in USERS}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == len(USERS) + 1
    text = (folder / RULES).read_text()
    for user in USERS:
        credential = read_credential(credential_path(folder, user))
        assert (credential.user, credential.prefix) == (user, "kv")
        assert credential.key in text
        assert credential.seed not in text
        assert credential.seed not in repr(credential) + told.output


def test_init_keeps_credentials_that_are_there_and_adds_the_new_ones(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert auth("init", *INIT, "--dir", str(folder)).exit_code == 0
    before = {path.name: path.read_text() for path in folder.glob("*.cred")}
    told = auth("init", "--instances", "a,b,c", *INIT[2:], "--dir", str(folder), "--json")
    assert told.exit_code == 0, told.output
    assert [Path(path).name for path in json.loads(told.output)["written"]] == ["instance-c.cred"]
    assert {name: (folder / name).read_text() for name in before} == before
    assert "# instance c" in (folder / RULES).read_text()
    forced = auth("init", *INIT, "--dir", str(folder), "--force")
    assert forced.exit_code == 0, forced.output
    assert all((folder / name).read_text() != text for name, text in before.items())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--instances", "a,b", "--members", "c=m0"), "--members names an instance of --instances"),
        (("--instances", "a,b", "--members", "a="), "--members names an instance of --instances"),
        (("--instances", "a" * 80), "at most 64"),
        (("--instances", "a,b", "--members", "a=m0,m1,m2"), "other members or another prefix"),
        (("--instances", "a,b", "--members", "a=m0,m1", "--prefix", "x"), "other members or another prefix"),
        (("--instances", "a", "--prefix", "x.y"), "prefix must be one plain token"),
    ],
)
def test_init_says_what_does_not_fit_and_changes_nothing(keys: Path, arguments: tuple[str, ...], said: str) -> None:
    before = {path.name: path.read_text() for path in keys.iterdir()}
    told = auth("init", *arguments, "--dir", str(keys))
    assert isinstance(told.exception, ConfigError)
    assert said in str(told.exception)
    assert {path.name: path.read_text() for path in keys.iterdir()} == before


def test_init_does_not_write_where_others_may_look(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    told = auth("init", *INIT, "--dir", str(tmp_path))
    assert isinstance(told.exception, ConfigError)
    assert "chmod 700" in str(told.exception)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: "", "must hold one seed"),
        (lambda text: text + text.splitlines()[1], "must hold one seed"),
        (lambda text: text.replace("SU", "SA"), "must hold one seed"),
        (lambda text: text[:-5], "must hold one seed"),
        (lambda text: text[:-3] + ("A" if text[-3] != "A" else "B") + text[-2:], "damaged"),
        (lambda text: text.replace('"instance"', '"king"'), "first line of this credential is damaged"),
        (lambda text: text.replace('"role": ', ""), "first line of this credential is damaged"),
        (lambda text: text + "#" * 70_000, "must hold one seed"),
    ],
)
def test_a_file_that_is_no_credential_is_said_to_be_none(keys: Path, change: object, said: str) -> None:
    path = credential_path(keys, A)
    assert callable(change)
    seed = read_credential(path).seed
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigError, match=said) as refused:
        read_credential(path)
    assert seed not in str(refused.value)


def test_a_credential_that_is_missing_or_that_others_may_read_is_refused(keys: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_credential(keys / "nobody.cred")
    path = credential_path(keys, A)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_credential(path)
    path.chmod(0o600)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is no text"):
        read_credential(path)


def modes_of_the_manifests() -> set[int]:
    """The modes in which deploy/kubernetes mounts secrets; the kubelet gives the files to root and to our group."""
    pods = [
        one["spec"]["template"]["spec"]
        for path in MANIFESTS.glob("*.yaml")
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if one and "template" in one.get("spec", {})
    ]
    volumes = [volume for pod in pods for volume in pod.get("volumes", [])]
    return {volume["secret"]["defaultMode"] for volume in volumes if "secret" in volume}


@pytest.mark.parametrize("mode", sorted(modes_of_the_manifests()), ids=oct)
def test_a_credential_that_root_hands_to_our_group_is_read_in_the_mode_of_the_manifests(mode: int, keys: Path) -> None:
    assert mode & stat.S_IRGRP, "without it the group that we are cannot read it"
    assert not is_exposed(mode, is_ours=False)
    assert is_exposed(mode, is_ours=True)
    assert is_exposed(mode | stat.S_IWGRP, is_ours=False)
    assert is_exposed(mode | stat.S_IROTH, is_ours=False)
    path = credential_path(keys, A)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):  # ours, and open to our group
        read_credential(path)
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY_ELSE, -1)
        assert read_credential(path).user == A
        path.chmod(mode | stat.S_IROTH)
        with pytest.raises(ConfigError, match="chmod 440"):
            read_credential(path)


def test_a_bare_seed_is_a_credential_that_does_not_say_whose_it_is(keys: Path) -> None:
    path = credential_path(keys, A)
    whole = read_credential(path)
    path.write_text(whole.seed)
    bare = read_credential(path)
    assert (bare.key, bare.user) == (whole.key, None)
    assert bare.text() == whole.seed + "\n"


# ------------------------------------------------------------------------------------------------------------ entering


async def test_a_credential_that_the_broker_does_not_know_is_refused_within_one_try(
    guarded: EmbeddedBroker, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_folder(other, USERS, TOPICS)
    with pytest.raises(BusError, match="refused these credentials") as refused:
        await NatsBus.connect(guarded.url, name="t", credentials=credential_path(other, A))
    assert read_credential(credential_path(other, A)).seed not in str(refused.value)
    with pytest.raises(BusError, match="refused these credentials"):
        await NatsBus.connect(guarded.url, name="t")


async def test_what_is_denied_is_said_at_once_whatever_was_asked(guarded: EmbeddedBroker, keys: Path) -> None:
    async def ignore(_delivery: Delivery) -> None:
        raise AssertionError

    async with entered(guarded, keys, DASH) as bus:
        asked: list[Callable[[], Awaitable[object]]] = [
            lambda: bus.store(TOPICS.facts("a"), b"x", message_id="x"),
            lambda: bus.request(TOPICS.command("a", Command.LEASE, "m0"), b"x", wait_s=60),
            lambda: bus.put(BUCKET_INSTANCES, "a=2Fm0", b"x"),
            lambda: bus.subscribe(TOPICS.transfer_filter(), ignore),
            lambda: bus.fetch("KVB_TRANSFER", "dst-a", most=1, wait_s=60),
        ]
        for ask in asked:
            with pytest.raises(DeniedError, match="does not let this user"):
                await ask()
        assert bus.health().connected
        assert await bus.history(TOPICS.facts_filter()) == []


async def test_a_subscription_that_was_denied_is_not_asked_for_again_at_a_reconnect(
    guarded: EmbeddedBroker, keys: Path
) -> None:
    async def ignore(_delivery: Delivery) -> None:
        raise AssertionError

    async with entered(guarded, keys, DASH) as bus:
        with pytest.raises(DeniedError):
            await bus.subscribe(TOPICS.transfer_filter(), ignore)
        count = bus.health().counters["denied_subscription"]
        guarded.kill()
        await guarded.start()
        await until(lambda: bus.health().counters.get("reconnected"))
        await bus.subscribe(TOPICS.live_facts(), ignore)  # a round trip behind what a reconnect would have asked for
        assert bus.health().counters["denied_subscription"] == count


async def test_a_right_that_comes_back_is_used_without_a_reconnect(
    guarded: EmbeddedBroker, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[bytes] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery.data)

    async with entered(guarded, keys, DASH) as bus, entered(guarded, keys, A) as speaker:
        await bus.subscribe(TOPICS.heartbeat(), hear)
        text = (keys / RULES).read_text()
        with caplog.at_level(logging.WARNING, "kvbus.bus"):
            (keys / RULES).write_text(text.replace('"kv.hb.*", ', ""))
            guarded.reload()
            await until(lambda: bus.health().counters.get("denied_subscription"), what="it is told of the loss")
        assert 'permissions violation for subscription to "kv.hb.*"' in caplog.text
        (keys / RULES).write_text(text)
        guarded.reload()

        async def hears_again() -> bool:
            await speaker.publish(TOPICS.heartbeat("a"), b"x")
            return bool(heard)

        await until(hears_again, what="it hears again")
        assert "reconnected" not in bus.health().counters


async def test_a_requester_hears_under_the_name_of_its_credential(guarded: EmbeddedBroker, keys: Path) -> None:
    async with entered(guarded, keys, GATEWAY) as bus, entered(guarded, keys, OPERATOR) as free:
        async with Publisher(bus=bus) as publisher:
            assert publisher.requester == "gateway"
        with pytest.raises(DeniedError, match=r"subscribe to kv\.result\.other"):
            await Publisher(bus=bus, requester="other").__aenter__()
        async with Publisher(bus=free) as publisher:
            assert publisher.requester.startswith("requester-")


async def test_an_acknowledgement_that_is_sent_astray_is_no_event(guarded: EmbeddedBroker, keys: Path) -> None:
    """The broker sends its own answers wherever they are asked for, rights or not: all that they can be is junk."""
    client = await nats.connect(guarded.url, nkeys_seed_str=read_credential(credential_path(keys, B)).seed)
    try:
        await client.publish(TOPICS.facts("b"), b"x", reply=TOPICS.settle("a"))
        await client.flush()
    finally:
        await client.close()
    async with entered(guarded, keys, DASH) as bus:

        async def astray() -> list[Delivery]:
            return list(await bus.history(TOPICS.settle("a")))

        await until(astray, what="the broker's answer stands in the log of a")
        for delivery in await astray():
            with pytest.raises(PeerError):
                decode(delivery.data)


async def test_a_bucket_that_was_made_with_that_door_open_is_shut_where_it_stands(tmp_path: Path, keys: Path) -> None:
    async with (
        EmbeddedBroker.started(tmp_path / "broker", include=keys / RULES) as broker,
        entered(broker, keys, OPERATOR) as bus,
    ):
        older = {**Assets(TOPICS, EMBEDDED).buckets()[0], "allow_rollup_hdrs": True}
        name = str(older["name"])
        await bus.ask(f"$JS.API.STREAM.CREATE.{name}", json.dumps(older).encode(), wait_s=30)
        await bus.put(BUCKET_INSTANCES, "a=2Fm0", b"x")
        await bus.ensure_assets()
        answer = json.loads(await bus.ask(f"$JS.API.STREAM.INFO.{name}", b"", wait_s=30))
        assert not answer["config"].get("allow_rollup_hdrs")
        assert await bus.keys(BUCKET_INSTANCES) == ["a=2Fm0"]


# ------------------------------------------------------------------------------------------------------------ checking


async def test_check_finds_a_right_too_many_and_one_too_few(guarded: EmbeddedBroker, keys: Path) -> None:
    def check(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "kvbus", "auth", "check", "--nats", guarded.url, "--json", *arguments],
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip

    whole = check("--dir", str(keys))
    assert whole.returncode == 0, whole.stderr
    assert len(json.loads(whole.stdout)["users"]) == len(USERS)
    text = (keys / RULES).read_text()
    made = {user: read_credential(credential_path(keys, user)) for user in USERS}
    assert text == rules(made, TOPICS)
    # The observer may hear requests, and may not hear heartbeats.
    (keys / RULES).write_text(text.replace('"kv.hb.*", ', '"kv.transfer.*.*", '))
    guarded.reload()

    found: list[tuple[str, bool]] = []

    def shows() -> bool:
        told = check("--credentials", str(credential_path(keys, DASH)))
        document = json.loads(told.stdout)
        lines = [line for user in document["users"] for line in user["lines"]]
        found[:] = [(line["subject"], line["found"]) for line in lines if not line["ok"]]
        return told.returncode == 1 and not document["ok"]

    await until(shows)
    assert ("kv.hb.*", False) in found
    assert ("kv.transfer.*.*", True) in found


# ----------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder with an authority, and a certificate of the broker's and one of ours."""
    openssl = shutil.which("openssl") or absent("this test makes certificates with openssl: install it")
    folder = tmp_path / "tls"
    folder.mkdir()

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True, timeout=150)

    new = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes".split()
    run(*new, "-x509", "-days", "2", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem",
        "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    for name in ("server", "client"):
        run(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        run(*"x509 -req -days 2 -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names".split(),
            "-in", f"{name}.csr", "-out", f"{name}.pem")  # fmt: skip
    (folder / "other.pem").write_text((folder / "ca.pem").read_text())
    run(*new, "-x509", "-days", "2", "-subj", "/CN=other", "-keyout", "other.key", "-out", "other.pem")
    return folder


@pytest.mark.slow
async def test_a_broker_with_tls_is_entered_with_its_authority_and_our_own_certificate(
    tmp_path: Path, keys: Path, certificates: Path
) -> None:
    tls = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    lines = {name: json.dumps(str(certificates / file)) for name, file in tls.items()}
    block = "\n".join(f"  {name}: {file}" for name, file in lines.items())
    include = certificates / "with-tls.conf"
    include.write_text(f"{(keys / RULES).read_text()}\ntls {{\n{block}\n  verify: true\n}}\n")
    ca, cert, key = (certificates / name for name in ("ca.pem", "client.pem", "client.key"))
    credentials = credential_path(keys, OPERATOR)
    async with EmbeddedBroker.started(tmp_path / "broker", include=include) as broker:
        bus = await NatsBus.connect(
            broker.url, name="t", credentials=credentials, tls=TlsFiles(ca, cert, key), limits=EMBEDDED
        )
        await bus.ensure_assets()
        await bus.store(TOPICS.facts("a"), b"x", message_id="x")
        assert [one.data for one in await bus.history(TOPICS.facts("a"))] == [b"x"]
        await bus.close()
        for wrong in (None, TlsFiles(certificates / "other.pem", cert, key), TlsFiles(ca)):
            with pytest.raises(BusError, match="no TLS with this broker"):
                await NatsBus.connect(broker.url, name="t", credentials=credentials, tls=wrong)
        entering = ["--nats", broker.url, "--credentials", str(credentials), "--tls-ca", str(ca)]
        checked = await asyncio.to_thread(auth, "check", *entering, "--tls-cert", str(cert), "--tls-key", str(key))
        assert checked.exit_code == 0, checked.output
        checked = await asyncio.to_thread(auth, "check", *entering, "--tls-cert", str(cert))
        assert "give both --tls-cert and --tls-key" in str(checked.exception)


def test_files_of_tls_that_do_not_fit_are_named(certificates: Path) -> None:
    ca, cert = certificates / "ca.pem", certificates / "client.pem"
    for files, said in (
        (TlsFiles(certificates / "nothing.pem"), "--tls-ca does not hold a certificate"),
        (TlsFiles(certificates / "ca.key"), "--tls-ca does not hold a certificate"),
        (TlsFiles(ca, cert, certificates / "server.key"), "--tls-cert and --tls-key do not fit"),
        (TlsFiles(ca, None, certificates / "server.key"), "give both"),
    ):
        with pytest.raises(ConfigError, match=said):
            files.context()


def test_a_new_credential_is_another_each_time() -> None:
    assert len({new_credential(A, "kv").seed for _ in range(8)}) == 8
