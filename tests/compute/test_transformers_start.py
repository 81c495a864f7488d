"""A start on a CPU does without PyTorch's compiler, and leaves it usable."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from cog_triton.engines import transformers_start
from cog_triton.engines.base import Engine
from cog_triton.engines.transformers_start import (
    COMPILER,
    SHAPES,
    _ShapesBeforeCompiler,
    may_do_without_compiler,
)
from cog_triton.text.transformers_import import LISTING_MODULE, list_models_once
from tests.late import transformers
from tests.support import ROOT

UNUSED = """
import sys
from cog_triton.engines.base import create_engine

engine = create_engine({"model": sys.argv[1], "device": "cpu", "tokenizer_dir": sys.argv[1]})
unused = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"}
unused.add("torch._meta_registrations")
assert not unused & set(sys.modules), unused & set(sys.modules)
engine.close()

import torch

assert torch.distributed.is_available()

from transformers.utils import import_utils

assert import_utils.define_import_structure.lists_once
"""
COMPILED = """
import transformers.models

doubled = torch.compile(lambda x: 2 * x, backend="eager")
assert doubled(torch.tensor(2)).item() == 4
assert "torch._dynamo.symbolic_convert" in sys.modules
assert "torch._meta_registrations" in sys.modules
"""
LACKS_A_SHAPE = """
from cog_triton.engines import transformers_start
from cog_triton.engines.base import Engine

attempts = []

def create(parameters):
    attempts.append("torch._meta_registrations" in sys.modules)
    # PyTorch computes the shape of this result in Python alone.
    return torch.kthvalue(torch.empty(3, device="meta"), 1)

transformers_start._create = create
transformers_start.create_transformers_engine({"model": sys.argv[1], "device": "cpu"})
assert attempts == [False, True], attempts
"""


def run(program: str, model: Path) -> None:
    """Run a program in a process of its own, which has imported nothing yet."""
    command = [sys.executable, "-c", f"{program}\nprint('done')", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "done\n", done.stderr


def test_a_start_imports_what_it_needs(demo_model: Path) -> None:
    run(UNUSED, demo_model)


@pytest.mark.rare
@pytest.mark.parametrize("more", [COMPILED, LACKS_A_SHAPE], ids=["compiler", "shape"])
def test_what_a_start_left_out_can_be_imported_later(more: str, demo_model: Path) -> None:
    run(UNUSED + more, demo_model)


@pytest.fixture
def without_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch as a start imports it, and what completes it."""
    monkeypatch.delitem(sys.modules, SHAPES, raising=False)

    def complete() -> None:
        monkeypatch.setitem(sys.modules, SHAPES, ModuleType(SHAPES))

    monkeypatch.setattr(transformers_start, "complete_torch", complete)


@pytest.mark.usefixtures("without_shapes")
@pytest.mark.parametrize("failures", [1, 2])
def test_a_model_that_lacks_a_shape_is_loaded_once_again_with_all_of_pytorch(
    failures: int, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had_shapes: list[bool] = []
    engine = Mock()

    def create(_parameters: object) -> Engine:
        had_shapes.append(SHAPES in sys.modules)
        if len(had_shapes) <= failures:
            raise NotImplementedError(f"no kernel in attempt {len(had_shapes)}")
        return engine

    monkeypatch.setattr(transformers_start, "_create", create)
    parameters = {"model": str(demo_model), "device": "cpu"}
    if failures == 1:
        assert transformers_start.create_transformers_engine(parameters) is engine
    else:
        with pytest.raises(NotImplementedError, match="in attempt 2"):
            transformers_start.create_transformers_engine(parameters)
    assert had_shapes == [False, True]


def test_a_model_that_fails_with_all_of_pytorch_is_not_loaded_again(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, SHAPES, ModuleType(SHAPES))
    create = Mock(side_effect=RuntimeError("out of memory"))
    monkeypatch.setattr(transformers_start, "_create", create)
    with pytest.raises(RuntimeError, match="out of memory"):
        transformers_start.create_transformers_engine({"model": str(demo_model), "device": "cpu"})
    assert create.call_count == 1


def test_what_computes_shapes_is_imported_before_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finder = _ShapesBeforeCompiler()
    imported: list[str] = []
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", imported.append)
        finder.find_spec("torch")
        assert (finder in sys.meta_path, imported) == (True, [])
        finder.find_spec(COMPILER)
    assert (finder in sys.meta_path, imported) == (False, [SHAPES])


def test_the_names_of_models_are_those_that_transformers_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a fresh copy of the module that lists them, as another test may have changed that in use."""
    file = Path(transformers.utils.import_utils.__file__)
    spec = importlib.util.spec_from_file_location(f"{LISTING_MODULE}_copy", file)
    assert spec is not None
    assert spec.loader is not None
    import_utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(import_utils)
    models = file.parents[1] / "models"
    expected = import_utils.define_import_structure(models / "__init__.py")
    monkeypatch.setitem(sys.modules, LISTING_MODULE, import_utils)
    list_models_once()
    assert import_utils.define_import_structure.lists_once
    assert import_utils.define_import_structure(models / "__init__.py") == expected
    assert import_utils.define_import_structure(models / "llama" / "__init__.py")


@pytest.mark.parametrize(
    ("config", "parameters", "expected"),
    [
        ({}, {"device": "cpu"}, True),
        ({}, {"device": "cuda"}, False),
        ({"quantization_config": {"quant_method": "fp8"}}, {"device": "cpu"}, False),
        ({}, {"device": "cpu", "trust_remote_code": "true"}, False),
        ({}, {"device": "cpu", "lora_prefetch_dir": "/adapters"}, False),
        (None, {"device": "cpu"}, False),
    ],
)
def test_only_a_plain_checkpoint_on_a_cpu(
    config: object, parameters: dict[str, str], expected: bool, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert may_do_without_compiler({"model": str(tmp_path), **parameters}) is expected


@pytest.mark.parametrize(
    ("chosen", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")], ids=["unset", "set"]
)
def test_waiting_threads_sleep_unless_the_user_wants_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: str
) -> None:
    """What OpenMP finds when the engine imports PyTorch."""
    found: list[str | None] = []
    monkeypatch.setenv("OMP_WAIT_POLICY", chosen or "")
    if chosen is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")

    def create(_parameters: object) -> None:
        found.append(os.environ.get("OMP_WAIT_POLICY"))

    monkeypatch.setattr(transformers_start, "_create", create)
    transformers_start.create_transformers_engine({"model": "/no/such/model"})
    assert found == [expected]
