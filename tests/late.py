"""Modules that take seconds to import. A test's first use of one imports it.

Each process of a test run collects every test file, and runs few of the tests that need these.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = [
    "accuracy_compare",
    "adapter_layers",
    "anthropic",
    "demo_lessons",
    "openai",
    "peft_files",
    "replicate",
    "safetensors_torch",
    "torch",
    "transformers",
    "transformers_engine",
    "transformers_loading",
    "transformers_numbers",
    "transformers_progress",
    "transformers_sequential",
    "transformers_step",
]

if TYPE_CHECKING:
    import anthropic
    import openai
    import torch
    import transformers
    from safetensors import torch as safetensors_torch

    from cog_triton.adapters import layers as adapter_layers
    from cog_triton.adapters import peft_files
    from cog_triton.engines import transformers as transformers_engine
    from cog_triton.engines import (
        transformers_loading,
        transformers_numbers,
        transformers_progress,
        transformers_sequential,
        transformers_step,
    )
    from tools.accuracy import compare as accuracy_compare
    from tools.demo_model import lessons as demo_lessons

    replicate: Any  # it does not export what its users import
else:

    class LateModule:
        """Has the attributes of a module, which it imports for the first of them."""

        def __init__(self, name: str) -> None:
            vars(self)["_name"] = name

        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("__"):  # pytest asks whether it is a class, a test, a wrapper
                raise AttributeError(attribute)
            return getattr(importlib.import_module(self._name), attribute)

        def __setattr__(self, attribute: str, value: object) -> None:
            """Let a test's monkeypatch reach the module."""
            setattr(importlib.import_module(self._name), attribute, value)

        def __delattr__(self, attribute: str) -> None:
            delattr(importlib.import_module(self._name), attribute)

    accuracy_compare = LateModule("tools.accuracy.compare")
    adapter_layers = LateModule("cog_triton.adapters.layers")
    anthropic = LateModule("anthropic")
    demo_lessons = LateModule("tools.demo_model.lessons")
    openai = LateModule("openai")
    peft_files = LateModule("cog_triton.adapters.peft_files")
    replicate = LateModule("replicate")
    safetensors_torch = LateModule("safetensors.torch")
    torch = LateModule("torch")
    transformers = LateModule("transformers")
    transformers_engine = LateModule("cog_triton.engines.transformers")
    transformers_loading = LateModule("cog_triton.engines.transformers_loading")
    transformers_numbers = LateModule("cog_triton.engines.transformers_numbers")
    transformers_progress = LateModule("cog_triton.engines.transformers_progress")
    transformers_sequential = LateModule("cog_triton.engines.transformers_sequential")
    transformers_step = LateModule("cog_triton.engines.transformers_step")
