"""The preprocessing model: prompts and words to token ids. Shapes have the batch first."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from cog_triton.errors import InvalidParameter
from cog_triton.models import stub
from cog_triton.models.stops import StopListener
from cog_triton.models.stub import Array, Client, Inputs, Tensors
from cog_triton.protocol.names import (
    ADD_SPECIAL_TOKENS,
    CONTINUED,
    LOGIT_BIAS,
    NO_PARAMETERS,
    PREPROCESSING,
    PROMPT_IDS,
    Parameters,
)
from cog_triton.protocol.parameters import ids_parameter, parse_logit_bias
from cog_triton.request.limits import UNKNOWN_TOKENS, WORD_IDS
from cog_triton.text.end_tokens import end_ids
from cog_triton.text.tokenizer import Tokenizer, text_limits, vocabulary_size
from cog_triton.text.words import Ids, WordTokenizer

# The length of a text that is tokenized in about ten milliseconds. Longer texts have their own thread.
LONG_BYTES = 20_000
# Each word is looked for in the whole vocabulary, for up to 20 ms. Requests with more have another thread.
FEW_WORDS = 8
_WORDS_INPUTS = ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")


class Preprocessor:
    """Turns the preprocessing model's inputs into its outputs."""

    def __init__(self, tokenizer: Tokenizer, configured: Parameters = NO_PARAMETERS) -> None:
        self._tokenizer = tokenizer
        self._adds_special_tokens = configured.get("add_special_tokens", "true") == "true"
        after_space = configured.get("words_after_space", "true") == "true"
        self._words = WordTokenizer(tokenizer, after_space=after_space)
        # Otherwise words match the ids that NVIDIA's models make, and not the text.
        self._passes_texts = after_space
        self._vocab_size = int(configured.get("vocab_size", 0))
        self._directory = str(configured.get("tokenizer_dir", ""))
        context_length = int(configured.get("max_seq_len", 0)) or None
        self._longest = context_length or UNKNOWN_TOKENS
        self._limits = text_limits(tokenizer, context_length)
        # Set if outputs must be limited here, because TensorRT-LLM's C++ backend does not know the limit.
        self._ends_at = context_length if configured.get("ends_at_max_seq_len") == "true" else None
        # The first one is the default of end_id; all backends understand the others as stop words.
        ends = model_end_ids(tokenizer, configured)
        self._end_id = ends[0] if ends else -1
        self._other_end_ids = ends[1:]
        pad_id = tokenizer.pad_token_id
        self._pad_id = self._end_id if pad_id is None else pad_id

    def __call__(self, inputs: Inputs, parameters: Parameters = NO_PARAMETERS) -> Tensors:
        """Return the outputs for one request, or raise InvalidParameter."""
        adds = parameters.get(ADD_SPECIAL_TOKENS, self._adds_special_tokens)
        if not isinstance(adds, bool):
            raise InvalidParameter(f"{ADD_SPECIAL_TOKENS} must be true or false")
        continued = ids_parameter(parameters, CONTINUED)
        prompts = [[*ids, *continued] for ids in self._prompts(inputs["QUERY"], parameters, adds)]
        batch = len(prompts)
        pad_ids = inputs.get("PAD_ID", np.full((batch, 1), self._pad_id, np.int32))
        pad_id = int(pad_ids.flat[0])
        # As NVIDIA's preprocessing, for every engine: without a text for the decoder, the pad id.
        decoder = [[pad_id]] * batch
        if "DECODER_QUERY" in inputs:
            decoder = [self._ids(text, adds) for text in self._texts(inputs["DECODER_QUERY"])]
        outputs = {
            "INPUT_ID": _padded(prompts, pad_id),
            "REQUEST_INPUT_LEN": np.array([[len(ids)] for ids in prompts], np.int32),
            "REQUEST_OUTPUT_LEN": self._output_lengths(inputs, prompts),
            "OUT_PAD_ID": pad_ids,
            "OUT_END_ID": inputs.get("END_ID", np.full((batch, 1), self._end_id, np.int32)),
            "DECODER_INPUT_ID": _padded(decoder, pad_id),
            "REQUEST_DECODER_INPUT_LEN": np.array([[len(ids)] for ids in decoder], np.int32),
        }
        optional = {
            "BAD_WORDS_IDS": _lists(
                _ids_of_words(inputs.get("BAD_WORDS_DICT"), batch, self._words.bad_spellings)
            ),
            "STOP_WORDS_IDS": self._stop_words(inputs, batch),
            "STOP_WORDS_TEXT": self._stop_words_text(inputs),
            "OUT_OTHER_END_IDS": self._end_ids_among_stop_words(inputs, batch),
            "EMBEDDING_BIAS": self._embedding_bias(inputs, parameters),
            "OUT_SEED": _either(inputs, "SEED", "RANDOM_SEED"),
            "OUT_MIN_TOKENS": _either(inputs, "MIN_TOKENS", "MIN_LENGTH"),
        }
        return outputs | {name: value for name, value in optional.items() if value is not None}

    @cached_property
    def _vocabulary_size(self) -> int:
        """The number of the model's logits: models pad the tokenizer's vocabulary."""
        return self._vocab_size or vocabulary_size(self._directory) or len(self._tokenizer)

    def _prompts(self, queries: Array, parameters: Parameters, adds: bool) -> list[list[int]]:
        """Return the ids of each prompt: of its text, or those that the request has instead."""
        prompt_ids = ids_parameter(parameters, PROMPT_IDS)
        if not prompt_ids:
            return [self._ids(text, adds) for text in self._texts(queries)]
        if len(queries) > 1:
            raise InvalidParameter(f"{PROMPT_IDS} does not support a batch of prompts")
        length = len(prompt_ids)
        if length > self._longest:
            # TensorRT-LLM's wording, which clients know; as below.
            raise InvalidParameter(
                f"Prompt length ({length}) exceeds maximum input length ({self._longest})."
            )
        return [prompt_ids]

    def _output_lengths(self, inputs: Inputs, prompts: Sequence[Sequence[int]]) -> Array:
        """Return the maximum number of tokens of each output, reduced to what the context has room for."""
        lengths = inputs["REQUEST_OUTPUT_LEN"].reshape(len(prompts), -1)
        if self._ends_at is None:
            return lengths
        rooms = np.array([[self._ends_at - len(prompt)] for prompt in prompts], lengths.dtype)
        if rooms.min() < 1:
            longest = max(map(len, prompts))
            raise InvalidParameter(
                f"Prompt length ({longest}) exceeds maximum input length ({self._ends_at - 1})."
            )
        return np.minimum(lengths, rooms)

    def _texts(self, queries: Array) -> list[str]:
        """Return the texts of an input, each within the limit of characters."""
        limit = self._limits.characters
        texts = []
        for query in queries.flat:
            # A character has at most four bytes. A text of more is not even decoded.
            if len(query) > 4 * limit:
                raise self._too_long(f"{len(query)} bytes")
            text = stub.text(query)
            if len(text) > limit:
                raise self._too_long(f"{len(text)} characters")
            texts.append(text)
        return texts

    def _too_long(self, length: str) -> InvalidParameter:
        limit = f"{self._limits.characters} characters{self._limits.source}"
        return InvalidParameter(f"Prompt length ({length}) exceeds maximum input length ({limit}).")

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        return ids

    def _stop_words(self, inputs: Inputs, batch: int) -> Array | None:
        """Return the lists of stop words and, unless a request has an end_id, of the other end tokens."""
        words = inputs.get("STOP_WORDS_DICT")
        others = [[token] for token in self._others(inputs)]
        room = WORD_IDS - len(others)
        rows = _ids_of_words(words, batch, self._words.stop_spellings, room)
        return _lists([[*others, *row] for row in rows])

    def _others(self, inputs: Inputs) -> tuple[int, ...]:
        """Return the end tokens beside the one in OUT_END_ID."""
        return () if "END_ID" in inputs else self._other_end_ids

    def _end_ids_among_stop_words(self, inputs: Inputs, batch: int) -> Array | None:
        """Return the other end tokens for BLS, which leaves them out of outputs; None without one."""
        others = self._others(inputs)
        return np.array([others] * batch, np.int32) if others else None

    def _stop_words_text(self, inputs: Inputs) -> Array | None:
        """Return the stop words for an engine that finds them in the text; None without one."""
        words = inputs.get("STOP_WORDS_DICT")
        if words is None or not self._passes_texts or not any(words.flat):
            return None
        return words.reshape(len(words), -1)

    def _embedding_bias(self, inputs: Inputs, parameters: Parameters) -> Array | None:
        """Return the bias of the logits, shape [batch, vocabulary]; None for none."""
        batch = len(inputs["QUERY"])
        logit_bias = dict(parse_logit_bias(parameters.get(LOGIT_BIAS)))
        if logit_bias:
            # Imported here, because it brings Pydantic, and this model is the last one to be ready.
            from cog_triton.request.request import check_sampling

            check_sampling({"logit_bias": tuple(logit_bias.items())})
        words = stub.words(inputs.get("EMBEDDING_BIAS_WORDS", np.empty((batch, 0), np.object_)))
        weights = inputs.get("EMBEDDING_BIAS_WEIGHTS", np.empty(0))
        has_words = any(map(any, words))
        if not has_words and not logit_bias:
            return None
        bias = np.zeros((batch, self._vocabulary_size), np.float32)
        if has_words:
            self._add_words(bias, words, weights)
        self._add_ids(bias, logit_bias)
        return bias

    def _add_words(self, bias: Array, words: Sequence[Sequence[str]], weights: Array) -> None:
        """Add the weight of each word to the bias of its tokens, in the word's row of the batch."""
        if weights.size != sum(map(len, words)):
            raise InvalidParameter(
                "embedding_bias_words and embedding_bias_weights must be the same length"
            )
        for row, names, values in zip(bias, words, weights.reshape(len(bias), -1), strict=True):
            tokens_of_words = self._words.tokens_of(names)
            for tokens, value in zip(tokens_of_words, values, strict=True):
                row[[token for token in tokens if token < self._vocabulary_size]] += value

    def _add_ids(self, bias: Array, logit_bias: Mapping[int, float]) -> None:
        """Add the bias of token ids, in all rows of the batch."""
        highest = max(logit_bias, default=0)
        if highest >= self._vocabulary_size:
            raise InvalidParameter(
                f"the token ids of {LOGIT_BIAS} must be between 0 and "
                f"{self._vocabulary_size - 1}, not {highest}"
            )
        bias[:, list(logit_bias)] += np.array(list(logit_bias.values()), np.float32)


