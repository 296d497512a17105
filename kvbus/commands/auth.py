"""`kvbus auth`: who may speak on the bus. `init` makes credentials and rules, `check` tries them on the broker."""

import asyncio
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from kvbus.bus import NatsBus
from kvbus.bus_access import Credential, new_credential, read_credential
from kvbus.commands.common import (
    EXIT_FAILED,
    Entering,
    broker_options,
    console,
    entering,
    json_option,
    print_document,
)
from kvbus.commands.permission_checks import PROBE, PermissionLine, asset_names, permission_lines
from kvbus.config import discover
from kvbus.errors import ConfigError
from kvbus.permissions import Role, User, permissions_of
from kvbus.topics import Topics, escape

RULES = "auth.conf"
_OTHERS_MAY = 0o077


@click.group()
def auth() -> None:
    """Say who may speak: credentials for instances, requesters and observers."""


@auth.command(short_help="Write a credential for each user, and the broker's rules.")
@click.option("--instances", required=True, metavar="A,B", help="Names, separated by commas.")
@click.option("--members", multiple=True, metavar="A=M0,M1", help="An instance's members; m0 where none are given.")
@click.option("--requesters", default="", metavar="NAMES", help="Who asks for transfers: a gateway, a script.")
@click.option("--observers", default="", metavar="NAMES", help="Who watches: dashboards.")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, help="Where they are written."
)
@click.option("--prefix", default="kv", show_default=True, help="First token of all subjects.")
@click.option("--force", is_flag=True, help="Make new keys for all, also where there are some.")
@json_option
def init(
    instances: str, members: tuple[str, ...], requesters: str, observers: str, folder: Path, prefix: str, **flags: bool
) -> None:
    """Write a credential for each user, and the rules that a nats-server includes in its configuration.

    A credential that is there is kept, so that an instance can be added later; the rules are written anew.
    """
    users = [User(Role.OPERATOR, "operator"), *_instances(_names(instances), members)]
    users += [User(Role.REQUESTER, name) for name in _names(requesters)]
    users += [User(Role.OBSERVER, name) for name in _names(observers)]
    try:
        topics = Topics(prefix)
        for user in users:
            for name in (user.name, *user.members):
                escape(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    written, kept = write_folder(folder, users, topics, force=flags["force"])
    if flags["as_json"]:
        print_document({"rules": str(folder / RULES), "written": _texts(written), "kept": _texts(kept)})
        return
    for path in written:
        click.echo(f"wrote {path}")
    for path in kept:
        click.echo(f"kept  {path}")
    click.echo(f"rules {folder / RULES}: include them in the broker's configuration, then reload it")


@auth.command(short_help="Try on the broker what each credential may and may not do.")
@click.option("--dir", "folder", type=click.Path(path_type=Path, file_okay=False), help="Check all credentials there.")
@broker_options
@json_option
def check(nats_url: str, token: str, prefix: str, folder: Path | None, *, as_json: bool) -> int:
    """Try on the broker what each credential must be able to do, and what it must not.

    Nothing is stored or taken. Exit status 1: the broker allows or denies something that it should not.
    """
    del token, prefix  # a credential says for which prefix it is
    logging.getLogger("kvbus.bus").setLevel(logging.ERROR)  # denials are what is looked for here
    files = entering(discovered=not nats_url)
    one = files["credentials"]
    paths = sorted(folder.glob("*.cred")) if folder else [one] if one else []
    if not paths:
        raise ConfigError("no credential to check: give --credentials FILE, or --dir of `kvbus auth init`")
    found = asyncio.run(_check(nats_url or discover()[0], paths, files))
    good = all(line.ok for lines in found.values() for line in lines)
    if as_json:
        users = [{"user": who, "lines": [line.document() for line in lines]} for who, lines in found.items()]
        print_document({"ok": good, "users": users})
    else:
        _show(found)
    return 0 if good else EXIT_FAILED


# ------------------------------------------------------------------------------------------------------------- writing


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _instances(names: Sequence[str], members: Iterable[str]) -> list[User]:
    known: dict[str, tuple[str, ...]] = dict.fromkeys(names, ("m0",))
    for text in members:
        name, equals, listed = text.partition("=")
        if name not in known or not equals or not _names(listed):
            raise ConfigError("--members names an instance of --instances and its members: a=m0,m1", got=text)
        known[name] = tuple(_names(listed))
    return [User(Role.INSTANCE, name, listed) for name, listed in known.items()]


def credential_path(folder: Path, user: User) -> Path:
    """Return where a user's credential lies."""
    name = "operator" if user.role is Role.OPERATOR else f"{user.role}-{escape(user.name)}"
    return folder / f"{name}.cred"


def write_folder(
    folder: Path, users: Sequence[User], topics: Topics, *, force: bool = False
) -> tuple[list[Path], list[Path]]:
    """Write credentials and rules; return which credentials were written, and which were there and kept."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & _OTHERS_MAY:
        raise ConfigError(f"others may enter the folder of the credentials: chmod 700 {folder}")
    found = {} if force else _found(folder, users, topics.prefix)
    made = {user: found.get(user) or new_credential(user, topics.prefix) for user in users}
    fresh = [user for user in users if user not in found]
    for user in fresh:
        _write(credential_path(folder, user), made[user].text(), force=force)
    _write(folder / RULES, rules(made, topics), force=True)
    paths = {user: credential_path(folder, user) for user in users}
    return [paths[user] for user in fresh], [paths[user] for user in found]


def _found(folder: Path, users: Sequence[User], prefix: str) -> dict[User, Credential]:
    found = {}
    for user in users:
        path = credential_path(folder, user)
        if path.exists():
            found[user] = read_credential(path)
            if (found[user].user, found[user].prefix) != (user, prefix):
                raise ConfigError(
                    "this credential is for other members or another prefix: --force makes new keys for all",
                    file=str(path),
                )
    return found


def rules(made: Mapping[User, Credential], topics: Topics) -> str:
    """Return the part of a nats-server's configuration that says who may do what; it holds no secret."""
    lines = ["# Who may speak on kvbus's subjects. Made by `kvbus auth init`; include it, and reload the server.", ""]
    lines += ["authorization {", "  users = ["]
    for user, credential in made.items():
        may = permissions_of(user, credential.key, topics, asset_names(topics))
        publish: dict[str, Sequence[str]] = {"allow": may.publish}
        if may.publish_never:
            publish["deny"] = may.publish_never
        permissions = {"publish": publish, "subscribe": {"allow": may.subscribe}}
        lines += [f"    # {user.role} {escape(user.name)}"]
        lines += [f"    {{ nkey: {credential.key}, permissions: {json.dumps(permissions)} }}"]
    return "\n".join([*lines, "  ]", "}", ""])


def _write(path: Path, text: str, *, force: bool) -> None:
    """Write a file for its owner only, whole or not at all; ConfigError where it is there and stays."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    try:
        if force:
            partial.replace(path)
            return
        os.link(partial, path)  # fails where somebody wrote it meanwhile
    except FileExistsError as error:
        raise ConfigError("this file is there already: --force makes new keys for all", file=str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def _texts(paths: Iterable[Path]) -> list[str]:
    return [str(path) for path in paths]


# ------------------------------------------------------------------------------------------------------------ checking


async def _check(url: str, paths: Sequence[Path], files: Entering) -> dict[str, list[PermissionLine]]:
    credentials = [(path, read_credential(path)) for path in paths]
    owners = [credential.user for _, credential in credentials if credential.user]
    instances = [user.name for user in owners if user.role is Role.INSTANCE]
    found = {}
    for path, credential in credentials:
        user = credential.user
        if user is None:
            raise ConfigError("this credential does not say whose it is: `kvbus auth init` writes that", file=str(path))
        topics = Topics(credential.prefix)
        bus = await NatsBus.connect(url, name="kvbus-auth-check", credentials=path, tls=files["tls"], topics=topics)
        try:
            other = next((name for name in instances if name != user.name), PROBE)
            found[f"{user.role} {user.name}"] = await permission_lines(bus, user, topics, other=other)
        finally:
            await bus.close()
    return found


def _show(found: Mapping[str, Sequence[PermissionLine]]) -> None:
    screen = console(as_json=False)
    for who, lines in found.items():
        wrong = [line for line in lines if not line.ok]
        style = "red" if wrong else "green"
        screen.print(f"[bold]{who}[/]: [{style}]{len(lines) - len(wrong)} of {len(lines)} as they should be[/]")
        for line in lines:
            mark = "[green]ok  [/]" if line.ok else "[red]WRONG[/]"
            may = "allowed" if line.found else "denied"
            screen.print(f"  {mark} {may:<7} {line.verb:<9} {line.subject}", soft_wrap=True, markup=True)
