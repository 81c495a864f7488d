"""A GGUF file is converted to the model that transformers reads of it, once."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cog_triton.deployment.announcement import count_numbers
from cog_triton.deployment.engine_choice import EngineName
from cog_triton.deployment.file_checks import check_files
from cog_triton.deployment.model_files import with_files
from cog_triton.deployment.template_variables import template_values
from cog_triton.errors import ConfigurationError
from cog_triton.settings import Settings, read_settings
from cog_triton.weights import gguf
from tests.gguf_files import LAYERS, SIZE, write_gguf
from tests.late import torch, transformers

ENGINES: tuple[EngineName, ...] = ("transformers", "vllm", "llmapi")


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def settings(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    cache = tmp_path_factory.mktemp("cache")
    environment = {"MODEL": str(model_file), "WEIGHTS_CACHE": str(cache)}
    return with_files(read_settings(environment))


def test_the_converted_model_is_the_one_that_transformers_reads(
    settings: Settings, model_file: Path
) -> None:
    directory = Path(settings.model)
    for engine in ENGINES:
        values = template_values(settings, engine)
        assert values["tensorrt_llm"]["model"] == settings.model
        assert values["preprocessing"]["tokenizer_dir"] == settings.model
        check_files(values["tensorrt_llm"])
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name
    )
    converted: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(reference(ids).logits, converted(ids).logits)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.eos_token == "</s>"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi"


def test_a_file_or_its_directory_is_converted_once(
    settings: Settings, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_convert_in_process", lambda *_: pytest.fail("converted again"))
    cache = str(settings.weights_cache)
    for name in ("MODEL", "COG_WEIGHTS"):
        for source in (model_file, model_file.parent):
            again = with_files(read_settings({name: str(source), "WEIGHTS_CACHE": cache}))
            assert again.model == settings.model


def test_a_file_is_known_by_its_first_bytes_and_converted_to_the_type_of_the_settings(
    model_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ollama keeps files under their hashes. The conversion says how far it is."""
    monkeypatch.setattr(gguf, "PIPE_SECONDS", 0.0)
    monkeypatch.setattr(gguf, "TERMINAL_SECONDS", 0.0)
    caplog.set_level("INFO", gguf.progress.name)
    blob = tmp_path / "sha256-1234"
    blob.write_bytes(model_file.read_bytes())
    cache = str(tmp_path / "cache")
    given = {"MODEL": str(blob), "WEIGHTS_CACHE": cache, "DTYPE": "bfloat16"}
    directory = Path(with_files(read_settings(given)).model)
    check_files({"engine": "transformers", "model": str(directory)})
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    assert list(count_numbers(directory)) == ["BF16"]
    assert [path.name for path in directory.parent.iterdir() if "unfinished" in path.name] == []
    check_progress(caplog, blob.name)


def check_progress(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Check that the log says how much of a file was read, up to all of it."""
    lines = [record.getMessage() for record in caplog.records if record.name == gguf.progress.name]
    assert lines.pop() == f"converting {name}: writing the weights"
    sizes = [re.fullmatch(rf"converting {name}: (\S+)B of (\S+)B read", line) for line in lines]
    assert len(sizes) > 5
    assert None not in sizes
    first, last = sizes[0], sizes[-1]
    assert first is not None
    assert last is not None
    assert first[1] != first[2]
    assert last[1] == last[2]


def test_a_file_that_is_cut_short_is_refused(model_file: Path, tmp_path: Path) -> None:
    content = model_file.read_bytes()
    for length in (len(content) // 2, 200):
        short = tmp_path / f"{length}.gguf"
        short.write_bytes(content[:length])
        with pytest.raises(ConfigurationError, match=r"\d+\.gguf: it is truncated or damaged"):
            gguf.converted(short, tmp_path / "cache")


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    cache = tmp_path / "cache"
    with pytest.raises(ConfigurationError, match="transformers could not convert"):
        gguf.converted(broken, cache)
    assert [path for path in cache.rglob("*") if path.parent != cache] == []


def test_a_file_without_some_weights_is_refused(tmp_path: Path) -> None:
    """Random numbers would take their place, and be saved as the model's."""
    file = write_gguf(tmp_path / "lacking.gguf", without=["blk.1.attn_q"])
    with pytest.raises(SystemExit, match=r"lacks 1 of the model's weights: .*layers\.1.*q_proj"):
        gguf.convert(file, tmp_path / "model", "auto")


def test_biases_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    """As those of models that are Llamas but for the biases of their attention."""
    biases = {f"blk.{layer}.attn_q.bias": [1.0] * SIZE for layer in range(LAYERS)}
    file = write_gguf(tmp_path / "biased.gguf", tensors=biases)
    with pytest.raises(SystemExit, match="contains biases, which transformers ignores"):
        gguf.convert(file, tmp_path / "model", "auto")


def test_the_conversion_keeps_what_transformers_does_not_read(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_eot_token_id(5)
        writer.add_add_bos_token(True)

    factors = {"rope_freqs.weight": llama3_factors()}
    file = write_gguf(tmp_path / "llama3.gguf", tensors=factors, change=change)
    gguf.convert(file, tmp_path / "model", "auto")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.generation_config.eos_token_id == [1, 5]
    unscaled = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    frequencies = model.model.rotary_emb.inv_freq.numpy()
    assert np.allclose(frequencies, unscaled / np.asarray(llama3_factors()), rtol=1e-4)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("hi").input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokenizer("hi").input_ids, skip_special_tokens=True) == "hi"


def llama3_factors() -> list[float]:
    """Compute the factors as llama.cpp does when it writes a file of Llama 3.2."""
    factors = []
    for place in range(0, 16, 2):
        wavelength = 2 * np.pi * 10000.0 ** (place / 16)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    return factors
