"""LoRA adapters as models of OpenAI's API, on the embedded engine."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cog_triton.text.tokenizer import Tokenizer
from tests.adapters import make_adapter, merge
from tests.late import torch, transformers
from tests.openai_server import QUESTION, OpenAIServer

TOKENS = 24
NAMES = ("demo", "bard", "poet")


@pytest.fixture
def adapters(server: OpenAIServer) -> Iterator[Path]:
    """The server's directory of adapters, which is empty before and after a test."""
    directory = Path(server.environment["LORA_DIR"])
    assert [*directory.iterdir()] == []
    yield directory
    for adapter in directory.iterdir():
        shutil.rmtree(adapter)


@pytest.fixture
def made(demo_model: Path, tmp_path: Path) -> Path:
    """Adapters that the server does not have yet: bard, poet, and another poet."""
    for seed, name in enumerate(("bard", "poet", "another poet"), 1):
        make_adapter(demo_model, tmp_path / name, seed=seed)
    return tmp_path


class Reference:
    """What transformers says with the weights of an adapter added to those of the model."""

    def __init__(self, model: Path, tokenizer: Tokenizer, directory: Path) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._directory = directory

    def answer(self, adapter: Path | None) -> str:
        merged = self._model
        if adapter is not None:
            merged = merge(self._model, adapter, self._directory / f"{adapter.name}, merged")
        model = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
        prompt = torch.tensor([self._tokenizer(QUESTION).input_ids])
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=TOKENS,
            eos_token_id=None,
        )
        answer = ids[0, prompt.shape[1] :].tolist()
        return str(self._tokenizer.decode(answer, skip_special_tokens=True))


def models(server: OpenAIServer) -> list[str]:
    return [card["id"] for card in server.get("/v1/models").json()["data"]]


def ask(server: OpenAIServer, name: str) -> str:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    reply = server.complete(model=name, prompt=QUESTION, **fields)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_adapters_are_models_while_the_server_runs(
    server: OpenAIServer, demo_model: Path, tokenizer: Tokenizer, adapters: Path, made: Path
) -> None:
    reference = Reference(demo_model, tokenizer, made)
    expected = {
        "demo": reference.answer(None),
        "bard": reference.answer(made / "bard"),
        "poet": reference.answer(made / "poet"),
    }
    assert len(set(expected.values())) == 3

    shutil.copytree(made / "poet", adapters / "poet")
    shutil.copytree(made / "bard", adapters / ".bard")
    assert models(server) == ["demo", "poet"]
    assert server.complete(model="bard").status_code == 404
    (adapters / ".bard").rename(adapters / "bard")
    assert models(server) == ["demo", "bard", "poet"]

    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda name: ask(server, name), NAMES * 3))
    assert answers == [expected[name] for name in NAMES * 3]

    shutil.rmtree(adapters / "poet")
    assert server.complete(model="poet").status_code == 404
    shutil.copytree(made / "another poet", adapters / ".poet")
    (adapters / ".poet").rename(adapters / "poet")
    expected["poet"] = reference.answer(made / "another poet")
    assert {name: ask(server, name) for name in NAMES} == expected

    (adapters / "poet" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 0}')
    reply = server.complete(model="poet")
    assert reply.status_code == 400
    assert "the adapter poet cannot be used" in reply.json()["error"]["message"]
    assert ask(server, "bard") == expected["bard"]