def _ids_of_words(
    words: Array | None,
    batch: int,
    spellings: Callable[[Sequence[str]], list[list[Ids]]],
    room: int = WORD_IDS,
) -> list[list[Ids]]:
    """Return the spellings of each row's words, of at most ``room`` ids in all."""
    if words is None:
        return [[] for _ in range(batch)]
    return [_within_limit(spellings(row), room) for row in stub.words(words)]


def _lists(rows: Sequence[Sequence[Sequence[int]]]) -> Array | None:
    """Return TensorRT-LLM's word lists, shape [batch, 2, N]; None without a word."""
    lists = word_lists(rows)
    return lists if lists.size else None


def _within_limit(spellings: Sequence[Sequence[Ids]], room: int) -> list[Ids]:
    """Return as many spellings of all words as an engine takes in one list, in turn of each word."""
    kept: list[Ids] = []
    size = 0
    for of_each_word in zip_longest(*spellings, fillvalue=()):
        for ids in of_each_word:
            size += len(ids)
            if size > room:
                return kept
            if ids:
                kept.append(ids)
    return kept


def model_end_ids(tokenizer: Tokenizer, parameters: Parameters) -> tuple[int, ...]:
    """Return the end tokens by the configuration, or else by the files beside the tokenizer's."""
    configured = [int(number) for number in str(parameters.get("end_ids", "")).split(",") if number]
    directory = Path(str(parameters.get("tokenizer_dir", "")))
    directories = [] if configured or not directory.name else [directory]
    vocabulary = vocabulary_size(str(directory)) if directories else None
    return end_ids(configured, directories, tokenizer.eos_token_id, vocabulary)


