"""A GGUF file as the model: found, and what it says."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cog_triton.deployment.model_files import with_files
from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings
from cog_triton.weights import gguf
from cog_triton.weights.gguf_details import UnreadableDetailError, read_details
from tests.gguf_files import END_OF_TURN, TEMPLATE, TOKENS, write_gguf
from tests.unit.weights.support import Site

CHAT_TEMPLATE = f"{TEMPLATE}{END_OF_TURN}"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


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


def test_the_progress_of_a_short_conversion_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", gguf.progress.name)
    gguf.log_progress("tiny.gguf", ["a warning", "1 of 2 bytes", "2 of 2 bytes"])
    assert caplog.records == []


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
