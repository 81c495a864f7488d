from __future__ import annotations

import re
from pathlib import Path

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.settings import describe, read_settings


def test_defaults_are_tritons_usual_ports_on_this_machine_alone() -> None:
    settings = read_settings({})
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (8000, 8001, 8002)
    assert settings.host == "127.0.0.1"
    assert settings.transport == "grpc"
    assert settings.start_timeout == 300


def test_an_empty_variable_counts_as_unset() -> None:
    assert read_settings({"TRITON_HTTP_PORT": "", "END_ID": ""}) == read_settings({})


def test_values_are_typed() -> None:
    settings = read_settings(
        {"TRITON_HTTP_PORT": "0", "END_ID": "0", "LOG_PERFORMANCE_METRICS": "true"}
    )
    assert settings.http_port == 0
    assert settings.end_id == 0
    assert settings.log_performance_metrics is True


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_settings({"TRITON_HTTP_PORT": "http", "ENGINE": "magic", "TRITON_START_TIMEOUT": "0"})
    for name in ("TRITON_HTTP_PORT='http'", "ENGINE='magic'", "TRITON_START_TIMEOUT='0'"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("DEVICE", ["auto", "cpu", "cuda", "cuda:3"], ["gpu", "cuda:", "cuda:x"]),
        ("DTYPE", ["auto", "bfloat16"], ["int3", "half"]),
    ],
)
def test_a_value_that_the_engine_would_refuse_is_refused_here(
    name: str, good: list[str], bad: list[str]
) -> None:
    for value in good:
        assert getattr(read_settings({name: value}), name.lower()) == value
    for value in bad:
        with pytest.raises(ConfigurationError, match=f"invalid settings: {name}='{value}'"):
            read_settings({name: value})


def test_a_directory_is_made_absolute_and_an_id_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read_settings({"MODEL": "model"}).model_dir == str(tmp_path / "model")
    assert (
        read_settings({"MODEL": "meta-llama/Llama-3.1-8B"}).model_dir == "meta-llama/Llama-3.1-8B"
    )
    assert read_settings({"MODEL": "a/b", "TOKENIZER": "model"}).tokenizer_dir == str(
        tmp_path / "model"
    )


def test_every_setting_is_described_and_nothing_else_reads_the_environment() -> None:
    rows = describe()
    assert all(name.isupper() and kind and text for name, kind, _, text in rows)
    root = Path(__file__).resolve().parents[2]
    readers = [
        file.relative_to(root).as_posix()
        for file in [*root.glob("cog_triton/**/*.py"), *root.glob("triton_model_repo/**/*.py")]
        if re.search(r"os\.(environ|getenv)", file.read_text())
    ]
    # processes.py, tritonserver.py and guard.py hand their environment on and read no setting from it,
    # live_stream.py and predictions.py name a descriptor, and vllm_processes.py writes what vLLM reads
    # there. The tools are commands of their own.
    own = re.compile("tools/")
    assert sorted(file for file in readers if not own.match(file)) == [
        "cog_triton/engines/interpreter.py",
        "cog_triton/faces/cog/live_stream.py",
        "cog_triton/faces/cog/predictions.py",
        "cog_triton/faces/openai/workers.py",
        "cog_triton/server/guard.py",
        "cog_triton/server/tritonserver.py",
        "cog_triton/settings.py",
    ]
