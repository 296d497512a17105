"""A town whose broker knows its users: each worker has its own credential, and so has whoever asks and watches."""

import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_access import read_credential
from kvbus.bus_assets import EMBEDDED
from kvbus.commands.auth import RULES, credential_path, rules, write_folder
from kvbus.permissions import Role, User
from kvbus.publisher import Publisher
from kvbus.testing.cluster import free_ports
from tests.flow.command_line import environment
from tests.flow.town import TOPICS, Town, WorkerProcess

OPERATOR = User(Role.OPERATOR, "operator")
GATEWAY = User(Role.REQUESTER, "gateway")
DASH = User(Role.OBSERVER, "dash")


def instance(name: str, *members: str) -> User:
    """An instance's user; with one member, m0, where none is named."""
    return User(Role.INSTANCE, name, members or ("m0",))


@dataclass(slots=True)
class GuardedTown(Town):
    """A town in which workers enter with credentials."""

    users: Sequence[User] = field(default_factory=tuple)

    @property
    def keys(self) -> Path:
        return keys_of(self.folder)

    def credential(self, user: User) -> Path:
        return credential_path(self.keys, user)

    def _spawn(self, name: str, arguments: list[str]) -> WorkerProcess:
        user = next(one for one in self.users if one.name == name.partition("/")[0])
        given = [] if "--credentials" in arguments else ["--credentials", str(self.credential(user))]
        return Town._spawn(self, name, [*arguments, *given])

    async def connect(self, user: User) -> NatsBus:
        """Enter as one of the users."""
        return await NatsBus.connect(
            self.broker.url, name=f"test-{user.name}", credentials=self.credential(user), topics=TOPICS
        )

    def change(self, change: Mapping[str, str]) -> None:
        """Rewrite the rules text by text, as an operator's editor would, and have the broker read them."""
        path = self.keys / RULES
        text = path.read_text()
        for old, new in change.items():
            assert old in text, old
            text = text.replace(old, new)
        path.write_text(text)
        self.broker.reload()

    def restore(self) -> None:
        """Write the rules as they were made, and have the broker read them."""
        made = {user: read_credential(self.credential(user)) for user in self.users}
        (self.keys / RULES).write_text(rules(made, TOPICS))
        self.broker.reload()

    def kvbus(self, *arguments: str, user: User | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a command against this broker, as a user."""
        env = {"KVBUS_NATS_CREDENTIALS": str(self.credential(user))} if user else {}
        return subprocess.run(
            [sys.executable, "-m", "kvbus", *arguments, "--nats", self.broker.url],
            env=environment(self.folder / "state", env),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            stdin=subprocess.DEVNULL,
        )


def keys_of(folder: Path) -> Path:
    """Where a town's credentials lie."""
    return folder / "keys"


@asynccontextmanager
async def guarded_town(folder: Path, *instances: User) -> AsyncIterator[GuardedTown]:
    """A broker that knows an operator, these instances, a requester and an observer; the test starts the workers."""
    users = (OPERATOR, *instances, GATEWAY, DASH)
    (folder / "state").mkdir()
    write_folder(keys_of(folder), users, TOPICS)
    broker = EmbeddedBroker(folder / "broker", port=free_ports(1)[0], include=keys_of(folder) / RULES)
    await broker.start()
    operator = credential_path(keys_of(folder), OPERATOR)
    bus = await NatsBus.connect(broker.url, name="tester", credentials=operator, topics=TOPICS, limits=EMBEDDED)
    await bus.ensure_assets()
    gateway = credential_path(keys_of(folder), GATEWAY)
    asking = await NatsBus.connect(broker.url, name="gateway", credentials=gateway, topics=TOPICS)
    publisher = await Publisher(bus=asking, topics=TOPICS).__aenter__()
    built = GuardedTown(folder, broker, bus, publisher, users=users)
    try:
        yield built
    finally:
        try:
            await built.stop()
        finally:
            await asking.close()
