"""How many tokens prompt and output may have together, as far as files tell before the engine runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FURTHER = ("llm_api_config", "vllm_config")


def context_length(values: Mapping[str, object]) -> int | None:
    """The context length of the engine that these template variables of tensorrt_llm describe.

    Returns:
        None where only the engine will know: the model is not on this machine, or does not say.
    """
    limits = [int(str(values["max_seq_len"]))] if values.get("max_seq_len") else []
    if values.get("triton_backend") == "tensorrtllm":
        limits += _of_engine(values.get("engine_dir"))
    # The simulated engine has no model, and a file of further arguments may lift the model's limit.
    elif values.get("engine") != "simulated" and not any(map(values.get, _FURTHER)):
        limits += _of_model(values.get("model"))
    return min(limits, default=None)


def _of_engine(directory: object) -> list[int]:
    build = _configuration(directory).get("build_config", {})
    return _numbers(build.get("max_seq_len"))


def _of_model(directory: object) -> list[int]:
    config = _configuration(directory)
    return _numbers(config.get("text_config", config).get("max_position_embeddings"))


def _configuration(directory: object) -> dict[str, Any]:
    try:
        config = json.loads(Path(str(directory), "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _numbers(value: object) -> list[int]:
    return [value] if isinstance(value, int) and value > 0 else []
