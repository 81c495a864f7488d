"""A short soak, as a user starts it: two kills on a real server, the files, the exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT, regions_left

SECONDS = 300


def test_a_soak_kills_and_every_answer_is_whole(demo_model: Path, tmp_path: Path) -> None:
    others = regions_left()  # of servers that other tests of this process share
    command = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--kills", "2", "--streams", "16"]
    what = ["--engine", "simulated", "--kind", "deployment", "--artifact-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, *what],
        env={**os.environ, "MODEL": str(demo_model)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "soak.json")
    report = json.loads((tmp_path / "soak.json").read_text())
    assert [phase["transport"] for phase in report["phases"]] == ["grpc", "http"]
    for phase in report["phases"]:
        assert phase["kills"] == 1
        assert phase["restarts"] >= 1
        assert phase["whole"] > 0
        assert {"worker", "guard", "tritonserver", "tensorrt_llm"} <= set(phase["usage"])
    assert report["recovery"]["simulated"][-1]["token_p50_s"] > 0
    assert "Plotly" in (tmp_path / "soak.html").read_text()
    assert regions_left() <= others
