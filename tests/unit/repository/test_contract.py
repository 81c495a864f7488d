"""Our filled configurations against the facts about those of NVIDIA's TensorRT-LLM backend."""

import re
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    DataType,
    ModelInstanceGroup,
)

from cog_triton.repository.fill import fill_repository
from cog_triton.repository.variables import TABLES, VARIABLES, known
from tests.unit.models.support import CONTRACT
from tests.unit.repository.support import TEMPLATES, config, names

MODELS = ["ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"]

# Only text is served.
MULTIMODAL = re.compile("IMAGE|VIDEO|PIXEL|VISION|ASPECT|ATTENTION_MASK|image_|video_")
MULTIMODAL_PARAMETERS = {"gpt_model_path", "max_num_images", "multimodal_model_path"}


def added_tensor(
    name: str, dtype: str, *dims: int, reshape: list[int] | None = None
) -> dict[str, Any]:
    """A tensor as the contract has them; ``reshape`` is its shape to the model, if that is another."""
    facts = {"name": name, "dtype": dtype, "dims": list(dims)}
    return facts if reshape is None else {**facts, "reshape": reshape}


# What our models have beside NVIDIA's. The inputs are optional.
ADDED_INPUTS = {
    "ensemble": [
        added_tensor("random_seed", "UINT64", 1),
        added_tensor("min_length", "INT32", 1),
    ],
    "preprocessing": [
        added_tensor("SEED", "UINT64", 1),
        added_tensor("RANDOM_SEED", "UINT64", 1),
        added_tensor("MIN_TOKENS", "INT32", 1),
        added_tensor("MIN_LENGTH", "INT32", 1),
    ],
    "tensorrt_llm": [
        added_tensor("random_seed", "UINT64", 1, reshape=[]),
        added_tensor("min_length", "INT32", 1, reshape=[]),
        added_tensor("stop_words_text", "STRING", -1),
    ],
    "postprocessing": [
        added_tensor("CONTEXT_IDS", "INT32", -1),
        added_tensor("IS_FINAL", "BOOL", 1),
        added_tensor("CUT_CHARACTERS", "INT32", 1),
        # Through NVIDIA's postprocessing up to v0.13; the contract is of a later release.
        added_tensor("CUM_LOG_PROBS", "FP32", -1),
        added_tensor("OUTPUT_LOG_PROBS", "FP32", -1, -1),
        added_tensor("CONTEXT_LOGITS", "FP32", -1, -1),
        added_tensor("GENERATION_LOGITS", "FP32", -1, -1, -1),
    ],
    "tensorrt_llm_bls": [
        added_tensor("random_seed", "UINT64", 1),
        added_tensor("min_length", "INT32", 1),
    ],
}
ADDED_OUTPUTS = {
    "ensemble": [
        added_tensor("output_ids", "INT32", -1, -1),
        added_tensor("sequence_length", "INT32", -1),
    ],
    "preprocessing": [
        added_tensor("OUT_SEED", "UINT64", 1),
        added_tensor("OUT_MIN_TOKENS", "INT32", 1),
        added_tensor("STOP_WORDS_TEXT", "STRING", -1),
        added_tensor("OUT_OTHER_END_IDS", "INT32", -1),
    ],
    "tensorrt_llm": [
        added_tensor("context_ids", "INT32", -1),
        added_tensor("is_final", "BOOL", 1),
        added_tensor("cut_characters", "INT32", 1),
        added_tensor("frames", "INT32", -1),
    ],
    "postprocessing": [
        added_tensor("OUT_TOKENS_BATCH", "INT32", -1, -1),
        added_tensor("OUT_SEQUENCE_LENGTH", "INT32", -1),
        added_tensor("OUT_CUM_LOG_PROBS", "FP32", -1),
        added_tensor("OUT_OUTPUT_LOG_PROBS", "FP32", -1, -1),
        added_tensor("OUT_CONTEXT_LOGITS", "FP32", -1, -1),
        added_tensor("OUT_GENERATION_LOGITS", "FP32", -1, -1, -1),
    ],
}
# NVIDIA's template says BOOL up to TensorRT-LLM 1.2; the C++ backend reads an int32.
READ_AS = {"early_stopping": "INT32"}
DECODING_CONTEXT = {"context_ids", "is_final", "CONTEXT_IDS", "IS_FINAL"}
FRAMES = {"frames"}
STOP_WORDS = {"stop_words_text", "cut_characters", "STOP_WORDS_TEXT", "CUT_CHARACTERS"}
EXAMPLES: dict[str, object] = {
    "integer": 1,
    "float": 0.5,
    "boolean": True,
    "text": "x",
    "path": "/x",
    "integer list": [0, 1],
}


