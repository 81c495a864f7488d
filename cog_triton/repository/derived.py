"""Models that no template stands for, made of the filled ones.

``ensemble_ids`` is the ensemble without its last step, for clients that turn token ids into text: Triton
walks through every output of an ensemble for every response, whichever a client names (docs/notes.md).
``tensorrt_llm_context`` stands before TensorRT-LLM's C++ backend; see ``cog_triton.models.context``.
"""

from copy import deepcopy
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from cog_triton.wire import CONTEXT_MODEL, DIMS, IDS_ENSEMBLE, LOG_PROBS, OUTPUTS

# TensorRT-LLM's C++ backend answers with an error if one of these is left out.
_NEEDED = {"output_ids", "sequence_length"}
# As tensorrt_llm, the ensemble and postprocessing call the tensors.
_CONTEXT = [("context_ids", "_CONTEXT_IDS", "CONTEXT_IDS"), ("is_final", "_IS_FINAL", "IS_FINAL")]

CONTEXT_MODEL_CODE = "from cog_triton.models.context import TritonPythonModel\n"


def add_derived(configs: dict[str, Any], *, context: bool) -> None:
    """Add ``ensemble_ids`` and, for ``context``, ``tensorrt_llm_context``, where the models allow them."""
    if (ensemble := configs.get("ensemble")) is None:
        return
    if (ids := ids_ensemble(ensemble)) is not None:
        configs[IDS_ENSEMBLE] = ids
    if not context or not _reads_context(configs):
        return
    configs[CONTEXT_MODEL] = _relay(configs["tensorrt_llm"])
    for step in ensemble.ensemble_scheduling.step:
        if step.model_name == "tensorrt_llm":
            step.model_name = CONTEXT_MODEL
            step.output_map.update({key: tensor for key, tensor, _ in _CONTEXT})
        elif step.model_name == "postprocessing":
            step.input_map.update({name: tensor for _, tensor, name in _CONTEXT})


def ids_ensemble(ensemble: Any) -> Any | None:
    """Return an ensemble that makes only ``OUTPUTS`` and ``LOG_PROBS``; None if no step makes ids."""
    result = deepcopy(ensemble)
    steps = result.ensemble_scheduling.step
    maker = next((n for n, step in enumerate(steps) if step.output_map.keys() >= _NEEDED), None)
    if maker is None:
        return None
    del steps[maker + 1 :]
    if "context_ids" in steps[maker].output_map:  # an embedded engine reads none of these
        for unread in ("decoder_input_ids", "decoder_input_lengths", "pad_id"):
            steps[maker].input_map.pop(unread, None)
    needed = {tensor for step in steps for tensor in step.input_map.values()}
    ids = {n: n for n in (*OUTPUTS, LOG_PROBS) if n in steps[maker].output_map}
    for step in steps:
        made = {key: tensor for key, tensor in step.output_map.items() if tensor in needed}
        step.output_map.clear()
        step.output_map.update(ids if step == steps[maker] else made)
    result.name = IDS_ENSEMBLE
    result.ClearField("input")
    result.input.extend(tensor for tensor in ensemble.input if tensor.name in needed)
    result.ClearField("output")
    for name in ids:
        data_type = "TYPE_FP32" if name == LOG_PROBS else "TYPE_INT32"
        result.output.add(name=name, data_type=data_type, dims=DIMS.get(name, [-1, -1]))
    return result


def _reads_context(configs: dict[str, Any]) -> bool:
    # A backend in Python returns the context itself; without decoupling a response holds a whole text.
    llm, post = configs.get("tensorrt_llm"), configs.get("postprocessing")
    if llm is None or post is None or llm.backend != "tensorrtllm":
        return False
    inputs = {tensor.name for tensor in post.input}
    return llm.model_transaction_policy.decoupled and all(name in inputs for *_, name in _CONTEXT)


def _relay(llm: Any) -> Any:
    result = deepcopy(llm)
    result.name, result.backend = CONTEXT_MODEL, "python"
    for part in ("parameters", "dynamic_batching", "instance_group"):
        result.ClearField(part)
    result.instance_group.add(count=1, kind=ModelInstanceGroup.KIND_CPU)
    result.output.add(name="context_ids", data_type="TYPE_INT32", dims=[-1])
    result.output.add(name="is_final", data_type="TYPE_BOOL", dims=[1])
    return result
