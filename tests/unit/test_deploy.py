"""The examples in deploy/openai name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from cog_triton import cli
from cog_triton.settings import VARIABLES
from tests.support import ROOT
from tests.unit.faces.openai.support import Backend, ask

DEPLOY = ROOT / "deploy" / "openai"


def is_there(path: str) -> bool:
    return ask(Backend(), "GET", path).status_code == 200


def test_kubernetes() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert set(environment) <= set(VARIABLES)
    assert int(environment["DRAIN_SECONDS"]) < pod["spec"]["terminationGracePeriodSeconds"]
    assert container["command"][:2] == ["cog-triton", "openai"]
    options = cli.parse("openai", container["command"][2:])
    assert options.port == container["ports"][0]["containerPort"]
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness")]
    annotations = pod["metadata"]["annotations"]
    assert all(map(is_there, [*probes, annotations["prometheus.io/path"]]))
    assert service["spec"]["selector"] == pod["metadata"]["labels"]


def test_systemd() -> None:
    text = (DEPLOY / "cog-triton-openai.service").read_text()
    assert set(re.findall(r"^Environment=(\w+)=", text, re.MULTILINE)) <= set(VARIABLES)
    (command,) = re.findall(r"^ExecStart=\S+/cog-triton openai (.*)$", text, re.MULTILINE)
    assert cli.parse("openai", command.split()).api_keys_file == Path("/etc/cog-triton/keys.txt")


def test_prometheus() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert all(is_there(job["metrics_path"]) for job in jobs)
