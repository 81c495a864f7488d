"""The ensemble without its last step, for clients that turn token ids into text themselves.

Over gRPC a client of the ensemble could name the outputs that it wants, but Triton still walks through
every output of the ensemble for every response, and over HTTP nothing can be named. docs/performance.md
has what it saves.
"""

from __future__ import annotations

from typing import Any

from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    TYPE_INT32,
)

NAME = "ensemble_ids"
DIMS = {
    "output_ids": [-1, -1],
    "sequence_length": [-1],
    "num_input_tokens": [1],
    "num_output_tokens": [1],
}
OUTPUTS = tuple(DIMS)
"""Outputs of tensorrt_llm, INT32, which the made ensemble has under the same names."""

# TensorRT-LLM's C++ backend answers with an error to who leaves one of these out.
_NEEDED = {"output_ids", "sequence_length"}


def ids_ensemble(ensemble: Any) -> Any | None:
    """An ensemble that makes ``OUTPUTS`` alone; None if none of this one's steps makes ids.

    Args:
        ensemble: its ModelConfig, which is left as it is.
    """
    steps = list(ensemble.ensemble_scheduling.step)
    makers = [step for step in steps if step.output_map.keys() >= _NEEDED]
    if not makers:
        return None
    names = [name for name in OUTPUTS if name in makers[0].output_map]
    kept = _up_to(steps, makers[0])
    needed = {tensor for step in kept for tensor in step.input_map.values()}
    result = type(ensemble)()
    result.CopyFrom(ensemble)
    result.name = NAME
    result.ClearField("input")
    result.input.extend(tensor for tensor in ensemble.input if tensor.name in needed)
    result.ClearField("output")
    for name in names:
        result.output.add(name=name, data_type=TYPE_INT32, dims=DIMS[name])
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
