"""The models that no template stands for, made of those that were filled.

``ensemble_ids`` is the ensemble without its last step, for clients that turn token ids into text
themselves. Over gRPC such a client could name the outputs that it wants, but Triton still walks through
every output of the ensemble for every response, and over HTTP nothing can be named. docs/performance.md
has what it saves.

``tensorrt_llm_context`` stands before TensorRT-LLM's C++ backend; see ``cog_triton.models.context``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    TYPE_BOOL,
    TYPE_FP32,
    TYPE_INT32,
    ModelInstanceGroup,
)

from cog_triton.protocol import CONTEXT_MODEL, DIMS, IDS_ENSEMBLE, LOG_PROBS, OUTPUTS

# TensorRT-LLM's C++ backend answers with an error to who leaves one of these out.
_NEEDED = {"output_ids", "sequence_length"}


def ids_ensemble(ensemble: Any) -> Any | None:
    """An ensemble that makes ``OUTPUTS`` and ``LOG_PROBS`` alone; None if no step of this one makes ids.

    Args:
        ensemble: its ModelConfig, which is left as it is.
    """
    steps = list(ensemble.ensemble_scheduling.step)
    makers = [step for step in steps if step.output_map.keys() >= _NEEDED]
    if not makers:
        return None
    names = [name for name in (*OUTPUTS, LOG_PROBS) if name in makers[0].output_map]
    kept = _up_to(steps, makers[0])
    needed = {tensor for step in kept for tensor in step.input_map.values()}
    result = type(ensemble)()
    result.CopyFrom(ensemble)
    result.name = IDS_ENSEMBLE
    result.ClearField("input")
    result.input.extend(tensor for tensor in ensemble.input if tensor.name in needed)
    result.ClearField("output")
    for name in names:
        data_type = TYPE_FP32 if name == LOG_PROBS else TYPE_INT32
        result.output.add(name=name, data_type=data_type, dims=DIMS.get(name, [-1, -1]))
    result.ensemble_scheduling.ClearField("step")
    for step in kept:
        copy = result.ensemble_scheduling.step.add()
        copy.CopyFrom(step)
        copy.output_map.clear()
        copy.output_map.update(
            {name: name for name in names}
            if step is makers[0]
            else {key: name for key, name in step.output_map.items() if name in needed}
        )
    return result


def _up_to(steps: list[Any], last: Any) -> list[Any]:
    """``last`` and the steps that it needs, in order."""
    needed = set(last.input_map.values())
    kept = [last]
    for step in reversed(steps[: steps.index(last)]):
        if not needed.isdisjoint(step.output_map.values()):
            needed |= set(step.input_map.values())
            kept.insert(0, step)
    return kept


CONTEXT_MODEL_CODE = """\
from cog_triton.models.context_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""

_CONTEXT = {"context_ids": ("_CONTEXT_IDS", "CONTEXT_IDS"), "is_final": ("_IS_FINAL", "IS_FINAL")}


def with_context(configs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The ensemble that goes by way of this model, and this model's configuration.

    Args:
        configs: the ModelConfig of each model; they are left as they are.

    Returns:
        None where it is not needed or cannot be had: not before a backend in Python, which says itself
        what went before, nor without decoupling, where a response holds a whole text, nor with other
        models than this project's.
    """
    ensemble, llm, post = map(configs.get, ("ensemble", "tensorrt_llm", "postprocessing"))
    if ensemble is None or llm is None or post is None:
        return None
    decoupled = llm.model_transaction_policy.decoupled
    if llm.backend != "tensorrtllm" or not decoupled or not _reads_context(post):
        return None
    return _by_way_of_context(ensemble), _relay(llm)


def _reads_context(postprocessing: Any) -> bool:
    names = {tensor.name for tensor in postprocessing.input}
    return all(name in names for _, name in _CONTEXT.values())


def _by_way_of_context(ensemble: Any) -> Any:
    result = type(ensemble)()
    result.CopyFrom(ensemble)
    for step in result.ensemble_scheduling.step:
        for output, (tensor, name) in _CONTEXT.items():
            if step.model_name == "tensorrt_llm":
                step.output_map[output] = tensor
            elif step.model_name == "postprocessing":
                step.input_map[name] = tensor
        if step.model_name == "tensorrt_llm":
            step.model_name = CONTEXT_MODEL
    return result


def _relay(llm: Any) -> Any:
    result = type(llm)()
    result.CopyFrom(llm)
    result.name, result.backend = CONTEXT_MODEL, "python"
    for part in ("parameters", "dynamic_batching", "instance_group"):
        result.ClearField(part)
    result.instance_group.add(count=1, kind=ModelInstanceGroup.KIND_CPU)
    result.output.add(name="context_ids", data_type=TYPE_INT32, dims=[-1])
    result.output.add(name="is_final", data_type=TYPE_BOOL, dims=[1])
    return result
