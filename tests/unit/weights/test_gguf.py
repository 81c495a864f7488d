"""A GGUF file as the model: found, converted once, and then a directory as any other."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cog_triton.deployment.announcement import count_numbers
from cog_triton.deployment.preparation import (
    EngineName,
    check_files,
    template_values,
    with_files,
)
from cog_triton.errors import ConfigurationError
from cog_triton.settings import Settings, read_settings
from cog_triton.weights import gguf
from tests.unit.weights.support import Site

ENGINES: tuple[EngineName, ...] = ("transformers", "vllm", "llmapi")
SIZE, INNER, HEADS, KEY_VALUE_HEADS, LAYERS = 64, 96, 4, 2, 2
TOKENS = ["<s>", "</s>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "ab"]


def write_gguf(file: Path) -> Path:
    """Write a tiny random Llama with a tokenizer of single characters and a chat template."""
    library: Any = pytest.importorskip("gguf")
    writer = library.GGUFWriter(str(file), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    random = np.random.default_rng(7)
    narrow = SIZE // HEADS * KEY_VALUE_HEADS
    shapes = {"token_embd": (len(TOKENS), SIZE), "output": (len(TOKENS), SIZE)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (SIZE, SIZE),
            f"blk.{layer}.attn_k": (narrow, SIZE),
            f"blk.{layer}.attn_v": (narrow, SIZE),
            f"blk.{layer}.attn_output": (SIZE, SIZE),
            f"blk.{layer}.ffn_gate": (INNER, SIZE),
            f"blk.{layer}.ffn_up": (INNER, SIZE),
            f"blk.{layer}.ffn_down": (SIZE, INNER),
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(0, 0.18, shape).astype(np.float32))
    norms = [f"blk.{layer}.{kind}_norm" for layer in range(LAYERS) for kind in ("attn", "ffn")]
    for name in ["output_norm", *norms]:
        writer.add_tensor(f"{name}.weight", np.ones(SIZE, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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
    reference: Any = AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name
    )
    converted: Any = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(reference(ids).logits, converted(ids).logits)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
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


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    text = tmp_path / "model.gguf"
    text.write_text("<html>")
    with pytest.raises(ConfigurationError, match="is not a GGUF file"):
        with_files(read_settings({"MODEL": str(text)}))
    (tmp_path / "other.GGUF").touch()
    with pytest.raises(ConfigurationError, match=r"several GGUF files \(model.gguf, other.GGUF\)"):
        with_files(read_settings({"MODEL": str(tmp_path)}))
    (tmp_path / "mmproj-model-f16.gguf").touch()  # of images
    (tmp_path / "other.GGUF").unlink()
    (tmp_path / "config.json").touch()  # which repositories of GGUF files have, too
    assert gguf.gguf_file(tmp_path) == text
    (tmp_path / "model.safetensors").touch()  # the model in its usual form comes first
    assert gguf.gguf_file(tmp_path) is None


def test_a_model_in_parts_is_refused(tmp_path: Path) -> None:
    names = [f"m-Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    problem = (
        "m-Q4_K_M-00001-of-00002.gguf is one of several parts of a model, .* `llama-gguf-split"
    )
    sources = [tmp_path, tmp_path / names[0], f"https://127.0.0.1:9/{names[0]}"]
    for source in sources:
        with pytest.raises(ConfigurationError, match=problem):
            with_files(read_settings({"MODEL": str(source)}))
    single = tmp_path / "single" / "m-00001-of-00001.gguf"
    single.parent.mkdir()
    single.touch()
    assert gguf.gguf_file(single.parent) == single


def test_a_file_is_known_by_its_first_bytes_and_converted_to_the_type_of_the_settings(
    model_file: Path, tmp_path: Path
) -> None:
    """Ollama keeps files under their hashes."""
    blob = tmp_path / "sha256-1234"
    blob.write_bytes(model_file.read_bytes())
    cache = str(tmp_path / "cache")
    given = {"MODEL": str(blob), "WEIGHTS_CACHE": cache, "DTYPE": "bfloat16"}
    directory = Path(with_files(read_settings(given)).model)
    check_files({"engine": "transformers", "model": str(directory)})
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    assert list(count_numbers(directory)) == ["BF16"]
    assert [path.name for path in directory.parent.iterdir() if "unfinished" in path.name] == []


def test_a_file_of_a_url_is_converted(
    model_file: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a name of the URL, or by its first bytes; it is asked for again at each start."""
    names: list[str] = []

    def convert(file: Path, cache: Path, _dtype: str) -> Path:
        names.append(file.name)
        return cache

    monkeypatch.setattr(gguf, "converted", convert)
    content = model_file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    for path in ("tiny.gguf", "tiny.gguf?download=true", "api/files/7"):
        site.serve(content, f"/{path.partition('?')[0]}")
        environment = {"MODEL": f"{site.url}/{path}", "WEIGHTS_CACHE": str(site.cache)}
        with_files(read_settings({**environment, "WEIGHTS_SHA256": digest}))
    assert names == ["tiny.gguf", "tiny.gguf", "7.gguf"]


def test_a_file_that_is_cut_short_is_refused(model_file: Path, tmp_path: Path) -> None:
    content = model_file.read_bytes()
    for length in (len(content) // 2, 200):
        short = tmp_path / f"{length}.gguf"
        short.write_bytes(content[:length])
        with pytest.raises(ConfigurationError, match=r"\d+\.gguf .*it is cut short or damaged"):
            gguf.converted(short, tmp_path / "cache")


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    cache = tmp_path / "cache"
    with pytest.raises(ConfigurationError, match="could not be converted by transformers"):
        gguf.converted(broken, cache)
    assert [path for path in cache.rglob("*") if path.parent != cache] == []
