"""Tiny tokenizers of the kinds that models have, trained in a moment."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from cog_triton.text.tokenizer import Tokenizer as AnyTokenizer
from tests.late import transformers

TEXT = [
    "the cat and the other hen, then he: stop. stopping nonstop\n\nUser: the end.\nUsers: ends!\n",
    "她说你好。你好吗?\n one 12 123 (the) [he]\t#### <|im_end|> \n\n\n he's there...",
] * 30
_SPECIAL = ["<unk>", "<s>", "</s>"]
# In the manner of tiktoken's cl100k_base: no regular expression joins a line break to letters.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _wrapped(tokenizer: Tokenizer, **special: str) -> AnyTokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>", **special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _trained_bpe(tokenizer: Tokenizer, alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)


def byte_level() -> AnyTokenizer:
    """GPT-2's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _trained_bpe(tokenizer, pre_tokenizers.ByteLevel.alphabet())
    return _wrapped(tokenizer)


def tiktoken() -> AnyTokenizer:
    """Llama 3's and Qwen's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _trained_bpe(tokenizer, pre_tokenizers.ByteLevel.alphabet())
    return _wrapped(tokenizer)


def prepending() -> AnyTokenizer:
    """Llama 2's kind: its normalizer puts a space before a text."""
    tokenizer = Tokenizer(_byte_fallback_model())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = _sentencepiece_decoder()
    tokenizer.add_special_tokens(_SPECIAL)
    return _wrapped(tokenizer, unk_token="<unk>")


def metaspace(prepend_scheme: str) -> AnyTokenizer:
    """Llama 2's kind as newer conversions write it; with "never", Gemma's."""
    tokenizer = Tokenizer(_byte_fallback_model())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = _sentencepiece_decoder(strips=prepend_scheme != "never")
    tokenizer.add_special_tokens(_SPECIAL)
    return _wrapped(tokenizer, unk_token="<unk>")


def _byte_fallback_model() -> models.BPE:
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdefghijklmnopqrstuvwxyzUT0123456789.,!:?()[]#<>|_'你", "he", "▁t", "▁the"]
    tokens += ["▁a", "st", "op", "stop", "▁stop", "Us", "er", "User", "▁User", "##", "...", ".."]
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("▁", "a"), ("s", "t"), ("o", "p")]
    merges += [("st", "op"), ("▁", "stop"), ("U", "s"), ("e", "r"), ("Us", "er"), ("▁", "User")]
    merges += [("#", "#"), (".", "."), ("..", ".")]
    return models.BPE(
        {token: index for index, token in enumerate(tokens)},
        merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token="<unk>",
    )


def _sentencepiece_decoder(*, strips: bool = True) -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])


def unigram() -> AnyTokenizer:
    """T5's and ALBERT's kind."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
        ),
    )
    return _wrapped(tokenizer, unk_token="<unk>")


def word_piece() -> AnyTokenizer:
    """BERT's kind, which knows no white space."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    alphabet = [*"abcdefghijklmnopqrstuvwxyz0123456789"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=300,
        special_tokens=["[UNK]", *_SPECIAL],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrapped(tokenizer, unk_token="[UNK]")


def words(tokens: Sequence[str]) -> AnyTokenizer:
    """A tokenizer with these tokens, whose texts are joined as they are."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0]))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=tokens[0])


def sentencepiece(directory: Path, *, dummy_prefix: bool) -> AnyTokenizer:
    """A tokenizer.model, as Llama 2 and Gemma ship it, which transformers converts."""
    import sentencepiece as library

    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": dummy_prefix}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return transformers.AutoTokenizer.from_pretrained(directory)


KINDS: dict[str, Callable[[], AnyTokenizer]] = {
    "byte-level": byte_level,
    "tiktoken": tiktoken,
    "prepending": prepending,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "unigram": unigram,
    "word piece": word_piece,
}
