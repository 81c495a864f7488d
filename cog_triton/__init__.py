"""A Cog predictor that runs Triton Inference Server with TensorRT-LLM as a subprocess."""

from pathlib import Path

__version__ = "0.1.0"

_PACKAGE = Path(__file__).resolve().parent
# What stands at the top of the repository, such as predict.py; a wheel has it in the package.
ROOT = _PACKAGE / "root" if (_PACKAGE / "root").is_dir() else _PACKAGE.parent
