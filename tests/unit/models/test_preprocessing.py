from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cog_triton.engines.serving import words_from_list
from cog_triton.models.preprocessing import Preprocessor, variants, word_list
from cog_triton.request.limits import UNKNOWN_CHARACTERS
from cog_triton.text.tokenizer import load_tokenizer
from cog_triton.wire import ADD_SPECIAL_TOKENS, CONTINUED, LOGIT_BIAS, PROMPT_IDS, ids_text

Array = npt.NDArray[Any]

CONTRACT = json.loads(
    (Path(__file__).parents[2] / "contracts" / "inflight_batcher_llm.json").read_text()
)["models"]["preprocessing"]
DIMS = {tensor["name"]: tensor["dims"] for tensor in CONTRACT["outputs"]}
DTYPES = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64}


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return load_tokenizer(str(demo_model))


@pytest.fixture(scope="module")
def preprocessor(tokenizer: Any) -> Preprocessor:
    return Preprocessor(tokenizer)


def texts(*rows: Any) -> Array:
    """A text tensor: one row per prompt, of one text or a list of them."""
    values = [[row] if isinstance(row, str) else row for row in rows]
    return np.array([[value.encode() for value in row] for row in values], np.object_).reshape(
        len(rows), -1
    )


def inputs(*prompts: str, **values: Array) -> dict[str, Array]:
    length = np.full((len(prompts), 1), 20, np.int32)
    return {"QUERY": texts(*prompts), "REQUEST_OUTPUT_LEN": length, **values}


def word_ids(tokenizer: Any, *words: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokenizer(word, add_special_tokens=False).input_ids) for word in words)


# Prompts


def test_one_prompt(preprocessor: Preprocessor, tokenizer: Any) -> None:
    outputs = preprocessor(inputs("What is a token?"))
    ids = tokenizer("What is a token?").input_ids

    assert ids[0] == tokenizer.bos_token_id
    assert {name: array.tolist() for name, array in outputs.items()} == {
        "INPUT_ID": [ids],
        "REQUEST_INPUT_LEN": [[len(ids)]],
        "REQUEST_OUTPUT_LEN": [[20]],
        "OUT_PAD_ID": [[tokenizer.pad_token_id]],
        "OUT_END_ID": [[tokenizer.eos_token_id]],
        # As NVIDIA's sends it when there is no text for a decoder.
        "DECODER_INPUT_ID": [[tokenizer.pad_token_id]],
        "REQUEST_DECODER_INPUT_LEN": [[1]],
    }


def test_shapes_and_types_are_those_of_the_contract(preprocessor: Preprocessor) -> None:
    given = inputs(
        "one",
        "and a longer one",
        BAD_WORDS_DICT=texts(["a"], ["b"]),
        STOP_WORDS_DICT=texts(["a", "b"], ["stop here", ""]),
        EMBEDDING_BIAS_WORDS=texts(["a"], ["b"]),
        EMBEDDING_BIAS_WEIGHTS=np.array([[1.0], [2.0]], np.float32),
        DECODER_QUERY=texts("x", "y z"),
    )

    outputs = preprocessor(given)

    contract = {tensor["name"]: tensor for tensor in CONTRACT["outputs"]}
    assert {
        "BAD_WORDS_IDS",
        "STOP_WORDS_IDS",
        "EMBEDDING_BIAS",
        "DECODER_INPUT_ID",
    } <= outputs.keys()
    for name, array in outputs.items():
        assert array.dtype == DTYPES[contract[name]["dtype"]], name
        dims = contract[name]["dims"]
        assert array.shape[0] == 2, name
        assert array.ndim == 1 + len(dims), name
        assert all(dim in (-1, size) for dim, size in zip(dims, array.shape[1:], strict=True)), name


def test_what_was_delivered_follows_the_prompt(preprocessor: Preprocessor, tokenizer: Any) -> None:
    outputs = preprocessor(inputs("Hello"), {CONTINUED: ids_text([7, 8])})
    prompt = tokenizer("Hello").input_ids
    assert outputs["INPUT_ID"].tolist() == [[*prompt, 7, 8]]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[len(prompt) + 2]]


