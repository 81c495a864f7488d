"""DEVICE=cuda where it cannot be had is refused at once, with the remedy."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

from cog_triton.server import devices
from cog_triton.server.devices import Torch, device_problem, early_problem, gpu_count
from cog_triton.server.log import GPU
from cog_triton.settings import read_settings
from tests.support import script

FOR_CUDA = Torch("2.13.0", "13.0")
FOR_CPUS = Torch("2.13.0+cpu", None)
FOR_AMD = Torch("2.13.0+rocm7.2", None, other_gpus=True)


@pytest.mark.parametrize(
    ("device", "gpus", "torch", "problem"),
    [
        ("cpu", 0, FOR_CPUS, None),
        ("auto", 0, FOR_CPUS, None),
        ("cuda", 1, FOR_CUDA, None),
        ("cuda:1", 2, FOR_CUDA, None),
        ("cuda", 0, FOR_AMD, None),
        ("cuda", 1, None, None),
        ("cuda", 0, FOR_CUDA, "no NVIDIA GPU is visible"),
        ("cuda", 0, FOR_CPUS, "no NVIDIA GPU is visible"),
        ("cuda", 1, FOR_CPUS, "PyTorch 2.13.0+cpu is a build for CPUs"),
        ("cuda:2", 2, FOR_CUDA, "this machine has 2 GPU"),
    ],
)
def test_the_device_is_checked(
    device: str, gpus: int, torch: Torch | None, problem: str | None
) -> None:
    found = device_problem(device, gpu=gpus > 0, count=gpus, torch=torch)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert problem in found
        assert f"DEVICE={device}" in found


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpu_count(tmp_path) == 3


def test_the_build_of_pytorch_is_read_from_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    found = devices.installed_torch()
    assert found is not None
    assert found.cuda == runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert devices.installed_torch() is None
    (tmp_path / "version.py").write_text(
        "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )

    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr("importlib.util.find_spec", lambda _: Spec)
    assert devices.installed_torch() == Torch(found.version, "13.0")


@pytest.mark.parametrize(
    ("engine", "checked"),
    [({"ENGINE": "transformers"}, True), ({}, True), ({"ENGINE": "vllm"}, False)],
    ids=["transformers", "auto", "vllm"],
)
def test_only_the_transformers_engine_has_a_device(
    engine: dict[str, str], checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "GPU", False)
    monkeypatch.setattr(devices, "installed_torch", lambda: FOR_CUDA)
    settings = read_settings({"DEVICE": "cuda", **engine})
    assert (early_problem(settings) is not None) == checked


@pytest.mark.skipif(GPU, reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["run_prediction.py", "serve.py", "serve_openai.py"])
def test_a_start_without_cuda_ends_with_the_remedy(name: str) -> None:
    done = script(name, environ={"DEVICE": "cuda", "PORT": "0" if "openai" in name else "5999"})
    assert done.returncode == 1
    assert "set DEVICE=cpu" in done.stderr
    assert "tritonserver" not in done.stderr
