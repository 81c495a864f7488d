"""A model and a tokenizer that bring Python code of their own, with and without TRUST_REMOTE_CODE."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cog_triton.deployment import Deployment
from cog_triton.errors import ConfigurationError, TritonStartError
from cog_triton.request.request import Request
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import load_tokenizer
from tests.integration.conftest import make_server, settings_for

MARK = "\N{ROCKET}"
TOKENIZATION = f'''
from transformers import PreTrainedTokenizerFast


class ShoutingTokenizer(PreTrainedTokenizerFast):
    """Decodes what nobody else would, so that it can be told apart. {MARK}"""

    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs).upper()
'''
CONFIGURATION = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "of_its_own"
"""
MODELING = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def update(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture
def own_tokenizer(demo_model: Path, tmp_path: Path) -> Path:
    """The demo model's tokenizer under a class that only code in the directory defines."""
    directory = tmp_path / "own-tokenizer"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, directory)
    (directory / "tokenization_shouting.py").write_text(TOKENIZATION, encoding="utf-8")
    update(
        directory / "tokenizer_config.json",
        tokenizer_class="ShoutingTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_shouting.ShoutingTokenizer"]},
    )
    return directory


@pytest.fixture
def own_model(demo_model: Path, own_tokenizer: Path) -> Path:
    """The demo model under an architecture that only code in the directory defines."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(demo_model / name, own_tokenizer)
    (own_tokenizer / "configuration_own.py").write_text(CONFIGURATION)
    (own_tokenizer / "modeling_own.py").write_text(MODELING)
    update(
        own_tokenizer / "config.json",
        model_type="of_its_own",
        architectures=["OwnForCausalLM"],
        auto_map={
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    )
    return own_tokenizer


async def answer(settings: Settings, prompt: str) -> str:
    deployment = await Deployment.start(settings)
    try:
        request = Request(prompt=prompt, seed=0, max_tokens=16, temperature=0.0)
        return "".join([chunk.text async for chunk in deployment.generate(request)])
    finally:
        await deployment.stop()


def test_without_the_setting_the_predictor_names_it(own_tokenizer: Path) -> None:
    settings = settings_for(own_tokenizer, ENGINE="simulated")
    with pytest.raises(ConfigurationError, match="TRUST_REMOTE_CODE=1") as caught:
        asyncio.run(answer(settings, "Hello"))
    assert str(own_tokenizer) in str(caught.value)


@pytest.mark.parametrize("engine", ["simulated", "transformers"])
def test_without_the_setting_so_does_each_of_tritons_models(
    engine: str, own_model: Path, tmp_path: Path
) -> None:
    server = make_server(settings_for(own_model, ENGINE=engine), tmp_path / "server")
    with pytest.raises(TritonStartError) as caught:
        server.start()
    for what in ["tokenizer"] if engine == "simulated" else ["tokenizer", "model"]:
        assert f"the {what} '{own_model}' brings Python code of its own" in str(caught.value)
    assert "set TRUST_REMOTE_CODE=1" in str(caught.value)


@pytest.mark.parametrize("engine", ["simulated", "transformers"])
def test_with_the_setting_their_code_runs_in_every_process(
    engine: str, own_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A cache of its own: all processes find it empty, and copy the code there at the same time.
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    settings = settings_for(own_model, ENGINE=engine, TRUST_REMOTE_CODE="1")
    text = asyncio.run(answer(settings, "What is machine learning?"))
    assert text
    assert text == text.upper() != text.lower()


def test_code_that_fails_is_the_tokenizers_fault(own_tokenizer: Path) -> None:
    (own_tokenizer / "tokenization_shouting.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ConfigurationError, match=r"own code may be run.*nothing_of_that_name"):
        load_tokenizer(str(own_tokenizer), trust_remote_code=True)
