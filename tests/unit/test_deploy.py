"""The example for systemd in deploy/openai names what there is."""

import os
import re
from pathlib import Path

import pytest

from cog_triton import cli
from cog_triton.settings import VARIABLES
from tests.support import ROOT

DEPLOY = ROOT / "deploy" / "openai"


def test_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})  # the command's options set some
    text = (DEPLOY / "cog-triton-openai.service").read_text()
    assert set(re.findall(r"^Environment=(\w+)=", text, re.MULTILINE)) <= set(VARIABLES)
    (command,) = re.findall(r"^ExecStart=\S+/cog-triton openai (.*)$", text, re.MULTILINE)
    assert cli.parse("openai", command.split()).api_keys_file == Path("/etc/cog-triton/keys.txt")
