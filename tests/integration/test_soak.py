"""Short soaks, as a user starts them: kills on real servers, the files, the exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import ROOT, regions_left, wait_until

SECONDS = 300


def soak(model: Path, directory: Path, *kinds: str) -> dict[str, Any]:
    """The report of two kills, each of whose promises was kept."""
    command = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--kills", "2", "--streams", "16"]
    what = ["--engine", "simulated", "--kind", *kinds, "--artifact-dir", str(directory)]
    done = subprocess.run(
        [*command, *what],
        env={**os.environ, "MODEL": str(model)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == str(directory / "soak.json")
    return dict(json.loads((directory / "soak.json").read_text()))


def test_a_soak_kills_and_every_answer_is_whole(demo_model: Path, tmp_path: Path) -> None:
    others = regions_left()  # of servers that other tests of this process share
    report = soak(demo_model, tmp_path, "deployment")
    assert [phase["transport"] for phase in report["phases"]] == ["grpc", "http"]
    for phase in report["phases"]:
        assert phase["kills"] == 1
        assert phase["restarts"] >= 1
        assert phase["whole"] > 0
        assert {"worker", "guard", "tritonserver", "tensorrt_llm"} <= set(phase["usage"])
    assert report["recovery"]["simulated"][-1]["token_p50_s"] > 0
    assert "Plotly" in (tmp_path / "soak.html").read_text()
    # Other tests' servers may be ending now.
    wait_until(lambda: regions_left() <= others, 20, "the end of all shared memory")


def test_the_openai_face_with_a_triton_of_its_own_and_of_another(
    demo_model: Path, tmp_path: Path
) -> None:
    report = soak(demo_model, tmp_path, "openai", "attached")
    assert [phase["kind"] for phase in report["phases"]] == ["openai", "attached"]
    for phase in report["phases"]:
        assert phase["kills"] >= 1  # more where one comes in haste
        assert {"OpenAI SSE", "OpenAI JSON"} == set(phase["faces"])
        assert phase["whole"] > 0
        assert {"openai", "face", "guard", "tritonserver"} <= set(phase["usage"])