@pytest.fixture(scope="module", params=["python", "tensorrtllm"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def configs(backend: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The parsed configurations, with a value for every variable but those for data types."""
    filled = tmp_path_factory.mktemp("filled")
    values = {model: example_values(model) for model in MODELS}
    values["tensorrt_llm"]["triton_backend"] = backend
    fill_repository(TEMPLATES, filled, values)
    return {path.name: config(filled, path.name) for path in filled.iterdir()}


def example_values(model: str) -> dict[str, object]:
    return {
        name: v.choices[0] if v.choices else EXAMPLES[v.kind]
        for name, v in known(model).items()
        if v.kind not in ("data type", "switch") and name != "triton_max_batch_size"
    }


def facts(tensor: Any) -> dict[str, Any]:
    """A tensor of a parsed configuration, in the contract's words."""
    found = {
        "name": tensor.name,
        "dtype": DataType.Name(tensor.data_type).removeprefix("TYPE_"),
        "dims": list(tensor.dims),
    }
    if tensor.HasField("reshape"):
        found["reshape"] = list(tensor.reshape.shape)
    if getattr(tensor, "optional", False):
        found["optional"] = True
    if getattr(tensor, "allow_ragged_batch", False):
        found["ragged"] = True
    return found


def wanted(model: str, kind: str, backend: str) -> list[dict[str, Any]]:
    """The tensors that the contract and our additions to it ask for."""
    tensors = [
        {**tensor, "dtype": READ_AS.get(tensor["name"], tensor["dtype"])}
        for tensor in CONTRACT[model][f"{kind}s"]
        if not MULTIMODAL.search(tensor["name"])
    ]
    if kind == "input":
        tensors += [{**added, "optional": True} for added in ADDED_INPUTS.get(model, [])]
    else:
        tensors += ADDED_OUTPUTS.get(model, [])
    if (model, backend) == ("tensorrt_llm", "tensorrtllm"):
        tensors = [
            tensor
            for tensor in tensors
            if tensor["name"] not in DECODING_CONTEXT | STOP_WORDS | FRAMES
        ]
    return tensors


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize("model", MODELS)
def test_tensors(model: str, kind: str, backend: str, configs: dict[str, Any]) -> None:
    found = {tensor.name: facts(tensor) for tensor in getattr(configs[model], kind)}
    assert len(found) == len(getattr(configs[model], kind))
    assert found == {tensor["name"]: tensor for tensor in wanted(model, kind, backend)}


@pytest.mark.parametrize("model", MODELS)
def test_template_variables_and_parameters(model: str, configs: dict[str, Any]) -> None:
    assert CONTRACT[model]["template_variables"].keys() <= known(model).keys()
    wanted = set(CONTRACT[model]["parameters"])
    if model == "preprocessing":
        wanted -= MULTIMODAL_PARAMETERS
    assert wanted - configs[model].parameters.keys() == set()


def test_parameters_come_from_their_variables(configs: dict[str, Any]) -> None:
    keys = {
        "engine_dir": "gpt_model_path",
        "encoder_engine_dir": "encoder_model_path",
        "batching_strategy": "gpt_model_type",
    }
    llm = configs["tensorrt_llm"]
    bare = CONTRACT["tensorrt_llm"]["template_variables"]
    others = ("triton_backend", "tensorrt_llm_instance_count", *TABLES.ignored["tensorrt_llm"])
    for name, value in example_values("tensorrt_llm").items():
        if bare.get(name) == "bare" or name in others:
            continue
        text = VARIABLES["tensorrt_llm"][name].render(value)
        assert llm.parameters[keys.get(name, name)].string_value == text, name
    assert llm.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value == "no"


@pytest.mark.parametrize("model", MODELS)
def test_the_rest(model: str, backend: str, configs: dict[str, Any]) -> None:
    config = configs[model]
    assert config.name == model
    assert config.max_batch_size == 64
    assert config.backend == {"ensemble": "", "tensorrt_llm": backend}.get(model, "python")
    assert config.platform == ("ensemble" if model == "ensemble" else "")
    # Without it on postprocessing, tritonserver crashes after some 100,000 streamed tokens.
    assert config.HasField("dynamic_batching") is CONTRACT[model]["dynamic_batching"]
    if model != "ensemble":
        (group,) = config.instance_group
        assert (group.count, group.kind) == (1, ModelInstanceGroup.KIND_CPU)


def test_steps(backend: str, configs: dict[str, Any]) -> None:
    """Ours are the contract's, but for names that preprocessing merges and what is before the backend."""
    between = {"tensorrt_llm": "tensorrt_llm_context"} if backend == "tensorrtllm" else {}
    merged = {"seed": "_SEED", "min_tokens": "_MIN_TOKENS"}
    steps = configs["ensemble"].ensemble_scheduling.step
    assert len(steps) == len(CONTRACT["ensemble"]["steps"])
    for ours, theirs in zip(steps, CONTRACT["ensemble"]["steps"], strict=True):
        model = between.get(theirs["model"], theirs["model"])
        assert (ours.model_name, ours.model_version) == (model, -1)
        inputs = {**theirs["input_map"], **(merged if theirs["model"] == "tensorrt_llm" else {})}
        for mapped, wanted in ((ours.input_map, inputs), (ours.output_map, theirs["output_map"])):
            assert wanted.items() <= dict(mapped).items()
    context = {key for step in steps for key in (*step.input_map, *step.output_map)}
    assert context >= DECODING_CONTEXT
    assert context & STOP_WORDS == (STOP_WORDS if backend == "python" else set())


def test_what_postprocessing_reads_is_no_output(configs: dict[str, Any]) -> None:
    """Triton would count it twice when it leaves postprocessing out, and leave tensorrt_llm out too."""
    ensemble = configs["ensemble"]
    read = ensemble.ensemble_scheduling.step[-1].input_map.values()
    assert not {*names(ensemble.output)} & {*read}
    assert configs["postprocessing"].dynamic_batching.preserve_ordering
