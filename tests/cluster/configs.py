"""What compose itself makes of our files, before any container runs: `docker compose config`, with all profiles.

It needs no engine. No story starts Grafana, whose image has no stand-in; so its part is looked at here, as compose
resolves it: it is there when its profile is asked for, hears this host alone, and finds its files and Prometheus.
"""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.cluster.stack import COMMAND_S, OVERLAYS, ROOT, Document, Stack, StackError
from tests.cluster.stories import STORIES

GRAFANA = "grafana"
DATASOURCES = "/etc/grafana/provisioning/datasources/"
DASHBOARDS = "/etc/grafana/provisioning/dashboards/"
LOOPBACK = "127.0.0.1"


def has_compose() -> bool:
    """Whether compose can be asked here; it needs no engine for that."""
    docker = which("docker")
    if docker is None:
        return False
    ran = subprocess.run([docker, "compose", "version"], check=False, capture_output=True, timeout=COMMAND_S)
    return ran.returncode == 0


def config_troubles() -> list[str]:
    """Return what is wrong with files and overlays, as compose says it or as it resolves them."""
    scenes = {(path.stem, "") for path in (ROOT / "compose").glob("*.yaml")}
    scenes |= {(story.stack, story.overlay) for story in STORIES}
    told = {overlay for _, overlay in scenes}
    scenes |= {("partition", path.stem) for path in OVERLAYS.glob("*.yaml") if path.stem not in told}
    found = []
    for name, overlay in sorted(scenes):
        try:
            Stack(name, overlay).config("*")
        except StackError as error:
            found.append(str(error))
    if found:
        return found
    cluster = Stack("cluster")
    if GRAFANA in cluster.config()["services"]:
        found.append("cluster: grafana starts without its profile")
    return found + list(grafana_troubles(cluster.config(GRAFANA)))


def grafana_troubles(resolved: Document) -> Iterator[str]:
    """Yield what is wrong with Grafana's part of a file that compose resolved with Grafana's profile."""
    services = resolved["services"]
    if GRAFANA not in services:
        yield "cluster: the profile grafana starts no grafana"
        return
    ours = services[GRAFANA]
    mounts = {one["target"]: Path(one["source"]) for one in ours.get("volumes", []) if one["type"] == "bind"}
    yield from (f"grafana: {source} is no file" for source in mounts.values() if not source.is_file())
    ports = ours.get("ports", [])
    if not ports or any(one.get("host_ip") != LOOPBACK for one in ports):
        yield f"grafana: its ports are {ports}, expected one on {LOOPBACK} alone"
    sources = [one for given in _provisioned(mounts, DATASOURCES) for one in given["datasources"]]
    if not sources:
        yield f"grafana: nothing is mounted below {DATASOURCES}"
    for url in (urlsplit(one["url"]) for one in sources):
        if url.hostname not in services or url.hostname not in ours.get("depends_on", {}):
            yield f"grafana: it reads from {url.geturl()}, and does not wait for a service of that name"
    folders = [one["options"]["path"] for given in _provisioned(mounts, DASHBOARDS) for one in given["providers"]]
    shown = [target for target in mounts if target.endswith(".json") and str(Path(target).parent) in folders]
    if not shown:
        yield f"grafana: no dashboard is mounted where {folders} look for one"


def _provisioned(mounts: Mapping[str, Path], below: str) -> list[dict[str, Any]]:
    """Return the files that are mounted in one of Grafana's folders for provisioning."""
    files = [source for target, source in mounts.items() if target.startswith(below) and source.is_file()]
    return [yaml.safe_load(source.read_text(encoding="utf-8")) for source in files]