def test_prompts_are_padded(preprocessor: Preprocessor, tokenizer: Any) -> None:
    prompts = ["one", "and a longer one", "", "日本語 🚀"]
    rows = [tokenizer(prompt).input_ids for prompt in prompts]
    for values, pad_id in (
        ({}, tokenizer.pad_token_id),
        ({"PAD_ID": np.full((4, 1), 77, np.int32)}, 77),
    ):
        outputs = preprocessor(inputs(*prompts, **values))

        width = max(map(len, rows))
        assert outputs["INPUT_ID"].tolist() == [row + [pad_id] * (width - len(row)) for row in rows]
        assert outputs["REQUEST_INPUT_LEN"].tolist() == [[len(row)] for row in rows]
        assert outputs["OUT_PAD_ID"].tolist() == [[pad_id]] * 4


def test_special_tokens_can_be_left_out(tokenizer: Any) -> None:
    outputs = Preprocessor(tokenizer, {"add_special_tokens": "false"})(inputs("hello"))
    assert outputs["INPUT_ID"].tolist() == [tokenizer("hello", add_special_tokens=False).input_ids]
    assert tokenizer.bos_token_id not in outputs["INPUT_ID"]


def test_an_empty_prompt_without_special_tokens_has_no_ids(tokenizer: Any) -> None:
    outputs = Preprocessor(tokenizer, {"add_special_tokens": "false"})(inputs(""))
    assert outputs["INPUT_ID"].shape == (1, 0)
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[0]]


@pytest.mark.parametrize(
    ("eos", "pad", "end_id", "pad_id"), [(2, 0, 2, 0), (2, None, 2, 2), (None, None, -1, -1)]
)
def test_ids_that_the_tokenizer_does_not_name(
    eos: int | None, pad: int | None, end_id: int, pad_id: int
) -> None:
    class Tokenizer:
        eos_token_id, pad_token_id = eos, pad

        def __call__(self, *_: object, **__: object) -> Any:
            return SimpleNamespace(input_ids=[5])

    outputs = Preprocessor(Tokenizer())(inputs("x"))
    assert outputs["OUT_END_ID"].tolist() == [[end_id]]
    assert outputs["OUT_PAD_ID"].tolist() == [[pad_id]]


def test_a_request_may_give_its_end_id(preprocessor: Preprocessor) -> None:
    outputs = preprocessor(inputs("x", END_ID=np.array([[0]], np.int32)))
    assert outputs["OUT_END_ID"].tolist() == [[0]]


@pytest.mark.parametrize(
    "name", ["QUERY", "STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS", "DECODER_QUERY"]
)
def test_invalid_utf_8(preprocessor: Preprocessor, name: str) -> None:
    given = {**inputs("x"), name: np.array([[b"\xff\xfe"]], np.object_)}
    with pytest.raises(ValueError, match="a text input is not valid UTF-8"):
        preprocessor(given)


# What the parameters of a request ask for


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (PROMPT_IDS, "!", "prompt_ids must be 32-bit integers in base64"),
        (PROMPT_IDS, [1, 2], "prompt_ids must be 32-bit integers in base64"),
        (PROMPT_IDS, ids_text([-1]), "prompt_ids must be token ids, which are at least 0"),
        (ADD_SPECIAL_TOKENS, "no", "add_special_tokens must be among true and false"),
        (LOGIT_BIAS, "5", "logit_bias must be as a JSON object"),
        (LOGIT_BIAS, '{"a": 1}', "logit_bias must be as a JSON object"),
        (LOGIT_BIAS, '{"1": [2]}', "logit_bias must be as a JSON object"),
        (LOGIT_BIAS, '{"-1": 2}', "at least 0"),
        (LOGIT_BIAS, '{"1": NaN}', "finite"),
        (LOGIT_BIAS, '{"1": 1e300}', "finite"),
        (LOGIT_BIAS, json.dumps(dict.fromkeys(range(1025), 1)), "at most 1024"),
    ],
)
def test_parameters_that_are_refused(
    preprocessor: Preprocessor, name: str, value: Any, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        preprocessor(inputs("x"), {name: value})


def test_a_prompt_of_token_ids(preprocessor: Preprocessor) -> None:
    """The text is not read, and nothing is added to the ids."""
    outputs = preprocessor(
        inputs("not read"), {PROMPT_IDS: ids_text([7, 8, 9]), CONTINUED: ids_text([5])}
    )
    assert outputs["INPUT_ID"].tolist() == [[7, 8, 9, 5]]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[4]]


