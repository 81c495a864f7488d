from __future__ import annotations

import sys
from typing import Any

from ..llm_args import LoraConfig, args_of, update_llm_args_with_extra_dict

__all__ = ["LoraConfig", "update_llm_args_with_extra_dict"]


def __getattr__(name: str) -> Any:
    if name == "TorchLlmArgs":
        return args_of(sys.modules["tensorrt_llm"].__version__)
    raise AttributeError(name)
