"""A model of a well-known shape with random weights, made in seconds on the machine that measures it.

How fast a model runs depends on its shape, not on what it knows. Each token is one word of the
tokenizer, so a prompt of n words has n tokens, and every token can be shown as soon as it is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_ID = 0
END = "<end>"
SHARD_BYTES = 2 << 30
WRITERS = 4
CONTEXT_LENGTH = 8192

Shard = dict[str, torch.Tensor]


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


def text_of(ids: list[int]) -> str:
    """The text that the tokenizer turns into these ids."""
    return " ".join(f"w{token_id}" for token_id in ids)


def make_model(
    directory: Path, shape: Shape, *, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Writes a model and its tokenizer into a directory. The same arguments give the same model.

    Greedy decoding never ends early: the end token's logit is 0, and some other's is always greater.

    Args:
        device: where the random numbers are made; 8 B of them take a minute on a CPU.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = shape.config
    config.dtype = dtype
    config.save_pretrained(directory)
    _tokenizer(shape.vocabulary).save_pretrained(directory)
    (directory / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "eos_token_id": END_ID, "pad_token_id": END_ID})
    )
    generator = torch.Generator(device).manual_seed(seed)
    _write_weights(directory, _shards(parameters(config), dtype, generator))


def parameters(config: LlamaConfig) -> dict[str, torch.Size]:
    """Names and shapes of the weights that a checkpoint of this model has."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: w.shape for name, w in model.state_dict().items() if name not in tied}


def _shards(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Shard]:
    shard: Shard = {}
    for name, shape in shapes.items():
        shard[name] = _weight(name, shape, dtype, generator)
        if sum(weight.nbytes for weight in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _weight(
    name: str, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    weight = torch.empty(shape, dtype=dtype, device=generator.device)
    if len(shape) == 1:  # of a normalization
        return weight.fill_(1)
    weight.normal_(0, 0.02, generator=generator)
    if name.startswith(("lm_head", "model.embed_tokens")):
        weight[END_ID] = 0
    return weight


def _write_weights(directory: Path, shards: Iterator[Shard]) -> None:
    from safetensors.torch import save_file

    files: dict[str, str] = {}
    with ThreadPoolExecutor(WRITERS) as pool:
        writes = []
        for number, shard in enumerate(shards):
            file = f"model-{number:05}.safetensors"
            files |= dict.fromkeys(shard, file)
            writes.append(pool.submit(save_file, shard, directory / file, {"format": "pt"}))
        for write in writes:
            write.result()
    index = json.dumps({"metadata": {}, "weight_map": files})
    (directory / "model.safetensors.index.json").write_text(index)


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = {END: END_ID} | {f"w{i}": i for i in range(1, vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
