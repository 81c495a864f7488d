"""A large language model on NVIDIA Triton, with the APIs of OpenAI, Anthropic, Replicate and Cog."""

from pathlib import Path

# The version of the project, which the wheel and the chart of deploy/helm have as well.
__version__ = "0.1.0"

_PACKAGE = Path(__file__).resolve().parent
# What stands at the top of the repository, such as predict.py; a wheel has it in the package.
ROOT = _PACKAGE / "root" if (_PACKAGE / "root").is_dir() else _PACKAGE.parent