def test_too_many_token_ids(tokenizer: Any) -> None:
    preprocessor = Preprocessor(tokenizer, {"max_seq_len": "3"})
    preprocessor(inputs(""), {PROMPT_IDS: ids_text([1, 2, 3])})
    with pytest.raises(ValueError, match=r"\(4\) exceeds maximum input length \(3\)"):
        preprocessor(inputs(""), {PROMPT_IDS: ids_text([1, 2, 3, 4])})
    with pytest.raises(ValueError, match="does not support a batch"):
        preprocessor(inputs("a", "b"), {PROMPT_IDS: ids_text([1, 2, 3])})


@pytest.mark.parametrize("configured", ["true", "false"])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_a_request_says_whether_special_tokens_are_added(
    tokenizer: Any, configured: str, wanted: bool | None
) -> None:
    """A rendered chat template has them: with the tokenizer's there would be two."""
    preprocessor = Preprocessor(tokenizer, {"add_special_tokens": configured})
    parameters = {} if wanted is None else {ADD_SPECIAL_TOKENS: wanted}
    ids = preprocessor(inputs("<s><|user|>Hi<|end|>"), parameters)["INPUT_ID"][0].tolist()
    adds = configured == "true" if wanted is None else wanted
    assert ids.count(tokenizer.bos_token_id) == (2 if adds else 1)


# Names that changed over time


@pytest.mark.parametrize(
    ("new", "old", "out", "dtype"),
    [
        ("SEED", "RANDOM_SEED", "OUT_SEED", np.uint64),
        ("MIN_TOKENS", "MIN_LENGTH", "OUT_MIN_TOKENS", np.int32),
    ],
)
def test_old_names(preprocessor: Preprocessor, new: str, old: str, out: str, dtype: Any) -> None:
    one, other = np.array([[7]], dtype), np.array([[8]], dtype)
    assert out not in preprocessor(inputs("x"))
    assert preprocessor(inputs("x", **{new: one}))[out].tolist() == [[7]]
    assert preprocessor(inputs("x", **{old: other}))[out].tolist() == [[8]]
    both = preprocessor(inputs("x", **{old: one, new: one}))[out]
    assert both.tolist() == [[7]]
    assert both.dtype == dtype


def test_an_old_name_that_contradicts_the_new_one_is_refused(preprocessor: Preprocessor) -> None:
    given = {"SEED": np.array([[7]], np.uint64), "RANDOM_SEED": np.array([[8]], np.uint64)}
    with pytest.raises(ValueError, match="seed and random_seed are two names of one input"):
        preprocessor(inputs("x", **given))


def test_seed_0_is_a_seed(preprocessor: Preprocessor) -> None:
    given = inputs("x", SEED=np.array([[0]], np.uint64))
    assert preprocessor(given)["OUT_SEED"].tolist() == [[0]]


# Length


def test_a_prompt_of_too_many_characters_is_not_tokenized(tokenizer: Any) -> None:
    class Counting:
        """A tokenizer that says whether it was asked for ids."""

        calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            self.calls += 1
            return tokenizer(*args, **options)

    counting = Counting()
    limit = 10 * max(map(len, tokenizer.get_vocab()))
    preprocessor = Preprocessor(counting, {"max_seq_len": "10"})
    preprocessor(inputs("x" * limit))
    assert counting.calls == 1
    with pytest.raises(
        ValueError, match=rf"\({limit + 1} characters\) exceeds maximum input length"
    ):
        preprocessor(inputs("y", "x" * (limit + 1)))
    assert counting.calls == 1


