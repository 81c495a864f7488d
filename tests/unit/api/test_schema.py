"""The schema that Cog's server validates inputs with, against what predict.py says."""

import ast
import json
from typing import Any

import pytest

from cog_triton import ROOT, cli
from cog_triton.cli import serve
from cog_triton.request.request import MAX_SEED
from predict import Predictor


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("schema") / ".cog" / "openapi_schema.json"
    assert cli.main(["make-schema", "--output", str(output)]) == 0
    return json.loads(output.read_text())


def test_what_serve_gives_to_cogs_server_is_this(schema: Any) -> None:
    shipped = ROOT / "cog_triton" / "cli" / "openapi_schema.json"
    assert json.loads(shipped.read_text()) == schema, "run make docs"


def test_no_input_is_required_and_each_has_a_description(schema: Any) -> None:
    inputs = schema["components"]["schemas"]["Input"]
    assert inputs["required"] == []
    properties = inputs["properties"].values()
    assert all(p["description"] for p in properties)
    orders = [p["x-order"] for p in properties]
    assert orders == sorted(orders)
    assert inputs["properties"]["seed"]["maximum"] == MAX_SEED


def test_predict_py_is_what_cog_build_can_read() -> None:
    """It reads decorators and Input() arguments without running them."""
    concurrency = Predictor.predict.__cog_concurrent_max__
    assert serve.environment({})["COG_MAX_CONCURRENCY"] == str(concurrency)
    (predict,) = [
        node
        for node in ast.walk(ast.parse((ROOT / "predict.py").read_text()))
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "predict"
    ]
    decorators = [ast.unparse(decorator) for decorator in predict.decorator_list]
    assert decorators == ["cog.streaming", f"cog.concurrent(max={concurrency})"]
    for default in predict.args.defaults:
        assert isinstance(default, ast.Call)
        for keyword in default.keywords:
            ast.literal_eval(keyword.value)
