"""LoRA adapters as models of OpenAI's API, on the embedded engine."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cog_triton.text.tokenizer import load_tokenizer
from tests.adapters import make_adapter
from tests.openai_server import QUESTION, OpenAIServer
from tests.peft_reference import Reference

TOKENS = 24
NAMES = ("", "poet", "bard")


@pytest.fixture
def server(demo_model: Path, adapters: Path) -> Iterator[OpenAIServer]:
    environment = {"MODEL": str(demo_model), "ENGINE": "transformers", "LORA_DIR": str(adapters)}
    with OpenAIServer(environment, adapters.parent / "log") as server:
        yield server


def models(server: OpenAIServer) -> list[str]:
    return [card["id"] for card in server.get("/v1/models").json()["data"]]


def ask(server: OpenAIServer, name: str) -> str:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    reply = server.complete(model=name or "demo", prompt=QUESTION, **fields)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_adapters_are_models_while_the_server_runs(
    server: OpenAIServer, demo_model: Path, adapters: Path
) -> None:
    tokenizer = load_tokenizer(str(demo_model))
    prompt = tokenizer(QUESTION).input_ids

    def expected(reference: Reference, name: str) -> str:
        return str(tokenizer.decode(reference.ids(prompt, name, TOKENS), skip_special_tokens=True))

    reference = Reference(demo_model, adapters)
    (adapters / "bard").rename(adapters / ".bard")
    assert models(server) == ["demo", "poet"]
    assert server.complete(model="bard").status_code == 404
    (adapters / ".bard").rename(adapters / "bard")
    assert models(server) == ["demo", "bard", "poet"]

    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda name: ask(server, name), NAMES * 3))
    assert answers == [expected(reference, name) for name in NAMES * 3]
    assert len(set(answers)) == 3

    other = make_adapter(demo_model, adapters / ".poet", seed=9)
    shutil.rmtree(adapters / "poet")
    assert server.complete(model="poet").status_code == 404
    other.rename(adapters / "poet")
    replaced = Reference(demo_model, adapters)
    assert [ask(server, name) for name in NAMES] == [expected(replaced, name) for name in NAMES]

    (adapters / "poet" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 0}')
    reply = server.complete(model="poet")
    assert reply.status_code == 400
    assert "the adapter poet cannot be used" in reply.json()["error"]["message"]
    assert ask(server, "bard") == expected(replaced, "bard")
