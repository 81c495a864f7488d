"""The BLS model on a real Triton: text, streams, stops, and how it compares to the ensemble."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.deployment.template_variables import Values
from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import Triton, engine_counters, make_server, running, settings_for
from tests.integration.test_ensemble import BLS, MULTI_BYTE, generate, generate_stream, texts
from tests.support import limit, wait_until
from tools.demo_model.corpus import PAIRS

QUESTION, ANSWER = PAIRS[0]
ENSEMBLES_OWN = {"output_ids", "sequence_length", "sequence_id", "sequence_start", "sequence_end"}
# Until somebody stops it: some seconds of work.
ENDLESS: dict[str, Any] = {"text_input": QUESTION, "max_tokens": 1900, "min_tokens": 1900}


@pytest.fixture
def accumulating(demo_model: Path, tmp_path: Path) -> Iterator[TritonServer]:
    """With the whole text so far in every response, and no word on which response is the last one,
    as with TensorRT-LLM's C++ backend."""
    values: Values = {BLS: {"accumulate_tokens": True}}
    values |= {model: {"decoding_context": False} for model in ("ensemble", "tensorrt_llm")}
    with running(make_server(settings_for(demo_model), tmp_path, values)) as server:
        yield server


def stream(triton: Triton, **body: Any) -> Iterator[dict[str, Any]]:
    return generate_stream(triton, BLS, **body)


def cut_inside_a_character(tokenizer: Tokenizer) -> tuple[str, int, str]:
    """A question, how many tokens of the answer end inside a character, and their text."""
    for question, answer in MULTI_BYTE:
        ids = tokenizer(answer, add_special_tokens=False).input_ids
        for count in range(1, len(ids)):
            text = tokenizer.decode(ids[:count])
            if text.endswith("\ufffd"):
                return question, count, text
    raise AssertionError("the corpus has no character of several tokens")


# Text


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            {"max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2},
            id="empty words, pad and end",
        ),
        pytest.param(
            {"max_tokens": 60, "bad_words": ["building"], "stop_words": ["patterns", "rules"]},
            id="bad words and stop words",
        ),
        pytest.param(
            {"max_tokens": 10, "return_log_probs": True, "min_length": 3, "random_seed": 5},
            id="log probabilities, minimum, seed by its old name",
        ),
        pytest.param(
            {"max_tokens": 30, "temperature": 3.0, "top_p": 1.0, "seed": 5}, id="high temperature"
        ),
        pytest.param({"max_tokens": 500, "exclude_input_in_output": False}, id="with the prompt"),
        pytest.param(
            {"max_tokens": 7, "return_num_input_tokens": True, "return_num_output_tokens": True},
            id="numbers of tokens",
        ),
        pytest.param(
            {"parameters": {"max_tokens": 256, "bad_words": [""], "stop_words": [""]}},
            id="parameters of the request",
        ),
    ],
)
def test_a_reply_is_the_ensembles(triton: Triton, body: dict[str, Any]) -> None:
    expected = generate(triton, text_input=QUESTION, **body)
    expected = {name: value for name, value in expected.items() if name not in ENSEMBLES_OWN}
    assert generate(triton, BLS, text_input=QUESTION, **body) == {**expected, "model_name": BLS}


@pytest.mark.rare
def test_accumulated_texts_grow(accumulating: TritonServer, tokenizer: Tokenizer) -> None:
    for question, answer in (PAIRS[0], *MULTI_BYTE):
        found = texts(stream(accumulating, text_input=question, max_tokens=500))
        assert found[-1] == answer
        assert all(answer.startswith(text) for text in found)
        assert len(found) > 1
        reply = generate(accumulating, BLS, text_input=question, max_tokens=500)
        assert reply["text_output"] == answer
    question, count, text = cut_inside_a_character(tokenizer)
    assert texts(stream(accumulating, text_input=question, max_tokens=count))[-1] == text


# Ending early


@pytest.mark.parametrize("is_stopped", [True, False], ids=["a stop", "a disconnect"])
def test_what_ends_a_stream_ends_it_in_the_engine(triton: Triton, is_stopped: bool) -> None:
    engine = engine_counters(triton)
    stopped = engine["stopped"]
    with closing(stream(triton, id="to-stop", **ENDLESS)) as events:  # type: ignore[type-var]
        found = [next(events)["text_output"]]
        if is_stopped:
            stop = {"id": "to-stop", "stop": True, "input_ids": [0], "input_lengths": 1}
            url = f"http://{triton.endpoints.http}/v2/models/tensorrt_llm/generate_stream"
            reply = httpx.post(
                url, json={**stop, "request_output_len": 1}, trust_env=False, timeout=limit(60)
            )
            assert reply.status_code == 200
            found += texts(events)
            assert ANSWER.startswith("".join(found)[:20])
    wait_until(lambda: engine["stopped"] == stopped + 1, 60, "the stop")
    wait_until(lambda: engine["active"] == 0, 60, "an idle engine")


@pytest.mark.rare
def test_without_decoupling_requests_do_not_wait(demo_model: Path, tmp_path: Path) -> None:
    """As guides for a deployment without streaming fill the templates. Each takes seconds."""
    values: Values = {model: {"decoupled_mode": False} for model in (BLS, "tensorrt_llm")}
    values[BLS] |= {"bls_instance_count": 1, "accumulate_tokens": False}
    settings = settings_for(
        demo_model, ENGINE="simulated", SIMULATED_PREFILL_MS=str(1000 * limit(4))
    )
    body = {"text_input": QUESTION, "max_tokens": 5, "bad_words": "", "stop_words": "", "pad_id": 2}
    with running(make_server(settings, tmp_path, values)) as triton:
        (event,) = stream(triton, **body)
        assert "streaming needs decoupled_mode true in the tensorrt_llm_bls" in event["error"]
        expected = generate(triton, **body)["text_output"]
        engine = engine_counters(triton)
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(generate, triton, BLS, **body) for _ in range(8)]
            wait_until(lambda: engine["active"] == 8, 60, "eight at once")
            assert {answer.result()["text_output"] for answer in asked} == {expected} != {""}
