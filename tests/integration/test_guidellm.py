"""GuideLLM, a third-party benchmark, on OpenAI's API; ``make test-clients`` installs it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.openai_server import OpenAIServer
from tests.support import ROOT

GUIDELLM = ROOT / ".venv-clients" / "bin" / "guidellm"
REQUESTS, OUTPUT_TOKENS = 12, 16
SECONDS = 300


def test_guidellm_measures_the_face(demo_model: Path, tmp_path: Path) -> None:
    if not GUIDELLM.exists():
        pytest.skip("GuideLLM is not installed: make test-clients")
    report = tmp_path / "report.json"
    backend = "kind=openai_http,target={},model=demo"
    options = {  # streamed chats with made-up prompts, four at a time
        "profile": "kind=concurrent,streams=4",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "data": f"kind=synthetic_text,prompt_tokens=16,output_tokens={OUTPUT_TOKENS}",
        "tokenizer": f"kind=hf_auto,model={demo_model}",
        "output": f"kind=json,path={report}",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    environment = {"MODEL": str(demo_model), "ENGINE": "simulated"}
    with OpenAIServer(environment, tmp_path / "log") as server:
        done = subprocess.run(
            [GUIDELLM, "run", *flags, "--backend", backend.format(server.url), "--disable-console"],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    counts = benchmark["metrics"]["output_token_count"]["successful"]
    assert counts["mean"] == OUTPUT_TOKENS
    assert counts["count"] == REQUESTS
