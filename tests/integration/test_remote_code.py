"""A model and a tokenizer that bring Python code of their own, with and without TRUST_REMOTE_CODE."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cog_triton.deployment import Deployment
from cog_triton.errors import ConfigurationError, TritonStartError
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import load_tokenizer
from tests.integration.conftest import make_server, settings_for
from tests.integration.test_recovery import deployed

# The modules that the model and the tokenizer bring.
CODE = Path(__file__).with_name("remote_code")


def update(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture
def own_model(demo_model: Path, tmp_path: Path) -> Path:
    """The demo model and its tokenizer, of classes that only code in the directory defines."""
    directory = tmp_path / "own"
    shutil.copytree(demo_model, directory)
    shutil.copytree(
        CODE, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    update(
        directory / "tokenizer_config.json",
        tokenizer_class="ShoutingTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_shouting.ShoutingTokenizer"]},
    )
    update(
        directory / "config.json",
        model_type="of_its_own",
        architectures=["OwnForCausalLM"],
        auto_map={
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    )
    return directory


@pytest.mark.anyio
async def test_without_the_setting_the_predictor_names_it(own_model: Path) -> None:
    with pytest.raises(ConfigurationError, match="TRUST_REMOTE_CODE=1") as caught:
        await Deployment.start(settings_for(own_model, ENGINE="simulated"))
    assert str(own_model) in str(caught.value)


@pytest.mark.rare
def test_without_the_setting_each_of_tritons_models_does(own_model: Path, tmp_path: Path) -> None:
    server = make_server(settings_for(own_model, ENGINE="transformers"), tmp_path / "server")
    with pytest.raises(TritonStartError) as caught:
        server.start()
    for what in ("tokenizer", "model"):
        assert f"the {what} '{own_model}' requires its own Python code to run" in str(caught.value)
    assert "set TRUST_REMOTE_CODE=1" in str(caught.value)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "engine", ["simulated", pytest.param("transformers", marks=pytest.mark.rare)]
)
async def test_with_the_setting_their_code_runs_in_every_process(
    own_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str
) -> None:
    """The model's own, in the engine without Triton: tests/compute/test_transformers_loading.py."""
    # A cache of its own: all processes find it empty, and copy the code there at the same time.
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    request = Request("What is machine learning?", seed=0, max_tokens=16, temperature=0.0)
    environment = {"ENGINE": engine, "TRUST_REMOTE_CODE": "1"}
    async with deployed(own_model, **environment) as deployment:
        text = "".join([chunk.text async for chunk in deployment.generate(request)])
    assert text
    assert text == text.upper() != text.lower()


def test_code_that_fails_is_the_tokenizers_fault(own_model: Path) -> None:
    (own_model / "tokenization_shouting.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(
        ConfigurationError,
        match=r"whose code was run because of TRUST_REMOTE_CODE.*nothing_of_that_name",
    ):
        load_tokenizer(str(own_model), trust_remote_code=True)
