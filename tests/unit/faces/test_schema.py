"""The schema that Cog's server validates inputs with, against what predict.py says."""

from __future__ import annotations

import json
import re
from typing import Any

import make_schema
import pytest
from _checkout import ROOT

from cog_triton.request.request import MAX_SEED


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("schema") / ".cog" / "openapi_schema.json"
    make_schema.main(["--output", str(output)])
    return json.loads(output.read_text())


def test_streaming_is_declared(schema: Any) -> None:
    assert schema["paths"]["/predictions"]["post"]["x-cog-streaming"] is True
    output = schema["components"]["schemas"]["Output"]
    assert output["x-cog-array-display"] == "concatenate"
    assert output["items"] == {"type": "string"}


def test_whatever_is_referred_to_is_there(schema: Any) -> None:
    names = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schema))
    schemas = schema["components"]["schemas"]
    assert set(names) >= {"Input", "Output", "PredictionRequest", "PredictionResponse"}
    assert set(names) <= schemas.keys()
    assert all(schemas[name]["title"] == name for name in schemas if name != "Output")


def test_inputs_defaults_and_limits_are_cog_tritons(schema: Any) -> None:
    inputs = schema["components"]["schemas"]["Input"]
    assert inputs["required"] == []
    properties = inputs["properties"]
    found = {
        name: (p["type"], p.get("default"), p.get("minimum"), p.get("maximum"))
        for name, p in properties.items()
    }
    assert found == {
        "prompt": ("string", None, None, None),
        "system_prompt": ("string", "", None, None),
        "max_tokens": ("integer", 512, 1, None),
        "min_tokens": ("integer", None, -1, None),
        "temperature": ("number", 0.7, 0, 5),
        "top_p": ("number", 0.95, 0, 1),
        "top_k": ("integer", 0, -1, None),
        "stop_sequences": ("string", None, None, None),
        "length_penalty": ("number", 1.0, 0, 5),
        "presence_penalty": ("number", 0.0, None, None),
        "seed": ("integer", None, -1, MAX_SEED),
        "prompt_template": ("string", "{prompt}", None, None),
        "log_performance_metrics": ("boolean", False, None, None),
        "max_new_tokens": ("integer", None, 1, None),
        "min_new_tokens": ("integer", None, -1, None),
        "messages": ("string", None, None, None),
        "tools": ("string", None, None, None),
        "chat_template_kwargs": ("string", None, None, None),
        "repetition_penalty": ("number", 1.0, None, None),
        "frequency_penalty": ("number", 0.0, None, None),
        "min_p": ("number", 0.0, 0, 1),
        "bad_words": ("string", None, None, None),
        "logit_bias": ("string", None, None, None),
        "ignore_eos": ("boolean", False, None, None),
        "json_schema": ("string", None, None, None),
        "regex": ("string", None, None, None),
        "grammar": ("string", None, None, None),
        "choice": ("string", None, None, None),
        "lora": ("string", "", None, None),
    }
    orders = [p["x-order"] for p in properties.values()]
    assert orders == sorted(orders)
    assert all(p["description"] for p in properties.values())


def test_the_training_has_inputs_of_its_own(schema: Any) -> None:
    inputs = schema["components"]["schemas"]["TrainingInput"]
    assert inputs["required"] == ["config"]
    assert sorted(inputs["properties"]) == ["config", "hf_token"]
    assert schema["components"]["schemas"]["TrainingOutput"]["properties"].keys() == {"weights"}


def test_the_concurrency_that_is_served_is_the_decorators() -> None:
    import serve

    from predict import Predictor

    assert int(serve.MAX_CONCURRENCY) == Predictor.predict.__cog_concurrent_max__


def test_predict_py_is_what_cog_build_can_read() -> None:
    """It reads decorators and Input() arguments without running them."""
    import ast

    tree = ast.parse((ROOT / "predict.py").read_text())
    (predict,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "predict"
    ]
    assert [ast.unparse(d) for d in predict.decorator_list] == [
        "cog.streaming",
        "cog.concurrent(max=512)",
    ]
    for default in predict.args.defaults:
        assert isinstance(default, ast.Call)
        for keyword in default.keywords:
            ast.literal_eval(keyword.value)
