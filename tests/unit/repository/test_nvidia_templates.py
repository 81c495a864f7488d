"""Templates of every release of NVIDIA's backend, made here of the names of their variables."""

import json
from typing import Any

import pytest

from cog_triton.repository.fill import fill_model
from tests.support import ROOT
from tests.unit.repository.support import parse

FACTS = json.loads((ROOT / "tests/contracts/nvidia_template_variables.json").read_text())
RELEASES: list[str] = FACTS["releases"]
# Of TensorRT-LLM 1.x, whose other variables the contract has; see test_contract.py.
NEWEST = {
    "preprocessing": {
        name: name
        for name in ("tokenizer_dir", "multimodal_model_path", "max_num_images", "hf_model_path")
    }
    | {"engine_dir": "gpt_model_path"}
}
# What NVIDIA's Python models read without a fallback, by model: they do not load without the parameter.
NEEDED = {
    "preprocessing": {"visual_model_path", "multimodal_model_path", "gpt_model_path"},
}
REQUIRED: dict[str, object] = {"tokenizer_dir": "/tokenizer", "engine_dir": "/engine"}


def variables_of(release: str, model: str) -> dict[str, str]:
    """The variables that a release's template has, with the names of their parameters."""
    if release == "v1":
        return NEWEST[model]
    found = {}
    number = RELEASES.index(release)
    for name, facts in FACTS["variables"].get(model, {}).items():
        spans = [[RELEASES.index(end) for end in span] for span in facts["releases"]]
        if any(first <= number <= last for first, last in spans):
            found[name] = facts["parameter"] or f"elsewhere_{name}"
    return found


def template_of(model: str, variables: dict[str, str]) -> str:
    lines = [f'name: "{model}"']
    for name, parameter in variables.items():
        value = f'string_value: "${{{name}}}"'
        lines.append(f'parameters {{ key: "{parameter}" value: {{ {value} }} }}')
    return "\n".join(lines)


def filled(model: str, variables: dict[str, str], **values: object) -> dict[str, str]:
    """The parameters of a filled template."""
    given = {name: value for name, value in REQUIRED.items() if name in variables}
    config: Any = parse(fill_model(model, template_of(model, variables), given | values))
    return {key: parameter.string_value for key, parameter in config.parameters.items()}


@pytest.mark.parametrize("model", sorted(FACTS["variables"]))
def test_a_template_of_each_release_is_filled(model: str) -> None:
    for release in RELEASES:
        variables = variables_of(release, model)
        parameters = filled(model, variables)
        assert "${" not in str(parameters), release
        needed = NEEDED.get(model, set()) & set(variables.values())
        assert needed <= parameters.keys(), release
        if "tokenizer_type" in variables:
            assert parameters["tokenizer_type"] == "auto", release


@pytest.mark.parametrize(
    ("model", "release", "old", "new", "value"),
    [
        ("preprocessing", "v0.12.0", "visual_model_path", "multimodal_model_path", "/vision"),
        ("preprocessing", "v0.18.2", "visual_model_path", "multimodal_model_path", "/vision"),
        ("tensorrt_llm", "v0.6.0", "max_kv_cache_length", "max_attention_window_size", "512"),
    ],
)
def test_a_renamed_variable_is_filled_by_either_name(
    model: str, release: str, old: str, new: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    variables = variables_of(release, model)
    assert old in variables
    for name in (old, new):
        assert filled(model, variables, **{name: value})[variables[old]] == value
    # And an old command fills a new template.
    assert filled(model, {new: new}, **{old: value})[new] == value
    assert "no effect" not in caplog.text


def test_what_the_newest_preprocessing_reads_without_a_fallback_is_kept_empty() -> None:
    variables = variables_of("v1", "preprocessing")
    parameters = filled("preprocessing", variables)
    assert parameters == {
        "tokenizer_dir": "/tokenizer",
        "multimodal_model_path": "",
        "hf_model_path": "",
        "gpt_model_path": "/engine",
    }
    variables.pop("engine_dir")
    named = {**variables, "engine_dir": "gpt_model_path"}
    config: Any = parse(
        fill_model("preprocessing", template_of("preprocessing", named), {"tokenizer_dir": "/t"})
    )
    assert config.parameters["gpt_model_path"].string_value == ""
    assert "gpt_model_path" in config.parameters