def word_lists(batch: Sequence[Sequence[Sequence[int]]]) -> Array:
    """Return TensorRT-LLM word lists, shape [batch, 2, N]: flat ids, and end offsets padded with -1."""
    ids = _padded([[*chain.from_iterable(words)] for words in batch], 0)
    ends = _padded([[*accumulate(map(len, words))] for words in batch], -1, ids.shape[1])
    return np.stack([ids, ends], axis=1)


def _padded(rows: Sequence[Sequence[int]], pad_id: int, width: int = 0) -> Array:
    padded = np.full((len(rows), max(width, *map(len, rows))), pad_id, np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def _either(inputs: Inputs, new: str, old: str) -> Array | None:
    """Return an input that may have its new or its old name; None without either."""
    if new not in inputs or old not in inputs:
        return inputs.get(new, inputs.get(old))
    if not np.array_equal(inputs[new], inputs[old]):
        raise InvalidParameter(
            f"{new.lower()} and {old.lower()} are two names of one input and must be the same"
        )
    return inputs[new]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        _, parameters = stub.begin(args)
        self._preprocessor = Preprocessor(stub.tokenizer(parameters), parameters)
        # Tokenizers release Python's lock meanwhile, and the search for words lends it every 5 ms.
        self._long_prompts = SlowRequests("long-prompts", self._response)
        self._many_words = SlowRequests("many-words", self._response)
        self._stops = StopListener(PREPROCESSING, args, self._stop)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return the responses of a batch in one message; None for one that is answered later."""
        responses: list[Any] = []
        for request in requests:
            with stub.ends_after_standstill():
                inputs = stub.arrays(request.inputs())
                slow = self._slow_requests_for(inputs)
                if slow is None:
                    responses.append(self._response(request, inputs))
                else:
                    slow.add(request, inputs)
                    responses.append(None)
        return responses

    def finalize(self) -> None:
        self._stops.close()
        self._long_prompts.close()
        self._many_words.close()
        stub.forget_requests()

    def _stop(self, request_id: str) -> None:
        self._long_prompts.stop(request_id)
        self._many_words.stop(request_id)

    def _slow_requests_for(self, inputs: Inputs) -> "SlowRequests | None":
        """Return where a request that takes long is answered; None for one that does not."""
        if sum(inputs[name].size for name in _WORDS_INPUTS if name in inputs) > FEW_WORDS:
            return self._many_words
        texts = [array.flat for array in inputs.values() if array.dtype == object]
        if sum(map(len, chain.from_iterable(texts))) > LONG_BYTES:
            return self._long_prompts
        return None

    def _response(self, request: Any, inputs: Inputs) -> Any:
        """Return the response to a request, or its error: unanswered, it would wait permanently."""
        try:
            outputs = self._preprocessor(inputs, stub.request_parameters(request))
            return stub.response(outputs, request.requested_output_names())
        except Exception as error:
            return stub.failure(PREPROCESSING, error)


@dataclass(eq=False)
class _SlowRequest:
    """A request that waits for its thread, or that the thread works on."""

    request: Any
    inputs: dict[str, Array]
    client: Client
    request_id: str
    is_stopped: bool = False


class SlowRequests:
    """Answers requests that take long, one after another, on a thread of its own.

    A request whose client has left costs nothing more: it is dropped before the thread begins it, and a
    response that has been made already does not go on to the engine.
    """

    def __init__(self, name: str, respond: Callable[[Any, Inputs], Any]) -> None:
        self._respond = respond
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        # Added and removed by two threads, each in one operation.
        self._waiting: set[_SlowRequest] = set()

    def add(self, request: Any, inputs: dict[str, Array]) -> None:
        client = Client(request)
        try:
            slow = _SlowRequest(request, inputs, client, stub.request_id(request))
        except Exception as error:
            client.fail(PREPROCESSING, error)
            return
        self._waiting.add(slow)
        self._thread.submit(self._answer, slow)

    def stop(self, request_id: str) -> None:
        """Drop the requests with an id, of which clients other than this package's may send several."""
        for slow in self._waiting.copy():
            if slow.request_id == request_id:
                slow.is_stopped = True

    def close(self) -> None:
        self._thread.shutdown()

    def _answer(self, slow: _SlowRequest) -> None:
        """Answer one request, on the thread, unless its client has left."""
        client = slow.client
        try:
            response = None
            # Asking Triton is a round trip, which is nothing beside the work.
            if not slow.is_stopped and not client.gone():
                response = self._respond(slow.request, slow.inputs)
            if response is None or slow.is_stopped:
                client.fail(PREPROCESSING, InvalidParameter("the request was cancelled"))
            else:
                client.send(response, last=True)
        except Exception as error:
            # Nothing reads what a pool's thread raises.
            client.fail(PREPROCESSING, error)
        finally:
            self._waiting.discard(slow)
