"""Short soaks, as a user starts them: kills on real servers, the files, the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import regions_left, script, wait_until


def soak(model: Path, directory: Path, *kinds: str) -> dict[str, Any]:
    """The report of two kills, each of whose promises was kept."""
    load = ("--kills", "2", "--streams", "16", "--engine", "simulated", "--kind", *kinds)
    done = script("soak.py", *load, "--artifact-dir", str(directory), environ={"MODEL": str(model)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == str(directory / "soak.json")
    return dict(json.loads((directory / "soak.json").read_text()))


@pytest.mark.rare
def test_a_soak_kills_and_every_answer_is_whole(demo_model: Path, tmp_path: Path) -> None:
    others = regions_left()  # of servers that other tests of this process share
    report = soak(demo_model, tmp_path, "cog", "openai")
    assert [phase["kind"] for phase in report["phases"]] == ["cog", "openai"]
    faces = ({"cog-sse", "cog-json", "openai-sse", "triton-grpc"}, {"openai-sse", "openai-json"})
    for phase, names in zip(report["phases"], faces, strict=True):
        assert phase["kills"] == 1
        assert phase["recoveries"][0]["token_s"] > 0
        assert phase["whole"] > 0
        assert set(phase["faces"]) == names
        assert {"guard", "tritonserver", "tensorrt_llm", "soak"} <= set(phase["usage"])
    assert "Plotly" in (tmp_path / "soak.html").read_text()
    # Other tests' servers may be ending now.
    wait_until(lambda: regions_left() <= others, 20, "the end of all shared memory")
