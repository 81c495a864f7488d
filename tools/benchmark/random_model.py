"""A model of a well-known shape with random weights, made in seconds on the machine that measures it.

How fast a model runs depends on its shape, not on what it knows. Each token is one word of the
tokenizer, so a prompt of n words has n tokens, and every token can be shown as soon as it is there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

END_ID = 0
END = "<end>"
CONTEXT_LENGTH = 8192


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model. ``tied``: whether the output layer is the embedding."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=CONTEXT_LENGTH,
            bos_token_id=None,
            eos_token_id=END_ID,
            pad_token_id=END_ID,
            architectures=["LlamaForCausalLM"],
        )


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 1000, tied=True),
    "135m": Shape(576, 30, 9, 3, 1536, 49152, tied=True),  # SmolLM 135M
    "8b": Shape(4096, 32, 32, 8, 14336, 128256, tied=False),  # Llama 3.1 8B
}


def make_model(
    directory: Path, shape: Shape, *, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Writes a model and its tokenizer into a directory. The same arguments give the same model.

    Greedy decoding never ends early: the end token's logit is 0, and some other's is always greater.

    Args:
        device: where the random numbers are made; 8 B of them take a minute on a CPU.
    """
    _make_weights(directory, shape, dtype=dtype, device=device, seed=seed)
    _make_tokenizer(directory, shape)


def make_model_without_weights(directory: Path, shape: Shape, *, dtype: torch.dtype) -> None:
    """Writes a model's configuration and tokenizer alone, for an engine that makes weights up."""
    config = shape.config
    config.dtype = dtype
    config.save_pretrained(directory)
    _make_tokenizer(directory, shape)


def _make_weights(
    directory: Path, shape: Shape, *, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    with device:
        model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # of a normalization
                weight.fill_(1)
            else:
                weight.normal_(0, 0.02, generator=generator)
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[END_ID] = 0
    model.save_pretrained(directory)


def is_made(directory: Path) -> bool:
    """Return whether a model was written there completely."""
    return (directory / "tokenizer_config.json").is_file()


def _make_tokenizer(directory: Path, shape: Shape) -> None:
    (directory / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "eos_token_id": END_ID, "pad_token_id": END_ID})
    )
    _tokenizer(shape.vocabulary).save_pretrained(directory)


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = {END: END_ID} | {f"w{i}": i for i in range(1, vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
