"""Text behind TensorRT-LLM's backend, which sends one id a response and says nothing of those before.

The stand-in answers with the prompt's ids again. The tokenizers are those of the detokenizer's tests:
characters split over byte-level tokens, and SentencePiece's leading spaces and byte fallback.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import load_tokenizer
from tests.integration.conftest import make_server, running, settings_for
from tests.integration.test_ensemble import generate_stream, texts
from tests.stand_in.servers import environment
from tests.unit.text.test_detokenizer import byte_fallback, byte_level

KINDS = {"byte level": byte_level, "byte fallback": byte_fallback}
TEXTS = [
    "the quick brown fox  jumps over the lazy dog",
    "naïve café, déjà vu; Привет, мир!",
    "你好，世界。日本語の文章です。",
    "emoji 🎉🎉 👩‍👩‍👧‍👦 and  two  spaces\n\n\tand lines\r\n",
]


@pytest.fixture(
    scope="module", params=["byte fallback", pytest.param("byte level", marks=pytest.mark.rare)]
)
def tokenizer_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    KINDS[request.param]().tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    directory = tmp_path_factory.mktemp("text")
    settings = settings_for(tokenizer_dir, **environment(directory / "stand_in"))
    with running(make_server(settings, directory, {"tensorrt_llm_bls": {}})) as triton:
        yield triton


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Any:
    return load_tokenizer(str(tokenizer_dir))


def streamed(server: TritonServer, model: str, text: str, tokens: int) -> list[str]:
    return texts(generate_stream(server, model, text_input=text, max_tokens=tokens))


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_join_to_the_decoding_of_all_ids(
    server: TritonServer, tokenizer: Any, model: str, text: str
) -> None:
    ids = tokenizer(text).input_ids
    pieces = streamed(server, model, text, len(ids))
    assert "".join(pieces) == decoded(tokenizer, ids)
    assert len(pieces) >= len(ids)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_an_answer_that_is_cut_within_a_character(
    server: TritonServer, tokenizer: Any, model: str
) -> None:
    text = TEXTS[-1]
    ids = tokenizer(text).input_ids
    for count in range(1, len(ids)):
        whole = decoded(tokenizer, ids[:count])
        if whole.endswith("\ufffd"):
            break
    else:
        pytest.skip("no character of this tokenizer has several tokens")
    assert "".join(streamed(server, model, text, count)) == whole


def test_many_at_once_are_kept_apart(server: TritonServer, tokenizer: Any) -> None:
    """Without ids of their own, which generic clients do not give."""

    def check(number: int) -> None:
        text = f"{number} {TEXTS[number % len(TEXTS)]}"
        ids = tokenizer(text).input_ids
        assert "".join(streamed(server, "ensemble", text, len(ids))) == decoded(tokenizer, ids)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(check, range(24)))
