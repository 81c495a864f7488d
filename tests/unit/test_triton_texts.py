from __future__ import annotations

import pytest

from cog_triton.errors import LONGEST, cause

SAFETENSORS = (
    r"Internal: SafetensorError: Error while deserializing header: header too large\n\nAt:\n"
    r"  /venv/transformers/modeling_utils.py(4570): _load_pretrained_model\n"
)
ASSERTION = (
    "in ensemble 'ensemble', [TensorRT-LLM][ERROR] Assertion failed: no cache (/src/kv.cpp:92)\n"
    "1       0x7f8c2dc45ab1 tensorrt_llm::common::throwRuntimeError + 100\n2       0x7f8c2 /lib/x.so"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SAFETENSORS, "SafetensorError: Error while deserializing header: header too large"),
        (ASSERTION, "[TensorRT-LLM][ERROR] Assertion failed: no cache (/src/kv.cpp:92)"),
        ("Internal: KeyError: 'model'\n\nAt:\n  model.py(3): initialize", "KeyError: 'model'"),
        (
            "Internal: ConfigurationError: E3001 ConfigurationError: /m holds no tokenizer\n",
            "/m holds no tokenizer",
        ),
        ("in ensemble 'ensemble_ids', top_p must be 1, not 2", "top_p must be 1, not 2"),
        (
            "in ensemble 'ensemble_ids', Failed to process the request(s) for model instance "
            "'preprocessing_0_0', message: ValueError: a bad word\n\nAt:\n  m.py(9): execute\n",
            "a bad word",
        ),
        (
            "ValueError: model type `zebra`\nis unknown.\n\nUpdate it.",
            "model type `zebra` is unknown.",
        ),
        ("Triton says so", "Triton says so"),
        ("", ""),
    ],
)
def test_the_cause_is_what_is_left(text: str, said: str) -> None:
    assert cause(text) == said
    assert cause(cause(text)) == said


def test_a_cause_is_short() -> None:
    assert len(cause("x" * 5000)) == LONGEST
