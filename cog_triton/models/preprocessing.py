"""The preprocessing model's work: prompts and words in, token ids out. Shapes have the batch first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.request.limits import UNKNOWN_TOKENS, WORDS, WORDS_BYTES
from cog_triton.text.tokenizer import Tokenizer, text_limits
from cog_triton.wire import (
    ADD_SPECIAL_TOKENS,
    CONTINUED,
    LOGIT_BIAS,
    PROMPT_IDS,
    ids_parameter,
    parse_biases,
)

Array = npt.NDArray[Any]

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Asked:
    """The parameters of a request for preprocessing; see ``cog_triton.wire``.

    Attributes:
        continued: ids of the output that an earlier attempt at it has delivered, which the engine is to go
            on from: they follow the prompt's.
        add_special_tokens: None leaves it to the model's configuration.
    """

    prompt_ids: Sequence[int] = ()
    continued: Sequence[int] = ()
    add_special_tokens: bool | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


def asked(parameters: str) -> Asked:
    """Parse a request's parameters: a JSON object as the Python backend has it, or nothing.

    Raises:
        ValueError: one of them is not what it should be.
    """
    values = json.loads(parameters or "{}")
    adds = values.get(ADD_SPECIAL_TOKENS)
    if not (adds is None or isinstance(adds, bool)):
        raise ValueError(f"{ADD_SPECIAL_TOKENS} must be among true and false")
    return Asked(
        prompt_ids=ids_parameter(values, PROMPT_IDS),
        continued=ids_parameter(values, CONTINUED),
        add_special_tokens=adds,
        logit_bias=_biases(values.get(LOGIT_BIAS, "{}")),
    )


NOTHING = Asked()


class Preprocessor:
    """Turns the preprocessing model's inputs into its outputs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        add_special_tokens: bool = True,
        words_after_space: bool = True,
        context_length: int | None = None,
    ) -> None:
        """Read the end and padding ids from the tokenizer.

        Args:
            add_special_tokens: whether the tokenizer adds those that begin a text.
            words_after_space: whether bad words and stop words also match after a space.
            context_length: most tokens of a prompt, for which longer texts are not even tokenized; None if
                it is not known.
        """
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._forms = variants if words_after_space else nonempty
        self._context_length = context_length
        self._limits = text_limits(tokenizer, context_length)
        end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        self._end_id = -1 if end_id is None else end_id
        self._pad_id = self._end_id if pad_id is None else pad_id

    def __call__(self, inputs: Mapping[str, Array], asked: Asked = NOTHING) -> dict[str, Array]:
        """The outputs for one request.

        Args:
            asked: what its parameters ask for, of each prompt of the batch.

        Raises:
            ValueError: an input is not valid; the text is for the client.
        """
        prompts = [[*prompt, *asked.continued] for prompt in self._prompts(inputs["QUERY"], asked)]
        batch = len(prompts)
        pad_id = _default(inputs, "PAD_ID", self._pad_id, batch)
        end_id = _default(inputs, "END_ID", self._end_id, batch)
        outputs = {
            "INPUT_ID": _padded(prompts, int(pad_id.flat[0])),
            "REQUEST_INPUT_LEN": np.array([[len(ids)] for ids in prompts], np.int32),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"].reshape(batch, -1),
            "OUT_PAD_ID": pad_id,
            "OUT_END_ID": end_id,
        }
        for source, target in (
            ("BAD_WORDS_DICT", "BAD_WORDS_IDS"),
            ("STOP_WORDS_DICT", "STOP_WORDS_IDS"),
        ):
            if source in inputs and (words := self._word_lists(inputs[source])) is not None:
                outputs[target] = words
        bias = self._embedding_bias(inputs, asked.logit_bias, batch)
        if bias is not None:
            outputs["EMBEDDING_BIAS"] = bias
        # NVIDIA's preprocessing sends a decoder's beginning to every engine: without a text, the pad id.
        decoder = [[int(pad_id.flat[0])]] * batch
        if "DECODER_QUERY" in inputs:
            texts = self._texts(inputs["DECODER_QUERY"])
            decoder = [self._encode(text, asked.add_special_tokens) for text in texts]
        outputs["DECODER_INPUT_ID"] = _padded(decoder, int(pad_id.flat[0]))
        outputs["REQUEST_DECODER_INPUT_LEN"] = np.array([[len(d)] for d in decoder], np.int32)
        _rename(inputs, outputs, "SEED", "RANDOM_SEED", "OUT_SEED")
        _rename(inputs, outputs, "MIN_TOKENS", "MIN_LENGTH", "OUT_MIN_TOKENS")
        return outputs

    def _prompts(self, queries: Array, asked: Asked) -> list[list[int]]:
        """The ids of each prompt: those of its text, or those that came instead."""
        if not asked.prompt_ids:
            return [self._encode(text, asked.add_special_tokens) for text in self._texts(queries)]
        if len(queries) > 1:
            raise ValueError(f"{PROMPT_IDS} does not support a batch of prompts")
        most = self._context_length or UNKNOWN_TOKENS
        if len(asked.prompt_ids) > most:
            # TensorRT-LLM's wording, which clients know.
            raise ValueError(
                f"Prompt length ({len(asked.prompt_ids)}) exceeds maximum input length ({most})."
            )
        return [list(asked.prompt_ids)]

    def _texts(self, queries: Array) -> list[str]:
        """The texts, none of which is too long to be tokenized."""
        for query in queries.flat:
            # A character has at most four bytes, and what has too many is not even decoded.
            self._check_length(len(query), "bytes", 4 * self._limits.characters)
        texts = [_text(query) for query in queries.flat]
        for text in texts:
            self._check_length(len(text), "characters", self._limits.characters)
        return texts

    def _check_length(self, length: int, unit: str, limit: int) -> None:
        if length > limit:
            # TensorRT-LLM's wording, which clients know.
            raise ValueError(
                f"Prompt length ({length} {unit}) exceeds maximum input length "
                f"({self._limits.characters} characters are the most{self._limits.source})."
            )

    def _encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        adds = self._add_special_tokens if add_special_tokens is None else add_special_tokens
        ids: list[int] = self._tokenizer(text, add_special_tokens=adds).input_ids
        return ids

    def _word_lists(self, words: Array) -> Array | None:
        """TensorRT-LLM's word lists, shape [batch, 2, N], or None when there is no word."""
        _check_words(words)
        rows = [[_text(word) for word in np.atleast_1d(row)] for row in words]
        lists = [
            word_list(list(filter(None, map(self._word_ids, self._forms(row))))) for row in rows
        ]
        width = max(words.shape[1] for words in lists)
        if width == 0:
            return None
        return np.stack([_widened(words, width) for words in lists])

    def _word_ids(self, word: str) -> list[int]:
        ids: list[int] = self._tokenizer(word, add_special_tokens=False).input_ids
        return ids

    def _embedding_bias(
        self, inputs: Mapping[str, Array], logit_bias: Mapping[int, float], batch: int
    ) -> Array | None:
        """Return the bias of the logits, shape [batch, vocabulary]; None for none."""
        words = self._biased_words(inputs)
        if not words and not logit_bias:
            return None
        bias = np.zeros((batch, len(self._tokenizer)), np.float32)
        for row, word, value in words:
            bias[row, self._word_ids(word)] += value
        if logit_bias and max(logit_bias) >= bias.shape[1]:
            last = bias.shape[1] - 1
            raise ValueError(
                f"the token ids of {LOGIT_BIAS} must be between 0 and {last}, not {max(logit_bias)}"
            )
        bias[:, list(logit_bias)] += np.array(list(logit_bias.values()), np.float32)
        return bias

    def _biased_words(self, inputs: Mapping[str, Array]) -> list[tuple[int, str, float]]:
        """The prompt's place, the word and its weight, of each word."""
        words, weights = inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None:
            return []
        words = words.reshape(words.shape[0], -1)
        _check_words(words)
        texts = [[_text(word) for word in row] for row in words]
        if not any(map(any, texts)):
            return []
        if weights is None or weights.size != words.size:
            raise ValueError("embedding_bias_words and embedding_bias_weights must be as many")
        rows = zip(texts, weights.reshape(words.shape), strict=True)
        return [
            (place, word, weight)
            for place, (names, values) in enumerate(rows)
            for word, weight in zip(names, values, strict=True)
        ]


