"""Models without a template, which are derived from filled ones.

``ensemble_ids`` is the ensemble without its last step, for clients that turn token ids into text: for every
response, Triton walks through all outputs of an ensemble, whichever a client names.
``tensorrt_llm_context`` stands in front of TensorRT-LLM's C++ backend; see ``cog_triton.models.context``.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from cog_triton.protocol.names import (
    CONTEXT_MODEL,
    DIMS,
    ENGINE,
    FRAMES,
    IDS_ENSEMBLE,
    LOG_PROBS,
    OUTPUTS,
)
from cog_triton.protocol.triton_messages import ModelInstanceGroup

# TensorRT-LLM's C++ backend answers with an error if one of these is left out.
_NEEDED_OUTPUTS = frozenset(("output_ids", "sequence_length"))
# Inputs of tensorrt_llm that no embedded engine reads.
_UNREAD_INPUTS = ("decoder_input_ids", "decoder_input_lengths", "pad_id")
# Parameters of preprocessing by which the context model knows the end tokens among the stop words.
_END_PARAMETERS = ("end_ids", "tokenizer_dir")


@dataclass(frozen=True)
class _ContextTensor:
    """A tensor from the context model to postprocessing, by its name in each."""

    output: str
    in_ensemble: str
    input: str


_CONTEXT_TENSORS = (
    _ContextTensor(output="context_ids", in_ensemble="_CONTEXT_IDS", input="CONTEXT_IDS"),
    _ContextTensor(output="is_final", in_ensemble="_IS_FINAL", input="IS_FINAL"),
)


def add_derived(configs: dict[str, Any], *, context: bool) -> None:
    """Add the derived models to the configurations, by name, that their models allow.

    Args:
        context: add ``tensorrt_llm_context`` as well, and have the ensemble call it.
    """
    ensemble = configs.get("ensemble")
    if ensemble is None:
        return
    ids = ids_ensemble(ensemble, configs)
    if ids is not None:
        configs[IDS_ENSEMBLE] = ids
    if context and _reads_context(configs):
        configs[CONTEXT_MODEL] = _context_model(configs[ENGINE], configs.get("preprocessing"))
        _call_context_model(ensemble)


def ids_ensemble(ensemble: Any, configs: Mapping[str, Any]) -> Any | None:
    """Return an ensemble that makes ``OUTPUTS``, ``LOG_PROBS`` and ``FRAMES``; None if no step makes ids.

    ``FRAMES`` is among them if the model that makes the ids has it.
    """
    result = deepcopy(ensemble)
    steps = result.ensemble_scheduling.step
    maker = _place_of_engine(steps)
    if maker is None:
        return None
    del steps[maker + 1 :]
    engine_step = steps[maker]
    is_embedded = "context_ids" in engine_step.output_map
    if is_embedded:
        for name in _UNREAD_INPUTS:
            engine_step.input_map.pop(name, None)
    names = [name for name in (*OUTPUTS, LOG_PROBS) if name in engine_step.output_map]
    engine = configs.get(engine_step.model_name)
    if engine is not None and any(output.name == FRAMES for output in engine.output):
        names.append(FRAMES)
    # The other outputs and inputs were for the steps that are gone.
    needed = {tensor for step in steps for tensor in step.input_map.values()}
    for step in steps[:maker]:
        made = {key: tensor for key, tensor in step.output_map.items() if tensor in needed}
        step.output_map.clear()
        step.output_map.update(made)
    engine_step.output_map.clear()
    engine_step.output_map.update({name: name for name in names})
    result.name = IDS_ENSEMBLE
    result.ClearField("input")
    result.input.extend(tensor for tensor in ensemble.input if tensor.name in needed)
    result.ClearField("output")
    for name in names:
        data_type = "TYPE_FP32" if name == LOG_PROBS else "TYPE_INT32"
        result.output.add(name=name, data_type=data_type, dims=DIMS[name])
    return result


def _place_of_engine(steps: Any) -> int | None:
    """Return the place of the first step that makes token ids; None if there is none."""
    for place, step in enumerate(steps):
        if step.output_map.keys() >= _NEEDED_OUTPUTS:
            return place
    return None


def _reads_context(configs: Mapping[str, Any]) -> bool:
    """Return whether the context model has a use.

    A backend in Python returns the context itself, and without decoupling, a response holds a whole text.
    """
    engine = configs.get(ENGINE)
    postprocessing = configs.get("postprocessing")
    if engine is None or postprocessing is None or engine.backend != "tensorrtllm":
        return False
    if not engine.model_transaction_policy.decoupled:
        return False
    inputs = {tensor.name for tensor in postprocessing.input}
    return all(tensor.input in inputs for tensor in _CONTEXT_TENSORS)


def _context_model(engine: Any, preprocessing: Any | None) -> Any:
    """Return the configuration of the model in front of an engine."""
    result = deepcopy(engine)
    result.name = CONTEXT_MODEL
    result.backend = "python"
    for field in ("parameters", "dynamic_batching", "instance_group"):
        result.ClearField(field)
    result.instance_group.add(count=1, kind=ModelInstanceGroup.KIND_CPU)
    result.output.add(name="context_ids", data_type="TYPE_INT32", dims=[-1])
    result.output.add(name="is_final", data_type="TYPE_BOOL", dims=[1])
    if preprocessing is not None:
        for name in _END_PARAMETERS:
            if name in preprocessing.parameters:
                result.parameters[name].CopyFrom(preprocessing.parameters[name])
    return result


def _call_context_model(ensemble: Any) -> None:
    """Have an ensemble call the context model, and pass its tensors to postprocessing."""
    for step in ensemble.ensemble_scheduling.step:
        if step.model_name == ENGINE:
            step.model_name = CONTEXT_MODEL
            for tensor in _CONTEXT_TENSORS:
                step.output_map[tensor.output] = tensor.in_ensemble
        elif step.model_name == "postprocessing":
            for tensor in _CONTEXT_TENSORS:
                step.input_map[tensor.input] = tensor.in_ensemble
