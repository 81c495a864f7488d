"""What vLLM is told, and what is made of its answers; vLLM itself is in test_vllm_engine.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from cog_triton.engines.base import EngineError, GenerationRequest, Step
from cog_triton.engines.interpreter import python
from cog_triton.engines.library_arguments import ARGUMENTS
from cog_triton.engines.vllm import VllmEngine
from cog_triton.engines.vllm_arguments import engine_config, guide_arguments, on_device
from cog_triton.request.request import Guide, GuideKind
from tests.support import ROOT

# Its arguments; what holds for all libraries is in test_library.py


def test_every_variable_is_an_argument_or_said_to_have_no_effect() -> None:
    apart = {
        "end_ids",  # of what reads requests for all embedded engines
        "engine",
        "exclude_input_in_output",
        "gpt_model_path",  # as engine_dir, whose filling says so
        "max_tokens_per_response",  # of what delivers the tokens of all embedded engines
        "tokenizer_dir",
    }
    template = (ROOT / "triton_model_repo" / "tensorrt_llm" / "config.pbtxt").read_text()
    names = re.findall(r'key: "(\w+)" value \{ string_value: "\$\{(?!simulated)\w+\}"', template)
    assert {*names} - ARGUMENTS.keys() == apart


@pytest.mark.parametrize(
    ("config", "arguments", "cpu", "added"),
    [
        # A model keeps its data type.
        pytest.param({"dtype": "float32"}, {}, False, {"dtype": "float32"}, id="single precision"),
        pytest.param(
            {"torch_dtype": "float32"},
            {},
            False,
            {"dtype": "float32"},
            id="single precision by its older name",
        ),
        pytest.param({"dtype": "bfloat16"}, {}, False, {}, id="half precision"),
        pytest.param({}, {}, False, {}, id="unknown precision"),
        pytest.param(
            {"dtype": "bfloat16"}, {"dtype": "float32"}, False, {}, id="precision that is set"
        ),
        # Adapters on a GPU are applied in half precision, which vLLM's own choice is.
        pytest.param({"dtype": "float32"}, {"enable_lora": True}, False, {}, id="adapters"),
        pytest.param(
            {"dtype": "float32"},
            {"enable_lora": True, "dtype": "bfloat16"},
            False,
            {},
            id="adapters, and a precision that is set",
        ),
        pytest.param(
            {"dtype": "float32"},
            {"enable_lora": True},
            True,
            {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30},
            id="adapters on a CPU",
        ),
        # On CPUs it would compile for minutes, and take most of the memory.
        pytest.param(
            {}, {}, True, {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}, id="CPU"
        ),
        pytest.param(
            {},
            {"enforce_eager": False, "kv_cache_memory_bytes": 5},
            True,
            {},
            id="CPU with settings of its own",
        ),
        pytest.param(
            {},
            {"gpu_memory_utilization": 0.2},
            True,
            {"enforce_eager": True},
            id="CPU with a share of the memory",
        ),
    ],
)
def test_on_device(
    tmp_path: Path,
    config: dict[str, str],
    arguments: dict[str, Any],
    cpu: bool,
    added: dict[str, Any],
) -> None:
    """``config`` is the model's; ``added`` is what vLLM is given beside its arguments."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = {"model": str(tmp_path), **arguments}
    assert on_device(arguments, cpu=cpu) == {**arguments, **added}


def test_adapters_on_a_gpu_in_full_precision_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype float32 cannot be combined with lora_prefetch_dir"):
        on_device({"enable_lora": True, "dtype": "float32"}, cpu=False)


def test_in_a_stub_the_interpreter_is_of_this_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"python{sys.version_info.major}.{sys.version_info.minor}").symlink_to(
        sys.executable
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", "/opt/tritonserver/triton_python_backend_stub")
    command = [python(), "-c", "import sys; print(sys.version_info[:2])"]
    assert subprocess.check_output(command, text=True).strip() == str(sys.version_info[:2])


def test_it_reports_nothing_to_its_makers() -> None:
    program = (
        "import os\nfrom cog_triton.engines.interpreter import prepare_for_vllm\n"
        "prepare_for_vllm()\nprint(os.environ['VLLM_NO_USAGE_STATS'])"
    )
    shown = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT)
    assert shown == "1\n"


def test_the_configuration_is_that_of_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    made = MagicMock()
    usage = SimpleNamespace(UsageContext=SimpleNamespace(OPENAI_API_SERVER="api server"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(AsyncEngineArgs=made))
    monkeypatch.setitem(sys.modules, "vllm.usage", SimpleNamespace(usage_lib=usage))
    monkeypatch.setitem(sys.modules, "vllm.usage.usage_lib", usage)
    config = engine_config({"model": "m", "max_num_seqs": 8})
    made.assert_called_once_with(model="m", max_num_seqs=8)
    made.return_value.create_engine_config.assert_called_once_with("api server")
    assert config is made.return_value.create_engine_config.return_value


# Requests


def test_guides() -> None:
    kinds = {"json_schema": "json", "ebnf_grammar": "grammar"}
    kinds |= {name: name for name in ("regex", "structural_tag")}
    for kind, argument in kinds.items():
        assert guide_arguments(Guide(GuideKind(kind), "text")) == {argument: "text"}
    assert guide_arguments(Guide(GuideKind.JSON)) == {"json_object": True}


def test_steps() -> None:
    one, step = GenerationRequest("a", [5], 8), VllmEngine.__new__(VllmEngine).step
    assert step(one, [5, 6], None, None) == Step([5, 6])
    assert step(one, [5, 6], None, "stop") == Step([5, 6], finished=True)
    with pytest.raises(EngineError, match="vLLM ended the request: error"):
        step(one, [5, 6], None, "error")
