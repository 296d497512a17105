"""The manifests of deploy/kubernetes fit the schemas, each other, and the commands that kvbus has."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from kvbus.cli import kvbus
from tests.exposed import promtool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
VERSIONS = ("1.29", "1.34")
"""The first one that has sidecars, and a late one."""

Document = dict[str, Any]


def documents(name: str) -> list[Document]:
    """All documents of one file."""
    return [one for one in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")) if one]


EVERY = [(name, one) for name in KUSTOMIZATION["resources"] for one in documents(name)]
every_one = pytest.mark.parametrize(
    "document", [one for _, one in EVERY], ids=[f"{one['kind']} {one['metadata']['name']}" for _, one in EVERY]
)


def pods() -> list[tuple[str, Document]]:
    """Every pod that the manifests make, with its maker's name."""
    found = [(one["metadata"]["name"], one["spec"].get("template")) for _, one in EVERY if "spec" in one]
    return [(name, template) for name, template in found if template]


def containers(template: Document) -> list[Document]:
    """The containers of a pod, sidecars too."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def selects(selector: Document, template: Document) -> bool:
    """Whether labels that are looked for are those of a pod."""
    wanted = selector.get("matchLabels", selector)
    return bool(wanted.items() <= template["metadata"]["labels"].items())


@every_one
@pytest.mark.parametrize("version", VERSIONS)
def test_it_fits_the_schema_of_its_kind(document: Document, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_noticed() -> None:
    (worker, *_) = documents("instance-a.yaml")
    broken = deepcopy(worker)
    broken["spec"]["template"]["spec"]["initContainers"][0]["restartPolicies"] = "Always"

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_the_kustomization_names_every_file_and_no_other() -> None:
    assert sorted(KUSTOMIZATION["resources"]) == sorted(
        path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml"
    )


@every_one
def test_it_lies_in_the_namespace(document: Document) -> None:
    if document["kind"] != "Namespace":
        assert document["metadata"]["namespace"] == KUSTOMIZATION["namespace"]


def test_the_toolbox_fits_is_let_through_to_the_broker_and_is_not_started_with_the_rest() -> None:
    (toolbox,) = documents("tools/toolbox.yaml")
    for version in VERSIONS:
        kubernetes_validate.validate(toolbox, version, strict=True)
    (policy,) = (one for _, one in EVERY if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "nats")

    assert selects(policy["spec"]["ingress"][0]["from"][0]["podSelector"], toolbox)
    (container,) = toolbox["spec"]["containers"]
    assert "KVBUS_NATS_CREDENTIALS" in {one["name"] for one in container["env"]}
    assert toolbox["spec"]["volumes"][0]["secret"] == {"secretName": "kvbus-operator", "defaultMode": 0o440}
    assert toolbox["spec"]["containers"][0]["securityContext"] == containers(pods()[0][1])[0]["securityContext"]
    assert "tools" not in " ".join(KUSTOMIZATION["resources"])


def test_an_upgrade_can_make_the_job_anew_and_there_is_one_gateway_to_ask() -> None:
    (job,) = documents("init.yaml")
    gateway = next(one for one in documents("gateway.yaml") if one["kind"] == "Deployment")

    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    assert gateway["spec"]["replicas"] == 1, "what it tells of a transfer is in its own memory"


def test_the_way_to_metrics_is_open_by_number_since_a_sidecar_has_that_port() -> None:
    (policy,) = (one for _, one in EVERY if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "workers")
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
    (worker,) = documents("instance-a.yaml")[0]["spec"]["template"]["spec"]["initContainers"]
    (engine,) = documents("instance-a.yaml")[0]["spec"]["template"]["spec"]["containers"]

    assert {port["containerPort"] for port in worker["ports"]} <= opened
    assert opened - {port["containerPort"] for port in worker["ports"]} <= {port["name"] for port in engine["ports"]}


def test_the_commands_and_the_scrapes_of_the_page_are_ones_that_there_are(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8") + (FOLDER / "tools/toolbox.yaml").read_text()
    lines = [found.split() for found in re.findall(r"exec toolbox -- kvbus (.+)$", text, re.MULTILINE)]
    assert ["drain", "a", "--stay"] in lines
    for name, *arguments in lines:
        command = kvbus.get_command(click.Context(kvbus), name)
        assert command is not None
        command.make_context(name, list(arguments))
    (scrapes,) = re.findall(r"^```yaml\n(scrape_configs:.+?)^```", text, re.MULTILINE | re.DOTALL)
    path = tmp_path / "prometheus.yml"
    there = "static_configs: [{targets: [gateway:8080]}]"  # Debian's promtool knows no Kubernetes
    path.write_text(re.sub(r"kubernetes_sd_configs: .+", there, scrapes), encoding="utf-8")
    assert "SUCCESS" in promtool("check", "config", str(path))
    compose = yaml.safe_load((ROOT / "compose" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    for ours, theirs in zip(yaml.safe_load(scrapes)["scrape_configs"], compose["scrape_configs"], strict=True):
        assert (ours["job_name"], ours["metric_relabel_configs"]) == (
            theirs["job_name"],
            theirs["metric_relabel_configs"],
        )


def test_services_budgets_and_policies_select_pods_that_exist() -> None:
    templates = [template for _, template in pods()]
    selectors = [one["spec"]["selector"] for _, one in EVERY if one["kind"] in {"Service", "PodDisruptionBudget"}]
    for policy in (one["spec"] for _, one in EVERY if one["kind"] == "NetworkPolicy"):
        selectors.append(policy["podSelector"] or {"matchLabels": {}})
        peers = [peer for rule in policy.get("ingress", []) for peer in rule.get("from", [])]
        selectors += [peer["podSelector"] for peer in peers if "podSelector" in peer]

    assert len(selectors) >= 8
    for selector in selectors:
        assert any(selects(selector, template) for template in templates), selector


def test_who_speaks_to_the_broker_is_let_through_and_nobody_else() -> None:
    (policy,) = (one for _, one in EVERY if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "nats")
    (clients,) = (rule for rule in policy["spec"]["ingress"] if rule["ports"] == [{"port": "client"}])
    let_through = clients["from"][0]["podSelector"]

    for name, template in pods():
        speaks = any("KVBUS_NATS_URL" in {env["name"] for env in one.get("env", [])} for one in containers(template))
        assert selects(let_through, template) == speaks, name


@pytest.mark.parametrize(("name", "template"), pods(), ids=[name for name, _ in pods()])
def test_its_mounts_and_probes_name_what_the_pod_has(name: str, template: Document) -> None:
    del name
    volumes = {one["name"] for one in template["spec"].get("volumes", [])} | {"data"}  # claimed by the broker's set
    for one in containers(template):
        ports = {port["name"] for port in one.get("ports", [])}
        assert {mount["name"] for mount in one.get("volumeMounts", [])} <= volumes
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for way in ("httpGet", "tcpSocket"):
                assert one.get(probe, {}).get(way, {}).get("port") in ports | {None}


@pytest.mark.parametrize(("name", "template"), pods(), ids=[name for name, _ in pods()])
def test_it_runs_without_rights_and_within_a_bound_of_memory(name: str, template: Document) -> None:
    del name
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    assert template["spec"]["automountServiceAccountToken"] is False
    for one in containers(template):
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in one["resources"]["limits"]


def test_every_command_of_kvbus_is_one_that_it_has_with_these_options() -> None:
    lines = [one["args"] for _, template in pods() for one in containers(template) if one["image"] == "kvbus:latest"]

    assert {words[0] for words in lines} == {"init", "worker", "gateway"}
    for name, *arguments in lines:
        command = kvbus.get_command(click.Context(kvbus), name)
        assert command is not None
        command.make_context(name, list(arguments))


def test_the_worker_is_a_sidecar_that_shares_socket_memory_and_processes_with_its_engine() -> None:
    (instance, *_) = documents("instance-a.yaml")
    pod = instance["spec"]["template"]["spec"]
    (worker,), (engine,) = pod["initContainers"], pod["containers"]
    shared = {mount["mountPath"] for mount in worker["volumeMounts"]} & {
        mount["mountPath"] for mount in engine["volumeMounts"]
    }

    assert instance["spec"]["strategy"] == {"type": "Recreate"}, "a name must not be taken twice"
    assert worker["restartPolicy"] == "Always"
    assert pod["shareProcessNamespace"] is True
    assert shared == {"/run/kvbus", "/dev/shm"}  # noqa: S108 - what the pod mounts there is memory of its own
    for volume in pod["volumes"]:
        if volume["name"] in {"run", "shm"}:
            assert volume["emptyDir"]["medium"] == "Memory"
            assert volume["emptyDir"]["sizeLimit"]


def test_both_instances_are_the_same_but_for_their_names() -> None:
    text = yaml.safe_dump_all(documents("instance-a.yaml"))
    swapped = text.replace("--allow=b", "--allow=PEER").replace("instance-a", "instance-b")
    for old, new in (
        ("kvbus/instance: a", "kvbus/instance: b"),
        ("--instance=a", "--instance=b"),
        ("a.m0.sock", "b.m0.sock"),
        ("--allow=PEER", "--allow=a"),
    ):
        swapped = swapped.replace(old, new)

    assert swapped == yaml.safe_dump_all(documents("instance-b.yaml"))
