"""The line of a start that says what is served."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cog_triton.deployment import announcement
from cog_triton.deployment.announcement import (
    Checkpoint,
    Served,
    count_numbers,
    read_checkpoint,
    rounded,
    served,
    template_of,
)
from cog_triton.server import devices
from cog_triton.server.devices import Torch
from cog_triton.settings import read_settings
from cog_triton.terminal.serving import ANNOUNCEMENT, CLEAR_LINE, CONVERSION, Report
from cog_triton.text.end_tokens import EndTokens
from cog_triton.text.tokenizer import load_tokenizer
from cog_triton.weights import gguf


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcement, "GPU", False)


def write_model(directory: Path, *, config: object, dtype: Any = np.float16) -> Path:
    save_file({"a": np.zeros((100, 1000), dtype)}, directory / "model-1.safetensors")
    save_file({"b": np.zeros((35_000,), dtype)}, directory / "model-2.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def line_of(
    demo: Path, engine: str, variables: dict[str, object], template: str | None = None
) -> str:
    tokenizer = load_tokenizer(str(demo))
    ends = EndTokens((tokenizer.eos_token_id, 0))
    given = {} if template is None else {"CHAT_TEMPLATE": template}
    settings = read_settings({"TOKENIZER": "instruct", **given})
    described = served(
        *("SmolLM2", engine, variables, tokenizer, ends),
        context_length=8192,
        template=template_of(settings, tokenizer),
    )
    return described.line()


def test_the_whole_line() -> None:
    described = Served(
        "SmolLM2-135M-Instruct",
        "transformers",
        Checkpoint("llama", 134_515_008),
        device="cpu",
        dtype="bfloat16",
        context_length=8192,
        end_tokens=("<|im_end|>", "<|endoftext|>"),
        template="chat template from the tokenizer",
    )
    assert described.line() == (
        "serving SmolLM2-135M-Instruct (llama, 135M parameters) on transformers, cpu, bfloat16; "
        "context 8,192; ends at <|im_end|>, <|endoftext|>; chat template from the tokenizer"
    )


@pytest.mark.parametrize(
    ("engine", "variables", "runs"),
    [
        ("transformers", {}, "transformers, cpu, float16"),
        (
            "transformers",
            {"device": "cuda:1", "dtype": "bfloat16"},
            "transformers, cuda:1, bfloat16",
        ),
        ("vllm", {"dtype": "float32"}, "vllm, cpu, float32"),
        ("llmapi", {"dtype": "auto"}, "llmapi, cuda, float16"),
    ],
)
def test_a_checkpoint_on_each_engine(
    engine: str, variables: dict[str, object], runs: str, tmp_path: Path, demo_model: Path
) -> None:
    model = write_model(tmp_path, config={"model_type": "llama"})
    line = line_of(demo_model, engine, {"model": str(model), **variables})
    assert line.startswith(
        f"serving SmolLM2 (llama, 135K parameters) on {runs}; context 8,192; ends"
    )
    assert line.endswith("; chat template from the tokenizer")


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize(("cuda", "device"), [(None, "cpu"), ("13.0", "cuda")])
def test_pytorch_for_cpus_computes_on_the_cpu_beside_a_gpu(
    engine: str,
    cuda: str | None,
    device: str,
    tmp_path: Path,
    demo_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcement, "GPU", True)
    monkeypatch.setattr(devices, "installed_torch", lambda: Torch("2.13.0", cuda))
    model = write_model(tmp_path, config={"model_type": "llama"})
    assert f" on {engine}, {device}, float16;" in line_of(demo_model, engine, {"model": str(model)})


def test_an_engine_directory_and_a_template_of_the_setting(
    tmp_path: Path, demo_model: Path
) -> None:
    built = {"architecture": "LlamaForCausalLM", "dtype": "float16"}
    config = {"pretrained_config": built | {"quantization": {"quant_algo": "FP8"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = line_of(demo_model, "tensorrtllm", {"engine_dir": str(tmp_path)}, "{{ messages }}")
    assert line.startswith(
        "serving SmolLM2 (LlamaForCausalLM, quantized by FP8) on tensorrtllm, cuda, float16; "
    )
    assert line.endswith("; chat template from CHAT_TEMPLATE")


@pytest.mark.parametrize(
    ("template", "environment", "text"),
    [
        ("{{ messages }}", {}, "chat template from the tokenizer"),
        (
            "{{ messages }}",
            {"PROMPT_TEMPLATE": "{prompt}"},
            "chat template from the tokenizer for messages, prompts unchanged",
        ),
        (
            "{{ messages }}",
            {"PROMPT_TEMPLATE": "Q: {prompt}"},
            "chat template from the tokenizer for messages, PROMPT_TEMPLATE for prompts",
        ),
        (None, {}, "no chat template, prompts unchanged"),
        (None, {"PROMPT_TEMPLATE": "{prompt}"}, "no chat template, prompts unchanged"),
        (
            None,
            {"PROMPT_TEMPLATE": "Q: {prompt}"},
            "no chat template for messages, PROMPT_TEMPLATE for prompts",
        ),
        ({"tool_use": "{{ tools }}"}, {}, "no chat template, prompts unchanged"),
        ("{{ messages }}", {"CHAT_TEMPLATE": "{{ messages }}"}, "chat template from CHAT_TEMPLATE"),
    ],
)
def test_what_is_made_of_prompts(
    template: object, environment: dict[str, str], text: str, demo_model: Path
) -> None:
    tokenizer: Any = load_tokenizer(str(demo_model))
    tokenizer.chat_template = template
    settings = read_settings({"TOKENIZER": "instruct", **environment})
    assert template_of(settings, tokenizer) == text
    # The demo model was trained on questions as they are.
    demo = read_settings({"TOKENIZER": str(demo_model), **environment})
    assert template_of(demo, tokenizer).endswith(" prompts unchanged") is (
        environment.get("PROMPT_TEMPLATE") != "Q: {prompt}"
    )


def test_the_simulated_engine_runs_no_model(demo_model: Path) -> None:
    line = line_of(demo_model, "simulated", {"model": str(demo_model)})
    assert line.startswith("serving SmolLM2 on simulated; context 8,192; ends at </s>")


@pytest.mark.parametrize(
    ("config", "checkpoint"),
    [
        ({"model_type": "qwen3", "dtype": "bfloat16"}, Checkpoint("qwen3", 135_000, "bfloat16")),
        (
            {"model_type": "gemma3", "text_config": {"torch_dtype": "torch.bfloat16"}},
            Checkpoint("gemma3", 135_000, "bfloat16"),
        ),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
            Checkpoint("llama", None, "float16", "gptq"),
        ),
        ([], Checkpoint(None, 135_000, "float16")),
        (
            {"model_type": 3, "quantization_config": [], "text_config": 1, "dtype": {}},
            Checkpoint(None, 135_000, "float16"),
        ),
    ],
    ids=["plain", "nested", "quantized", "no-object", "nonsense"],
)
def test_what_a_checkpoints_files_say(
    config: object, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    assert read_checkpoint(write_model(tmp_path, config=config)) == checkpoint


def test_files_that_cannot_be_read_say_nothing(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path / "absent") == Checkpoint()
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "a.safetensors").write_bytes(b"\0")
    (tmp_path / "b.safetensors").write_bytes(b"\xff" * 16)
    assert read_checkpoint(tmp_path) == Checkpoint()
    assert not count_numbers(tmp_path)


def test_what_is_not_known_is_said() -> None:
    line = Served("model ensemble", "the Triton at 10.0.0.1:8001").line()
    assert line == (
        "serving model ensemble on the Triton at 10.0.0.1:8001; context length known only to the engine; "
        "ends only at max_tokens; no chat template"
    )
    many = Served("m", "e", end_tokens=tuple("abcdefghij")).line()
    assert "ends at a, b, c, d, e, f, g, h and 2 more;" in many


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (7, "7"),
        (320_000, "320K"),
        (134_515_008, "135M"),
        (1_235_814_400, "1.24B"),
        (8_030_261_248, "8.03B"),
        (70_553_706_496, "70.6B"),
        (671_026_419_200, "671B"),
        (1_026_000_000_000, "1.03T"),
    ],
)
def test_parameters_as_people_say_them(number: int, text: str) -> None:
    assert rounded(number) == text


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (Screen(), f"{CLEAR_LINE}by progress{CLEAR_LINE}by {ANNOUNCEMENT}\nby {CONVERSION}\n"),
        (io.StringIO(), f"by progress\nby {ANNOUNCEMENT}\nby {CONVERSION}\n"),
    ],
    ids=["terminal", "pipe"],
)
def test_the_line_stays_where_others_pass(stream: io.StringIO, expected: str) -> None:
    report = Report(stream, {"TERM": "dumb"}, passing=True)
    for name, text in (
        ("cog_triton.deployment", "by progress"),
        (announcement.logger.name, f"by {ANNOUNCEMENT}"),
        (gguf.logger.name, f"by {CONVERSION}"),
    ):
        report.emit(logging.LogRecord(name, logging.INFO, "", 0, text, None, None))
    assert announcement.logger.name == ANNOUNCEMENT
    assert gguf.logger.name == CONVERSION
    assert stream.getvalue() == expected