# Words


def test_words_may_match_alone(tokenizer: Any) -> None:
    """As NVIDIA's preprocessing has it, which does not look behind spaces."""
    alone = Preprocessor(tokenizer, {"words_after_space": "false"})
    given = inputs("x", STOP_WORDS_DICT=texts(["rules", "", "two words"]))
    words = words_from_list(alone(given)["STOP_WORDS_IDS"][0])
    assert words == word_ids(tokenizer, "rules", "two words")


@pytest.mark.parametrize(
    ("source", "target"),
    [("STOP_WORDS_DICT", "STOP_WORDS_IDS"), ("BAD_WORDS_DICT", "BAD_WORDS_IDS")],
)
def test_words(preprocessor: Preprocessor, tokenizer: Any, source: str, target: str) -> None:
    for none in ("", [""], ["", ""]):
        assert target not in preprocessor(inputs("x", **{source: texts(none)}))

    outputs = preprocessor(inputs("x", **{source: texts("neural network")}))
    wanted = word_ids(tokenizer, "neural network", " neural network")
    assert wanted[0] != wanted[1]
    assert words_from_list(outputs[target][0]) == wanted

    outputs = preprocessor(inputs("x", **{source: texts(["end", "", "\nUser:"])}))
    wanted = word_ids(tokenizer, "end", " end", "\nUser:", " \nUser:")
    assert words_from_list(outputs[target][0]) == wanted


def test_words_as_a_row_without_a_batch_dimension_of_its_own(
    preprocessor: Preprocessor, tokenizer: Any
) -> None:
    flat = np.array([b"end"], np.object_)  # shape [batch]
    outputs = preprocessor(inputs("x", STOP_WORDS_DICT=flat))
    assert words_from_list(outputs["STOP_WORDS_IDS"][0]) == word_ids(tokenizer, "end", " end")


def test_each_prompt_has_its_words(preprocessor: Preprocessor, tokenizer: Any) -> None:
    given = texts(["end", "stop"], ["", ""], ["learning", ""])

    found = preprocessor(inputs("x", "y", "z", STOP_WORDS_DICT=given))["STOP_WORDS_IDS"]

    assert [words_from_list(one) for one in found] == [
        word_ids(tokenizer, "end", " end", "stop", " stop"),
        (),
        word_ids(tokenizer, "learning", " learning"),
    ]
    assert found[1, 1].tolist() == [-1] * found.shape[2]


def test_word_lists_are_tensorrt_llms() -> None:
    assert word_list([[5, 6], [7]]).tolist() == [[5, 6, 7], [2, 3, -1]]  # the contract's example
    assert word_list([[7], [5, 6, 8]]).tolist() == [[7, 5, 6, 8], [1, 4, -1, -1]]
    assert word_list([]).shape == (2, 0)
    assert word_list([[5]]).dtype == np.int32


def test_variants() -> None:
    assert variants(["a", "", " b"]) == ["a", " a", " b", "  b"]


# Embedding bias


def test_embedding_bias(preprocessor: Preprocessor, tokenizer: Any) -> None:
    outputs = preprocessor(
        inputs(
            "x",
            "y",
            EMBEDDING_BIAS_WORDS=texts(["a", "neural network"], ["b", ""]),
            EMBEDDING_BIAS_WEIGHTS=np.array([[1.5, -2.0], [4.0, 9.0]], np.float32),
        )
    )
    wanted = np.zeros((2, len(tokenizer)), np.float32)
    for row, (word, weight) in enumerate([("a", 1.5), ("b", 4.0)]):
        wanted[row, list(word_ids(tokenizer, word)[0])] += weight
    wanted[0, list(word_ids(tokenizer, "neural network")[0])] -= 2
    assert np.array_equal(outputs["EMBEDDING_BIAS"], wanted)
    assert outputs["EMBEDDING_BIAS"].dtype == np.float32