def _biases(text: Any) -> dict[int, float]:
    """The parameter ``LOGIT_BIAS``: at most so many finite numbers."""
    biases = parse_biases(text)
    if len(biases) > WORDS:
        raise ValueError(f"{LOGIT_BIAS} must be at most {WORDS}, not {len(biases)}")
    if not all(token >= 0 and abs(bias) <= _MAX_FLOAT32 for token, bias in biases.items()):
        raise ValueError(f"{LOGIT_BIAS} must be of ids that are at least 0, and finite numbers")
    return biases


def variants(words: Sequence[str]) -> list[str]:
    """Each word as it stands and after a space: in most vocabularies those are different tokens."""
    return [form for word in words if word for form in (word, f" {word}")]


def nonempty(words: Sequence[str]) -> list[str]:
    """The words without empty ones, as NVIDIA's preprocessing takes them."""
    return [word for word in words if word]


def word_list(words: Sequence[Sequence[int]]) -> Array:
    """A TensorRT-LLM word list, shape [2, N]: the flat ids, and the end offsets padded with -1."""
    flat = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words], dtype=np.int32)
    offsets = np.full(len(flat), -1, np.int32)
    offsets[: len(ends)] = ends
    return np.array([flat, offsets], np.int32).reshape(2, -1)


def _check_words(words: Array) -> None:
    """Refuse lists that would take long to tokenize, before any is decoded."""
    if words.size > WORDS * words.shape[0]:
        raise ValueError(f"the words of a list must be at most {WORDS}, not {words[0].size}")
    size = sum(map(len, words.flat))
    if size > WORDS_BYTES:
        raise ValueError(f"the words of a list must be at most {WORDS_BYTES} bytes, not {size}")


def _widened(words: Array, width: int) -> Array:
    missing = width - words.shape[1]
    return np.stack(
        [np.pad(words[0], (0, missing)), np.pad(words[1], (0, missing), constant_values=-1)]
    )


def _text(value: Any) -> str:
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError("a text input is not valid UTF-8") from None


def _default(inputs: Mapping[str, Array], name: str, value: int, batch: int) -> Array:
    return inputs[name] if name in inputs else np.full((batch, 1), value, np.int32)


def _padded(rows: Sequence[Sequence[int]], pad_id: int) -> Array:
    width = max(map(len, rows))
    padded = np.full((len(rows), width), pad_id, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def _rename(
    inputs: Mapping[str, Array], outputs: dict[str, Array], new: str, old: str, out: str
) -> None:
    given = [inputs[name] for name in (new, old) if name in inputs]
    if len(given) == 2 and not np.array_equal(given[0], given[1]):
        raise ValueError(
            f"{new.lower()} and {old.lower()} are two names of one input and must be the same"
        )
    if given:
        outputs[out] = given[0]
