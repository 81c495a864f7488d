"""GGUF files of tiny random Llamas."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SIZE, INNER, HEADS, KEY_VALUE_HEADS, LAYERS = 64, 96, 4, 2, 2
END_OF_TURN = "<|im_end|>"
TOKENS = ["<s>", "</s>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "ab", END_OF_TURN]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


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
