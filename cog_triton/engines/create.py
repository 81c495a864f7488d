"""Create the engine that a model configuration names, importing none of the others.

PyTorch, TensorRT-LLM and vLLM take seconds to import, and need not all be installed.
"""

from __future__ import annotations

from collections.abc import Mapping

from cog_triton.engines.base import Engine


def create_engine(parameters: Mapping[str, str]) -> Engine:
    """The engine that a model configuration's parameters describe.

    Raises:
        ValueError: the engine is unknown, or a parameter is not valid.
    """
    name = parameters.get("engine", "transformers")
    if name == "simulated":
        from cog_triton.engines.simulated import SimulatedEngine

        return SimulatedEngine.from_parameters(parameters)
    if name == "transformers":
        from cog_triton.engines.transformers import TransformersEngine

        return TransformersEngine.from_parameters(parameters)
    if name == "llmapi":
        from cog_triton.engines.llm_api import TensorrtLlmEngine

        return TensorrtLlmEngine.from_parameters(parameters)
    if name == "vllm":
        from cog_triton.engines.vllm import VllmEngine

        return VllmEngine.from_parameters(parameters)
    raise ValueError(f"unknown engine {name!r}; known are llmapi, simulated, transformers, vllm")
