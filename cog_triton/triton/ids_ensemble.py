"""The ensemble without its last step, for clients that turn token ids into text themselves.

Over gRPC a client of the ensemble can name the outputs it wants, and Triton skips the steps that make
others; but it still walks through every output of the ensemble for every response, and over HTTP nothing
can be named. docs/performance.md has what it saves.
"""

from __future__ import annotations

from typing import Any

NAME = "ensemble_ids"
OUTPUTS = ("output_ids", "sequence_length", "num_input_tokens", "num_output_tokens")


def ids_ensemble(ensemble: Any) -> Any | None:
    """An ensemble that makes ``OUTPUTS`` alone; None if this one does not have the ids.

    Args:
        ensemble: its ModelConfig, which is left as it is.
    """
    outputs = [tensor for tensor in ensemble.output if tensor.name in OUTPUTS]
    if not any(tensor.name == "output_ids" for tensor in outputs):
        return None
    needed = {tensor.name for tensor in outputs}
    steps: list[Any] = []
    for step in reversed(ensemble.ensemble_scheduling.step):
        if needed.isdisjoint(step.output_map.values()):
            continue
        needed |= set(step.input_map.values())
        steps.insert(0, step)
    made = type(ensemble)()
    made.CopyFrom(ensemble)
    made.name = NAME
    made.ClearField("input")
    made.input.extend(tensor for tensor in ensemble.input if tensor.name in needed)
    made.ClearField("output")
    made.output.extend(outputs)
    made.ensemble_scheduling.ClearField("step")
    for step in steps:
        kept = made.ensemble_scheduling.step.add()
        kept.CopyFrom(step)
        for tensor, name in step.output_map.items():
            if name not in needed:
                del kept.output_map[tensor]
    return made
