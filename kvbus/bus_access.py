"""How one enters the broker: a token, a user and a password, or an nkey, through TLS where that is asked for.

A credential is one small file: a line that says whose it is, and the seed of a key pair. The broker knows the public
half and what its owner may do; the seed signs what the broker sends at each connect, and never leaves this process.
"""

import asyncio
import base64
import json
import os
import re
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import nkeys

from kvbus.errors import BusError, ConfigError
from kvbus.permissions import Role, User, inbox_of

FILE_LENGTH_MAX_BYTES = 64 << 10
"""A credential of an instance with a thousand members is 20 KB; what is longer is some other file."""

_HEAD = "# kvbus "
_SEED = re.compile(r"SU[A-Z2-7]{56}")
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')
_RANDOM_BYTES = 32  # of an Ed25519 seed


class DeniedError(BusError):
    """The broker knows this user, and does not let it do that."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A key pair and, where the file says so, whose it is; the seed is never shown."""

    seed: str = field(repr=False)
    key: str
    user: User | None = None
    prefix: str = "kv"

    def text(self) -> str:
        """Return what its file holds; tools that want a bare seed skip the first line."""
        if self.user is None:
            return f"{self.seed}\n"
        whose = {"role": self.user.role, "name": self.user.name, "members": self.user.members, "prefix": self.prefix}
        return f"{_HEAD}{json.dumps(whose)}\n{self.seed}\n"


def new_credential(user: User, prefix: str) -> Credential:
    """Return a credential with a key pair that nobody has seen."""
    seed = bytes(nkeys.encode_seed(os.urandom(_RANDOM_BYTES), nkeys.PREFIX_BYTE_USER)).decode()
    return Credential(seed, _public_key(seed), user, prefix)


def is_exposed(mode: int, *, is_ours: bool) -> bool:
    """Whether a file of this mode is open to more people than it was meant for.

    Nobody but its owner may read a file of ours. One that somebody else owns we read by our group, as root hands out
    secrets (Kubernetes mounts them so, 0440 with the pod's `fsGroup`); there the group may read, and never write.
    """
    refused = stat.S_IRWXG | stat.S_IRWXO if is_ours else stat.S_IWGRP | stat.S_IRWXO
    return bool(mode & refused)


def read_credential(path: Path) -> Credential:
    """Return the credential in a file; ConfigError says what is wrong with the file, and never what it holds.

    A file that is open to others is refused (`is_exposed`).
    """
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            is_ours = about.st_uid == os.geteuid()
            if is_exposed(about.st_mode, is_ours=is_ours):
                raise ConfigError(f"others may read this credential: chmod {600 if is_ours else 440} {path}")
            text = file.read(FILE_LENGTH_MAX_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"the credential cannot be read ({reason}): give the file that `kvbus auth init` wrote", file=str(path)
        ) from error
    seeds = [line.strip() for line in text.splitlines() if line.strip().startswith("S")]
    if len(seeds) != 1 or not _SEED.fullmatch(seeds[0]) or len(text) > FILE_LENGTH_MAX_BYTES:
        raise ConfigError("this file is no credential: it must hold one seed of a user's nkey (SU…)", file=str(path))
    raw = base64.b32decode(f"{seeds[0]}{'=' * (-len(seeds[0]) % 8)}")
    if nkeys.crc16_checksum(raw[:-2]) != raw[-2:]:  # nkeys itself does not look, and would sign with another key
        raise ConfigError("the seed in this credential is damaged: use a whole copy of it", file=str(path))
    key = _public_key(seeds[0])
    user, prefix = _owner(text, path)
    return Credential(seeds[0], key, user, prefix)


def _public_key(seed: str) -> str:
    pair = nkeys.from_seed(bytearray(seed.encode()))
    try:
        return bytes(pair.public_key).decode()
    finally:
        pair.wipe()


def _owner(text: str, path: Path) -> tuple[User | None, str]:
    for line in text.splitlines():
        if line.startswith(_HEAD):
            try:
                whose = json.loads(line.removeprefix(_HEAD))
                return User(Role(whose["role"]), str(whose["name"]), tuple(whose["members"])), str(whose["prefix"])
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise ConfigError("the first line of this credential is damaged", file=str(path)) from error
    return None, "kv"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The authority that signed the broker's certificate, and, where the broker asks for one, our own."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return what a connection needs; ConfigError names the file that does not fit."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("a certificate and its key go together: give both --tls-cert and --tls-key, or neither")
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(self.ca))
            context.minimum_version = ssl.TLSVersion.TLSv1_2
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-ca does not hold a certificate: {error}", file=str(self.ca)) from error
        if self.cert is not None and self.key is not None:
            try:
                context.load_cert_chain(str(self.cert), str(self.key), password=str)  # never asked of a person
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"--tls-cert and --tls-key do not fit: {error}", cert=str(self.cert)) from error
        return context


class ClientOptions(TypedDict, total=False):
    """The client's own words for how to enter."""

    token: str | None
    user: str | None
    password: str | None
    nkeys_seed_str: str
    inbox_prefix: str
    tls: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class Access:
    """What the client is given to enter with; never shown."""

    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    credential: Credential | None = None
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(
        cls, token: str | None, user: str | None, password: str | None, credentials: Path | None, tls: TlsFiles | None
    ) -> "Access":
        """Read the files that were named; ConfigError where one of them does not fit."""
        credential = read_credential(credentials) if credentials else None
        return cls(token, user, password, credential, tls.context() if tls else None)

    def options(self) -> ClientOptions:
        """Return the client's own words for it; without a credential, inboxes are those that the client chooses."""
        options: ClientOptions
        if self.credential is not None:
            options = {"nkeys_seed_str": self.credential.seed, "inbox_prefix": inbox_of(self.credential.key)}
        else:
            options = {"token": self.token, "user": self.user, "password": self.password}
        if self.tls is not None:
            options["tls"] = self.tls
        return options


class Denials:
    """Ends waits for what the broker has denied: it says so at once, and the answer never comes.

    Its words name only the kind and the subject, in lower case, so all who wait for that one are told.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], set[asyncio.Future[None]]] = {}

    def heard(self, error: Exception) -> tuple[str, str] | None:
        """Take an error of the client's; where it is a denial, return its kind and its subject in lower case."""
        found = _DENIED.search(str(error).lower())
        if found is None:
            return None
        for waiting in self._waiting.get((found[1], found[2]), ()):
            if not waiting.done():
                waiting.set_result(None)
        return found[1], found[2]

    @contextmanager
    def of(self, kind: str, subject: str) -> Iterator["asyncio.Future[None]"]:
        """Yield what is set once a publish or a subscription to this subject was denied."""
        denied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault((kind, subject.lower()), set())
        waiting.add(denied)
        try:
            yield denied
        finally:
            waiting.discard(denied)
            if not waiting:
                self._waiting.pop((kind, subject.lower()), None)


def denied(kind: str, subject: str) -> DeniedError:
    """Return what to tell a person whose credential does not reach so far."""
    verb = "publish on" if kind == "publish" else "subscribe to"
    return DeniedError(
        f"the broker does not let this user {verb} {subject}: use the credential of who may", subject=subject
    )
