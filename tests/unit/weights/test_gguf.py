"""A GGUF file as the model: found, converted once, and then a directory as any other."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
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
from cog_triton.weights.gguf_details import UnreadableDetailError, read_details
from tests.late import torch, transformers
from tests.unit.weights.support import Site

ENGINES: tuple[EngineName, ...] = ("transformers", "vllm", "llmapi")
SIZE, INNER, HEADS, KEY_VALUE_HEADS, LAYERS = 64, 96, 4, 2, 2
END_OF_TURN = "<|im_end|>"
TOKENS = ["<s>", "</s>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "ab", END_OF_TURN]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT_TEMPLATE = f"{TEMPLATE}{END_OF_TURN}"


def write_gguf(
    file: Path,
    *,
    template: str = TEMPLATE,
    without: Sequence[str] = (),
    tensors: Mapping[str, Sequence[float]] | None = None,
    change: Callable[[Any], None] | None = None,
) -> Path:
    """Write a tiny random Llama with a tokenizer of single characters and a chat template.

    Args:
        without: tensors to leave out.
        tensors: further ones.
        change: adds to the writer's metadata.
    """
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
    writer.add_chat_template(template)
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
        numbers = random.normal(0, 0.18, shape).astype(np.float32)
        if name not in without:
            writer.add_tensor(f"{name}.weight", numbers)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    if change is not None:
        change(writer)
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    problem = "m-Q4_K_M-00001-of-00002.gguf is one part of a split GGUF model, .* `llama-gguf-split"
    sources = [tmp_path, tmp_path / names[0], f"https://127.0.0.1:9/{names[0]}"]
    for source in sources:
        with pytest.raises(ConfigurationError, match=problem):
            with_files(read_settings({"MODEL": str(source)}))
    single = tmp_path / "single" / "m-00001-of-00001.gguf"
    single.parent.mkdir()
    single.touch()
    assert gguf.gguf_file(single.parent) == single


@pytest.mark.slow
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
        with pytest.raises(ConfigurationError, match=r"\d+\.gguf: it is truncated or damaged"):
            gguf.converted(short, tmp_path / "cache")


def test_the_progress_of_a_short_conversion_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", gguf.progress.name)
    gguf.log_progress("tiny.gguf", ["a warning", "1 of 2 bytes", "2 of 2 bytes"])
    assert caplog.records == []


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


@pytest.mark.parametrize(
    ("scaling", "factor", "expected"),
    [
        ("yarn", 4.0, {"rope_type": "yarn", "original_max_position_embeddings": 128}),
        ("linear", 4.0, {"rope_type": "linear"}),
        ("none", 4.0, None),
        ("linear", 1.0, None),
    ],
)
def test_a_scaled_rotary_embedding_is_kept(
    scaling: str, factor: float, expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    def change(writer: Any) -> None:
        writer.add_string("llama.rope.scaling.type", scaling)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(128)

    rope = read_details(write_gguf(tmp_path / "scaled.gguf", change=change)).rope
    shared = {"rope_theta": 10000.0, "factor": factor}
    assert rope == (None if expected is None else {**shared, **expected})


def test_the_factors_of_longrope_are_kept(tmp_path: Path) -> None:
    factors = {
        "rope_factors_short.weight": [1.0] * 8,
        "rope_factors_long.weight": [4.0] * 8,
    }

    def change(writer: Any) -> None:
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_attn_factors(1.25)

    file = write_gguf(tmp_path / "longrope.gguf", tensors=factors, change=change)
    assert read_details(file).rope == {
        "rope_theta": 10000.0,
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    }


def test_a_rotary_embedding_that_has_no_name_is_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": [1.0, 2, 3, 4, 5, 6, 7, 8]}
    file = write_gguf(tmp_path / "other.gguf", tensors=factors)
    with pytest.raises(UnreadableDetailError, match=r"rope_freqs\.weight .* differently"):
        read_details(file)


def test_layers_with_a_sliding_window_are_not_scaled() -> None:
    """Gemma 3 has two rotary embeddings."""
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    config = SimpleNamespace(
        rope_parameters={
            "sliding_attention": sliding,
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        }
    )
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    gguf.scale_rope(config, rope)
    assert config.rope_parameters == {"sliding_attention": sliding, "full_attention": rope}


def test_the_ends_of_turns_in_the_chat_template_end_an_answer(tmp_path: Path) -> None:
    """Files of Phi-3 and Gemma name the end of a document alone."""
    chat = write_gguf(tmp_path / "chat.gguf", template=CHAT_TEMPLATE)
    assert read_details(chat).end_tokens == (1, TOKENS.index(END_OF_TURN))
    assert read_details(write_gguf(tmp_path / "base.gguf")).end_tokens == (1,)
