"""`kvbus up --auth`: each part enters with a credential of its own, and the commands beside it find theirs."""

import json
from pathlib import Path

import pytest

from tests.flow.command_line import Up, kvbus, up

pytestmark = pytest.mark.slow


def credential(running: Up, name: str) -> dict[str, str]:
    """What makes a command enter as that user."""
    return {"KVBUS_NATS_CREDENTIALS": str(Path(str(running.document["credentials"])).parent / f"{name}.cred")}


def test_up_with_users_moves_pages_and_lets_nobody_in_without_a_credential(folder: Path) -> None:
    folder.chmod(0o700)
    with up(folder, "--auth") as running:
        url = str(running.document["nats_url"])
        assert running.document["token"] == ""
        staged = kvbus("stage", "--from", "a", "--to", "b", "a prompt of some hundred letters " * 4, state=folder)
        assert staged.returncode == 0, staged.stdout + staged.stderr
        as_requester = kvbus(
            *("stage", "--from", "a", "--to", "b", "another prompt, again of a hundred letters " * 4),
            state=folder,
            env=credential(running, "requester-requester"),
        )
        assert as_requester.returncode == 0, as_requester.stdout + as_requester.stderr
        audited = kvbus("audit", state=folder, env=credential(running, "observer-observer"))
        assert "clean" in audited.stdout, audited.stdout + audited.stderr
        keys = Path(str(running.document["credentials"])).parent
        checked = kvbus("auth", "check", "--dir", str(keys), "--json", state=folder)
        assert json.loads(checked.stdout)["ok"], checked.stderr
        stranger = kvbus("watch", "--once", "--nats", url, state=folder)
        assert stranger.returncode == 2
        assert "refused these credentials" in stranger.stderr
    assert not keys.exists()


def test_up_does_not_guard_a_broker_of_somebody_elses(folder: Path) -> None:
    told = kvbus("up", "--auth", "--nats", "nats://127.0.0.1:1", state=folder)
    assert told.returncode == 2
    assert "the broker of --nats has its own users" in told.stderr


def test_a_key_without_its_authority_is_named(folder: Path) -> None:
    told = kvbus("watch", "--once", "--nats", "nats://127.0.0.1:1", "--tls-cert", "x.pem", state=folder)
    assert told.returncode == 2
    assert told.stderr.startswith("kvbus: --tls-cert and --tls-key need --tls-ca")
