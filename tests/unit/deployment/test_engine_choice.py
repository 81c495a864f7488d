"""The engine that runs here, and why one cannot."""

from pathlib import Path
from typing import Any

import pytest

from cog_triton.deployment import engine_choice
from cog_triton.deployment.engine_choice import BACKEND_LIBRARY, Runtimes, resolve_engine
from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings
from tests.stand_in.engine import make_engine
from tests.support import load_cases

CASES = load_cases(__file__, "engines.yaml")


def runtimes(
    tmp_path: Path, *, backend: bool = True, tensorrt_llm: str | None = "1.2.1", gpu: bool = True
) -> Runtimes:
    backends = tmp_path / "backends"
    (backends / "tensorrtllm").mkdir(parents=True)
    if backend:
        (backends / "tensorrtllm" / BACKEND_LIBRARY).touch()
    return Runtimes(backends, tensorrt_llm, gpu)


@pytest.mark.parametrize("case", CASES["auto"])
def test_auto(case: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    has_engine, chosen = case["engine_dir"], case["chosen"]
    directory = make_engine(tmp_path / "engine") if has_engine else tmp_path
    here = runtimes(tmp_path, **{name: case[name] for name in ("backend", "tensorrt_llm", "gpu")})
    assert engine_choice.choose_engine(directory, here) == chosen
    assert ("is not used, because" in caplog.text) == (has_engine and not case["backend"])


@pytest.mark.parametrize("case", CASES["vllm"])
def test_auto_takes_vllm_where_it_can_run_on_a_gpu(case: dict[str, Any], tmp_path: Path) -> None:
    gpu, problem = case["gpu"], case.get("problem", "")
    vllm = case["version"], case["for_cpus"]
    here = Runtimes(tmp_path, None, gpu, *vllm)
    assert problem in next(engine_choice.vllm_problems(here), "")
    assert bool(problem) == bool([*engine_choice.vllm_problems(here)])
    chosen = "vllm" if gpu and not case["for_cpus"] and not problem else "transformers"
    assert engine_choice.choose_engine(None, here) == chosen
    with_tensorrt_llm = Runtimes(tmp_path, "1.3.0", gpu, *vllm)
    assert engine_choice.choose_engine(None, with_tensorrt_llm) == ("llmapi" if gpu else chosen)


def problem(directory: Path | None, here: Runtimes, **environment: str) -> str | None:
    settings = read_settings({"ENGINE_DIR": str(directory or ""), **environment})
    return next(engine_choice.engine_problems("tensorrtllm", settings, here), None)


@pytest.mark.parametrize("case", CASES["fits"])
def test_an_engine_that_fits_and_what_is_missing(case: dict[str, Any], tmp_path: Path) -> None:
    directory = make_engine(tmp_path / "engine", **case["built"])
    for rank in range(case["files"], case["built"].get("world_size", 1)):
        (directory / f"rank{rank}.engine").unlink()
    found = problem(directory, runtimes(tmp_path), WORLD_SIZE=str(case["ranks"]))
    assert str(case["problem"]) in str(found)


def test_an_engine_that_is_not_there_or_has_no_backend(tmp_path: Path) -> None:
    here, directory = runtimes(tmp_path), make_engine(tmp_path / "engine")
    assert "requires ENGINE_DIR" in str(problem(None, here))
    nowhere = Runtimes(tmp_path / "none", "1.3.0", True)
    assert f"{BACKEND_LIBRARY} does not exist" in str(problem(directory, nowhere))
    (directory / "config.json").write_text("oops")
    with pytest.raises(ConfigurationError, match=r"config\.json cannot be read"):
        problem(directory, here)


@pytest.mark.parametrize("case", CASES["versions"])
def test_another_or_an_unknown_version_is_worth_a_warning(
    case: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = runtimes(tmp_path, tensorrt_llm=case["installed"])
    assert problem(make_engine(tmp_path / "engine", version=case["built"]), here) is None
    assert case["warning"] in caplog.text


def test_ranks_are_for_the_backend_only(demo_model: Path) -> None:
    text = r"WORLD_SIZE=2 applies only to ENGINE=tensorrtllm"
    with pytest.raises(ConfigurationError, match=text):
        resolve_engine(read_settings({"MODEL": str(demo_model), "WORLD_SIZE": "2"}))


@pytest.mark.parametrize("case", CASES["swapped"])
def test_backends_that_swap_sampling_parameters(case: dict[str, Any]) -> None:
    swapped = engine_choice.has_swapped_sampling_params(case["engine"], case["version"])
    assert swapped is case["swapped"]


def test_adapters_that_cannot_be_used(tmp_path: Path) -> None:
    for engine, directory, problem in [
        (
            "simulated",
            tmp_path,
            "no effect with ENGINE=simulated; the engines that support adapters are transformers, ",
        ),
        ("transformers", tmp_path / "nowhere", "is not a directory"),
    ]:
        with pytest.raises(ConfigurationError, match=problem):
            resolve_engine(read_settings({"ENGINE": engine, "LORA_DIR": str(directory)}))


@pytest.mark.parametrize("case", CASES["adapters"])
def test_an_engine_that_cannot_have_adapters(case: dict[str, Any], tmp_path: Path) -> None:
    built = {"dtype": case["dtype"], "plugin_config": {"lora_plugin": case["plugin"]}}
    engine = make_engine(tmp_path / "engine", **built)
    given = {"LORA_DIR": str(tmp_path), "TRANSPORT": case["transport"]}
    assert case["problem"] in str(problem(engine, runtimes(tmp_path), **given))
