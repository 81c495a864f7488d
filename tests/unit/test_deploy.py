"""The examples in deploy/openai name what there is."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from cog_triton.settings import describe
from tests.support import ROOT
from tests.unit.faces.openai.support import Backend, ask

sys.path.insert(0, str(ROOT / "scripts"))
DEPLOY = ROOT / "deploy" / "openai"
SETTINGS = {name for name, *_ in describe()}


def is_there(path: str) -> bool:
    return ask(Backend(), "GET", path).status_code == 200


def parsed(arguments: list[str]) -> Any:
    import serve_openai

    return serve_openai.parse(arguments)


def test_kubernetes() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert set(environment) <= SETTINGS
    assert int(environment["DRAIN_SECONDS"]) < pod["spec"]["terminationGracePeriodSeconds"]
    assert container["command"][:2] == ["cog-triton", "openai"]
    options = parsed(container["command"][2:])
    assert options.port == container["ports"][0]["containerPort"]
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness")]
    annotations = pod["metadata"]["annotations"]
    assert all(map(is_there, [*probes, annotations["prometheus.io/path"]]))
    assert service["spec"]["selector"] == pod["metadata"]["labels"]


def test_systemd() -> None:
    text = (DEPLOY / "cog-triton-openai.service").read_text()
    assert set(re.findall(r"^Environment=(\w+)=", text, re.MULTILINE)) <= SETTINGS
    (command,) = re.findall(r"^ExecStart=\S+/cog-triton openai (.*)$", text, re.MULTILINE)
    assert parsed(command.split()).api_keys_file == Path("/etc/cog-triton/keys.txt")


def test_prometheus() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert all(is_there(job["metrics_path"]) for job in jobs)
