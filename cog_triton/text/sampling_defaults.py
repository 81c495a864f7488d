"""The sampling parameters that a model's makers recommend, in its ``generation_config.json``."""

import json
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# The parameters that vLLM takes from the file as well, and which of their values are valid.
_VALID: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: value >= 0,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= -1 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: value > 0,
}


def sampling_defaults(directories: Iterable[str | Path]) -> dict[str, float]:
    """Return the recommended parameters of the first directory that has a generation_config.json.

    A value that is not valid is left out with a warning, and so is a file that cannot be read.
    """
    for directory in directories:
        file = Path(directory) / "generation_config.json"
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s cannot be read and is ignored: %s", file, error)
            return {}
        return _valid(content, file) if isinstance(content, dict) else {}
    return {}


def _valid(content: dict[str, Any], file: Path) -> dict[str, float]:
    defaults: dict[str, float] = {}
    for name, is_valid in _VALID.items():
        value = content.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(value) and is_valid(value):
            defaults[name] = int(value) if name == "top_k" else float(value)
        else:
            logger.warning("%s: %s %r is not valid and is ignored", file, name, value)
    return defaults