def test_logit_bias(preprocessor: Preprocessor, tokenizer: Any) -> None:
    biases = {LOGIT_BIAS: '{"5": 1.5, "7": -2.0}'}
    wanted = np.zeros((2, len(tokenizer)), np.float32)
    wanted[:, 5], wanted[:, 7] = 1.5, -2.0
    assert np.array_equal(preprocessor(inputs("x", "y"), biases)["EMBEDDING_BIAS"], wanted)
    # Beside words, both count.
    (word,) = word_ids(tokenizer, "a")
    words = {
        "EMBEDDING_BIAS_WORDS": texts("a"),
        "EMBEDDING_BIAS_WEIGHTS": np.array([[4.0]], np.float32),
    }
    both = preprocessor(inputs("x", **words), {LOGIT_BIAS: json.dumps({word[0]: 1.0})})
    assert both["EMBEDDING_BIAS"][0, word[0]] == 5.0


def test_logit_bias_of_a_token_that_the_model_has_not(
    preprocessor: Preprocessor, tokenizer: Any
) -> None:
    size = len(tokenizer)
    preprocessor(inputs("x"), {LOGIT_BIAS: json.dumps({size - 1: 1.0})})
    with pytest.raises(ValueError, match=f"must be between 0 and {size - 1}, not {size}"):
        preprocessor(inputs("x"), {LOGIT_BIAS: json.dumps({size: 1.0})})


def test_embedding_bias_without_a_word(preprocessor: Preprocessor) -> None:
    assert "EMBEDDING_BIAS" not in preprocessor(inputs("x", EMBEDDING_BIAS_WORDS=texts("")))


@pytest.mark.parametrize("weights", [None, [[1.0]], [[1.0, 2.0, 3.0]]])
def test_embedding_bias_needs_as_many_weights(
    preprocessor: Preprocessor, weights: list[list[float]] | None
) -> None:
    given = inputs("x", EMBEDDING_BIAS_WORDS=texts(["a", "b"]))
    if weights is not None:
        given["EMBEDDING_BIAS_WEIGHTS"] = np.array(weights, np.float32)
    with pytest.raises(ValueError, match="must be as many"):
        preprocessor(given)


def test_decoder_prompts(preprocessor: Preprocessor, tokenizer: Any) -> None:
    rows = [tokenizer(text).input_ids for text in ("x", "y and z")]
    outputs = preprocessor(inputs("a", "b", DECODER_QUERY=texts("x", "y and z")))
    missing = len(rows[1]) - len(rows[0])
    assert outputs["DECODER_INPUT_ID"].tolist() == [rows[0] + [0] * missing, rows[1]]
    assert outputs["REQUEST_DECODER_INPUT_LEN"].tolist() == [[len(row)] for row in rows]


# Sizes


@pytest.mark.parametrize("name", ["STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS"])
def test_lists_of_words_are_bounded(preprocessor: Preprocessor, name: str) -> None:
    with pytest.raises(ValueError, match="words of a list must be at most 1024, not 1025"):
        preprocessor(inputs("x", **{name: texts(["a"] * 1025)}))
    with pytest.raises(ValueError, match="must be at most 16384 bytes, not 16400"):
        preprocessor(inputs("x", **{name: texts(["a" * 200] * 82)}))


def test_a_decoders_text_is_no_longer_than_a_prompt(tokenizer: Any) -> None:
    preprocessor = Preprocessor(tokenizer, {"max_seq_len": "10"})
    with pytest.raises(ValueError, match="exceeds maximum input length"):
        preprocessor(inputs("x", DECODER_QUERY=texts("x" * 1000)))


def test_a_text_that_is_far_too_long_is_not_even_decoded(tokenizer: Any) -> None:
    preprocessor = Preprocessor(tokenizer)
    far = np.array([[b"\xff" * (4 * UNKNOWN_CHARACTERS + 4)]], np.object_)
    with pytest.raises(ValueError, match=f"bytes.*{UNKNOWN_CHARACTERS} characters are the most"):
        preprocessor({**inputs("x"), "QUERY": far})
