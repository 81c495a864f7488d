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


def test_systemd() -> None:
    text = (DEPLOY / "cog-triton-openai.service").read_text()
    assert set(re.findall(r"^Environment=(\w+)=", text, re.MULTILINE)) <= set(VARIABLES)
    (command,) = re.findall(r"^ExecStart=\S+/cog-triton openai (.*)$", text, re.MULTILINE)
    assert cli.parse("openai", command.split()).api_keys_file == Path("/etc/cog-triton/keys.txt")


def test_prometheus() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert all(is_there(job["metrics_path"]) for job in jobs)
