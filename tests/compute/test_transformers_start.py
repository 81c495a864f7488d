"""A start on a CPU does without PyTorch's compiler, and leaves it usable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton.engines import transformers_start
from cog_triton.engines.transformers_start import may_do_without_compiler
from tests.support import ROOT

PROGRAM = """
import sys
from cog_triton.engines.base import create_engine

engine = create_engine({"model": sys.argv[1], "device": "cpu", "tokenizer_dir": sys.argv[1]})
unused = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"}
unused.add("torch._meta_registrations")
assert not unused & set(sys.modules), unused & set(sys.modules)
engine.close()

import torch
from transformers.utils.import_utils import define_import_structure
import transformers.models

assert torch.distributed.is_available()
doubled = torch.compile(lambda x: 2 * x, backend="eager")
assert doubled(torch.tensor(2)).item() == 4
assert "torch._dynamo.symbolic_convert" in sys.modules
assert "torch._meta_registrations" in sys.modules
print("done")
"""
LACKS_A_SHAPE = """
import sys
from cog_triton.engines import transformers_start

attempts = []

def create(parameters):
    import torch

    attempts.append("torch._meta_registrations" in sys.modules)
    # PyTorch computes the shape of this result in Python alone.
    return torch.kthvalue(torch.empty(3, device="meta"), 1)

transformers_start._create = create
transformers_start.create_transformers_engine({"model": sys.argv[1], "device": "cpu"})
assert attempts == [False, True], attempts
print("done")
"""
LISTED_ONCE = """
from transformers.utils import import_utils
from cog_triton.text.transformers_import import list_models_once
import transformers

file = transformers.__file__.replace("__init__", "models/__init__")
expected = import_utils.define_import_structure(file)
list_models_once()
assert import_utils.define_import_structure(file) == expected
assert import_utils.define_import_structure.lists_once
other = file.replace("models/", "models/llama/")
assert import_utils.define_import_structure(other)
print("done")
"""


@pytest.mark.parametrize(
    "program", [PROGRAM, LACKS_A_SHAPE, LISTED_ONCE], ids=["compiler", "shape", "listing"]
)
def test_in_a_process_of_its_own(program: str, demo_model: Path) -> None:
    command = [sys.executable, "-c", program, str(demo_model)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "done\n", done.stderr


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
