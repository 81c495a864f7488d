"""The NVIDIA GPUs of this machine, and whether the installed PyTorch can use them, without importing it."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from cog_triton.server.log import GPU
from cog_triton.settings import Settings


@dataclass(frozen=True)
class Torch:
    """The installed PyTorch; importing it takes seconds, so its files are read instead."""

    version: str
    # The CUDA that it was built for; None for a build for CPUs.
    cuda: str | None
    # Built for AMD's or Intel's GPUs.
    other_gpus: bool = False

    @property
    def for_cpus(self) -> bool:
        return self.cuda is None and not self.other_gpus


def installed_torch() -> Torch | None:
    """Return the PyTorch of this environment; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        version = importlib.metadata.version("torch")
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    values = dict(re.findall(r"^(\w+)(?:: [^=\n]+)? = '?([^'\n]*)'?$", text, re.MULTILINE))
    cuda = values.get("cuda", "None")
    return Torch(
        version=version,
        cuda=None if cuda == "None" else cuda,
        other_gpus=any(values.get(name, "None") != "None" for name in ("hip", "xpu")),
    )


def torch_for_cpus() -> Torch | None:
    """Return the installed PyTorch if it is a build for CPUs, which uses no GPU of this machine."""
    torch = installed_torch()
    return torch if torch is not None and torch.for_cpus else None


def gpu_count(devices: Path = Path("/dev")) -> int:
    """Return how many GPUs the NVIDIA driver has; 0 where it has no file for each, as under WSL."""
    return len(list(devices.glob("nvidia[0-9]*")))


def device_problem(device: str, *, gpu: bool, count: int, torch: Torch | None) -> str | None:
    """Return why the transformers engine cannot run on DEVICE, with the remedy; None if it may."""
    if not device.startswith("cuda"):
        return None
    if torch is not None and torch.other_gpus:
        # PyTorch calls an AMD GPU cuda as well.
        return None
    if not gpu:
        return (
            f"DEVICE={device}, but no NVIDIA GPU is visible on this machine: install its driver, give a "
            f"container the GPU (docker run --gpus all), or set DEVICE=cpu"
        )
    if torch is not None and torch.for_cpus:
        return (
            f"DEVICE={device}, but the installed PyTorch {torch.version} is a build for CPUs: install "
            f"one for CUDA (https://pytorch.org/get-started/locally/), or set DEVICE=cpu"
        )
    number = int(device.partition(":")[2] or 0)
    if 0 < count <= number:
        return f"DEVICE={device}, but this machine has {count} GPU(s): cuda:0 is the first"
    return None


def problem_here(settings: Settings) -> str | None:
    """Return why the transformers engine cannot run on this machine's DEVICE; None if it may."""
    return device_problem(settings.device, gpu=GPU, count=gpu_count(), torch=installed_torch())


def early_problem(settings: Settings) -> str | None:
    """Return ``problem_here`` before anything is imported for a start, if the engine is known already."""
    will_be_transformers = settings.engine == "auto" and settings.engine_dir is None and not GPU
    if settings.engine == "transformers" or will_be_transformers:
        return problem_here(settings)
    return None
