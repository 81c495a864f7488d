"""A GGUF file is converted to the model that transformers reads of it, once."""

import io
import json
import logging
import re
from dataclasses import dataclass
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


@dataclass
class Conversion:
    """What became of a file that has its hash as its name, as Hugging Face and Ollama keep them."""

    blob: Path
    # Of the blob, alone in its directory.
    link: Path
    settings: Settings
    # All that was logged meanwhile.
    lines: list[str]

    @property
    def directory(self) -> Path:
        return Path(self.settings.model)


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    directory = tmp_path_factory.mktemp("gguf")
    blob = write_gguf(directory / "sha256-1234")
    link = directory / "snapshot" / "tiny.gguf"
    link.parent.mkdir()
    link.symlink_to(blob)
    asked = {"MODEL": str(blob), "WEIGHTS_CACHE": str(directory / "cache"), "DTYPE": "bfloat16"}
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "PIPE_SECONDS", 0.0)
        patch.setattr(gguf, "TERMINAL_SECONDS", 0.0)
        patch.setattr(gguf.progress, "level", logging.INFO)
        gguf.progress.addHandler(handler)
        try:
            settings = with_files(read_settings(asked))
        finally:
            gguf.progress.removeHandler(handler)
    return Conversion(blob, link, settings, log.getvalue().splitlines())


def test_the_converted_model_is_the_one_that_transformers_reads(conversion: Conversion) -> None:
    for engine in ENGINES:
        values = template_values(conversion.settings, engine)
        assert values["tensorrt_llm"]["model"] == str(conversion.directory)
        assert values["preprocessing"]["tokenizer_dir"] == str(conversion.directory)
        check_files(values["tensorrt_llm"])
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        conversion.link.parent, gguf_file=conversion.link.name, dtype=torch.bfloat16
    )
    converted: Any = transformers.AutoModelForCausalLM.from_pretrained(conversion.directory)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(reference(ids).logits, converted(ids).logits)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(conversion.directory)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.eos_token == "</s>"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi"


def test_its_weights_are_of_the_type_of_the_settings(conversion: Conversion) -> None:
    config = json.loads((conversion.directory / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert list(count_numbers(conversion.directory)) == ["BF16"]


def test_nothing_unfinished_is_left(conversion: Conversion) -> None:
    assert [path.name for path in conversion.directory.parent.iterdir()] == ["model"]


def test_a_file_or_its_directory_is_converted_once(
    conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_convert_in_process", lambda *_: pytest.fail("converted again"))
    same = {"WEIGHTS_CACHE": str(conversion.settings.weights_cache), "DTYPE": "bfloat16"}
    for name in ("MODEL", "COG_WEIGHTS"):
        for source in (conversion.blob, conversion.link, conversion.link.parent):
            again = with_files(read_settings({name: str(source), **same}))
            assert again.model == conversion.settings.model


def test_the_log_says_how_much_was_read_up_to_all_of_it(conversion: Conversion) -> None:
    lines = conversion.lines.copy()
    name = conversion.blob.name
    assert lines.pop() == f"converting {name}: writing the weights"
    sizes = [re.fullmatch(rf"converting {name}: (\S+)B of (\S+)B read", line) for line in lines]
    assert len(sizes) > 5
    assert None not in sizes
    first, last = sizes[0], sizes[-1]
    assert first is not None
    assert last is not None
    assert first[1] != first[2]
    assert last[1] == last[2]


@pytest.mark.parametrize("share", [0.5, 0.01])
def test_a_file_that_is_cut_short_is_refused(
    conversion: Conversion, share: float, tmp_path: Path
) -> None:
    content = conversion.blob.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(SystemExit, match="it is truncated or damaged"):
        gguf.convert(short, tmp_path / "model", "auto")


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    cache = tmp_path / "cache"
    with pytest.raises(
        ConfigurationError, match=r"could not convert .*: it is truncated or damaged"
    ):
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
