"""What the predictor makes of its inputs, with a deployment that answers nothing."""

import asyncio
import inspect
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from cog_triton.deployment import Deployment
from cog_triton.errors import PromptRequired
from cog_triton.generation import Chunk
from cog_triton.request.request import Request
from cog_triton.settings import read_settings
from cog_triton.text.tokenizer import load_tokenizer

CHAT = "<s><|user|>Hi<|end|><|assistant|>"


class Recorded(Deployment):
    """Keeps the request that it gets."""

    request: Request

    async def generate(self, request: Request, *_: Any) -> AsyncGenerator[Chunk, None]:
        self.request = request
        yield Chunk("text", 1, 1, "stop")


@pytest.fixture(scope="module")
def instruct_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template that is not known to have learned plain questions too."""
    directory = tmp_path_factory.mktemp("models") / "instruct"
    shutil.copytree(demo_model, directory, ignore=lambda *_: ["demo.json"])
    return directory


@pytest.fixture(scope="module")
def base_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "base"
    left_out = ["demo.json", "chat_template.jinja"]
    shutil.copytree(demo_model, directory, ignore=lambda *_: left_out)
    return directory


def deployment_of(model: Path, environment: dict[str, str]) -> Recorded:
    settings = read_settings({"MODEL": str(model), **environment})
    nothing: Any = None
    return Recorded(settings, nothing, nothing, nothing, load_tokenizer(str(model)))


def asked(model: Path, environment: dict[str, str] | None = None, **inputs: Any) -> Request:
    """The request that a prediction makes."""
    from predict import Predictor

    deployment = deployment_of(model, environment or {})
    predictor = Predictor()
    predictor.deployment = deployment
    predictor.record_metric = lambda *_: None
    parameters = inspect.signature(Predictor.predict).parameters.values()
    defaults = {p.name: p.default.default for p in parameters if hasattr(p.default, "default")}

    async def answer() -> str:
        pieces = await predictor.predict(**{**defaults, **inputs})
        return await asyncio.to_thread("".join, pieces)

    assert asyncio.run(answer()) == "text"
    return deployment.request


@pytest.mark.parametrize(
    ("environment", "inputs", "prompt"),
    [
        pytest.param({}, {}, CHAT, id="one message of a user"),
        pytest.param({}, {"prompt_template": ""}, CHAT, id="an empty template is none"),
        pytest.param(
            {},
            {"system_prompt": "Be brief."},
            f"<s><|system|>Be brief.<|end|>{CHAT[3:]}",
            id="system",
        ),
        pytest.param(
            {"SYSTEM_PROMPT": "Be brief."},
            {},
            f"<s><|system|>Be brief.<|end|>{CHAT[3:]}",
            id="SYSTEM_PROMPT",
        ),
    ],
)
def test_a_prompt_goes_through_the_chat_template(
    instruct_model: Path, environment: dict[str, str], inputs: dict[str, str], prompt: str
) -> None:
    request = asked(instruct_model, environment, prompt="Hi", **inputs)
    assert (request.prompt, request.add_special_tokens) == (prompt, False)


@pytest.mark.parametrize(
    ("environment", "inputs", "prompt"),
    [
        pytest.param({}, {"prompt_template": "{prompt}"}, "Hi", id="raw by the input"),
        pytest.param({"PROMPT_TEMPLATE": "{prompt}"}, {}, "Hi", id="raw by PROMPT_TEMPLATE"),
        pytest.param({"PROMPT_TEMPLATE": "Q: {prompt}"}, {}, "Q: Hi", id="PROMPT_TEMPLATE"),
        pytest.param(
            {"PROMPT_TEMPLATE": "Q: {prompt}"}, {"prompt_template": "{prompt}"}, "Hi", id="both"
        ),
        pytest.param(
            {},
            {"prompt_template": "{system_prompt}: {prompt}", "system_prompt": "S"},
            "S: Hi",
            id="with a system prompt",
        ),
    ],
)
def test_a_prompt_template_goes_before_the_chat_template(
    instruct_model: Path, environment: dict[str, str], inputs: dict[str, str], prompt: str
) -> None:
    request = asked(instruct_model, environment, prompt="Hi", **inputs)
    assert (request.prompt, request.add_special_tokens) == (prompt, None)


def test_settings_are_the_defaults_of_inputs(
    base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"STOP_SEQUENCES": r"END,a\,b", "LOG_PERFORMANCE_METRICS": "true"}
    assert asked(base_model, environment, prompt="Hi").stop_sequences == ("END", "a,b")
    assert "time_to_first_token: " in capsys.readouterr().out
    other = asked(base_model, environment, prompt="Hi", stop_sequences="no")
    assert other.stop_sequences == ("no",)
    asked(base_model, prompt="Hi")
    assert "time_to_first_token: " not in capsys.readouterr().out.rpartition("Random seed")[2]


def test_models_whose_prompts_stay_as_they_are(demo_model: Path, base_model: Path) -> None:
    for model in (demo_model, base_model):
        request = asked(model, prompt="Hi")
        assert (request.prompt, request.add_special_tokens) == ("Hi", None)


@pytest.mark.parametrize("prompt", [None, ""])
def test_a_chat_needs_a_prompt_too(instruct_model: Path, prompt: str | None) -> None:
    with pytest.raises(PromptRequired):
        asked(instruct_model, prompt=prompt)


@pytest.mark.parametrize(
    ("model", "environment", "expected"),
    [
        ("instruct_model", {}, "through the model's chat template"),
        ("instruct_model", {"PROMPT_TEMPLATE": "{prompt}"}, "to the model unchanged"),
        ("instruct_model", {"PROMPT_TEMPLATE": "Q: {prompt}"}, "through PROMPT_TEMPLATE"),
        ("base_model", {}, "to the model unchanged"),
        ("demo_model", {}, "to the model unchanged"),
    ],
)
def test_the_log_says_what_is_made_of_prompts(
    request: pytest.FixtureRequest, model: str, environment: dict[str, str], expected: str
) -> None:
    from predict import described_prompts

    directory: Path = request.getfixturevalue(model)
    assert expected in described_prompts(deployment_of(directory, environment))
