"""Every architecture of tests/tiny_models.py: generate()'s ids for requests at once, and docs/models.md.

A release of transformers that changes what runs, or how, fails here.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.base import SamplingParams
from tests.engines import ids_of_generate, running
from tests.late import transformers, transformers_loading, transformers_sequential
from tests.support import ROOT
from tests.tiny_models import ARCHITECTURES, save_tiny_model, tiny_config

pytestmark = pytest.mark.rare

PAGE = ROOT / "docs" / "models.md"
GREEDY = SamplingParams(temperature=0.0)
TOKENS = 12
PROMPTS = [[*range(5, 15)], [*range(3, 61)], [*range(3, 203)], [7], [*range(9, 40)]]
SHORT_PROMPTS = [prompt[:60] for prompt in PROMPTS]
# generate() stretches RoPE by the longest prompt of all before; the engine, by each prompt's length.
ORDER_MATTERS = {"llama:dynamic"}


def problem_of(name: str) -> str | None:
    config = tiny_config(name)
    return transformers_loading.batching_problem(config, transformers_loading.model_class(config))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_requests_at_once_have_the_ids_of_generate(name: str, tmp_path: Path) -> None:
    directory = save_tiny_model(name, tmp_path / "model")
    loader: Any = transformers.AutoModelForCausalLM
    if tiny_config(name).is_encoder_decoder:
        loader = transformers.AutoModelForSeq2SeqLM
    model = loader.from_pretrained(directory).eval()
    prompts = SHORT_PROMPTS if name in ORDER_MATTERS else PROMPTS
    expected = [ids_of_generate(model, prompt, TOKENS) for prompt in prompts]
    with running({"engine": "transformers", "model": str(directory), "device": "cpu"}) as requests:
        streams = [
            requests.start(prompt, max_tokens=TOKENS, sampling=GREEDY, return_log_probs=True)
            for prompt in prompts
        ]
        assert [stream.wait().ids for stream in streams] == expected
        assert all(len(stream.log_probs) == TOKENS for stream in streams)
        assert isinstance(requests.engine, transformers_sequential.SequentialEngine) == (
            problem_of(name) is not None
        )


def table() -> str:
    """Return a row for each architecture: whether requests run together, and why not."""
    rows = [["Architecture", "Requests run", "Because it"], ["---"] * 3]
    for name in ARCHITECTURES:
        architecture, _, variant = name.partition(":")
        shown = f"`{architecture}`, {variant.replace('_', ' ')}" if variant else f"`{architecture}`"
        problem = problem_of(name)
        rows.append([shown, "one at a time" if problem else "together", problem or ""])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_page_has_the_table() -> None:
    found = re.search(r"<!-- table:begin -->\n(.*?)<!-- table:end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == table()
