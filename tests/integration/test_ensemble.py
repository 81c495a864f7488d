"""The ensemble as a generic client of NVIDIA's sees it: curl's requests, and raw gRPC."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import np_to_triton_dtype

from cog_triton.protocol.frames import FrameAddress, decode_frames
from cog_triton.protocol.parameters import ids_text
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import Triton, engine_counters
from tests.support import limit, metrics, server_sent_events, wait_until
from tools.demo_model.corpus import PAIRS

QUESTION, ANSWER = PAIRS[0]
BLS = "tensorrt_llm_bls"
Events = Iterator[dict[str, Any]]
MULTI_BYTE = [pair for pair in PAIRS if not pair.answer.isascii()]


def generate(triton: Triton, model: str = "ensemble", /, **body: Any) -> dict[str, Any]:
    url = f"http://{triton.endpoints.http}/v2/models/{model}/generate"
    found: dict[str, Any] = httpx.post(url, json=body, trust_env=False, timeout=limit(60)).json()
    return found


def generate_stream(triton: Triton, model: str = "ensemble", /, **body: Any) -> Events:
    """The events as they come; closing it disconnects."""
    url = f"http://{triton.endpoints.http}/v2/models/{model}/generate_stream"
    asked = {"stream": True, **body}
    with httpx.stream("POST", url, json=asked, timeout=limit(60), trust_env=False) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream"), reply.read()
        for _, data in server_sent_events(reply):
            yield json.loads(data)


def texts(events: Events) -> list[str]:
    return [event["text_output"] for event in events]


def test_the_readmes_curl_request(triton: Triton, tokenizer: Tokenizer) -> None:
    reply = generate(triton, text_input=QUESTION, max_tokens=20, bad_words="", stop_words="")
    expected = tokenizer(ANSWER, add_special_tokens=False).input_ids[:20]
    assert reply["text_output"] == tokenizer.decode(expected)
    assert reply["model_name"] == "ensemble"
    assert reply["model_version"] == "1"
    assert reply["batch_index"] == reply["sequence_index"] == 0
    assert reply["cum_log_probs"] == 0.0
    assert reply["output_ids"] == expected
    assert reply["sequence_length"] == 20
    # As TensorRT-LLM's backend has it, zeros stand for what was not asked for.
    assert reply["output_log_probs"] == [0.0] * 20
    assert reply["context_logits"] == reply["generation_logits"] == 0.0


def test_log_probabilities_and_a_minimum_length_by_its_old_name(triton: Triton) -> None:
    body = {"max_tokens": 120, "min_length": 100, "return_log_probs": True}
    reply = generate(triton, text_input=QUESTION, **body)
    log_probs = reply["output_log_probs"]
    assert len(log_probs) == reply["sequence_length"] >= 100
    assert all(value <= 0 for value in log_probs)
    assert reply["cum_log_probs"] == pytest.approx(sum(log_probs), rel=1e-4)


def test_what_ends_an_output_or_does_not_occur(triton: Triton, tokenizer: Tokenizer) -> None:
    def ask(**body: Any) -> dict[str, Any]:
        words = {"bad_words": "", "stop_words": "", **body}
        return generate(triton, text_input=QUESTION, max_tokens=500, **words)

    ids = tokenizer(ANSWER, add_special_tokens=False).input_ids
    before_end = ids[: ids.index(ids[5])]
    ended = ask(pad_id=2, end_id=ids[5])
    assert ended["output_ids"] == before_end  # as TensorRT-LLM's backend has it, without the end
    assert ended["text_output"] == tokenizer.decode(before_end)
    stopped = ask(bad_words=["xyzzy"], stop_words=["patterns", "rules"])["text_output"]
    assert stopped == ANSWER[: ANSWER.index("patterns") + len("patterns")]
    bad_words: tuple[list[str] | str, ...] = (["building", "patterns"], "building")
    for bad in bad_words:
        assert "building" not in ask(bad_words=bad)["text_output"]


@pytest.mark.parametrize("model", ["ensemble", BLS])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_stop_words_are_found_in_the_text(triton: Triton, model: str, streams: bool) -> None:
    """Wherever tokens begin and end: every part of the answer stops it, as its first place has it."""
    for start, end in [(0, 1), (3, 6), (7, 22), (len(ANSWER) - 1, len(ANSWER))]:
        word = ANSWER[start:end]
        body = {"text_input": QUESTION, "max_tokens": 500, "stop_words": ["never", word]}
        if streams:
            text = "".join(texts(generate_stream(triton, model, **body)))
        else:
            text = generate(triton, model, **body)["text_output"]
        assert text == ANSWER[: ANSWER.index(word) + len(word)]


def test_parameters_may_be_nested(triton: Triton) -> None:
    """As the Phi-3 guide sends them."""
    parameters = {"max_tokens": 256, "bad_words": [""], "stop_words": [""]}
    assert generate(triton, text_input=QUESTION, parameters=parameters)["text_output"] == ANSWER


@pytest.mark.parametrize("model", ["ensemble", BLS])
@pytest.mark.parametrize("place", [0, 5], ids=["at once", "later"])
def test_a_requests_end_token_is_in_no_text(
    triton: Triton, tokenizer: Tokenizer, model: str, place: int
) -> None:
    ids = tokenizer(ANSWER, add_special_tokens=False).input_ids
    before_end = tokenizer.decode(ids[: ids.index(ids[place])])
    body = {"text_input": QUESTION, "max_tokens": 50, "end_id": ids[place]}
    assert generate(triton, model, **body)["text_output"] == before_end
    assert "".join(texts(generate_stream(triton, model, **body))) == before_end


def test_seeds_and_least_lengths_of_the_engines_model_by_their_old_names(
    triton: Triton, tokenizer: Tokenizer
) -> None:
    ids = tokenizer(QUESTION).input_ids
    prompt = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 40}
    sampled = {"temperature": 5.0, "runtime_top_k": 1000}

    def ask(**names: int) -> dict[str, Any]:
        return generate(triton, "tensorrt_llm", **prompt, **sampled, **names)

    by_new_names = ask(seed=7, min_tokens=40)
    assert by_new_names["sequence_length"] == 40
    assert ask(random_seed=7, min_length=40)["output_ids"] == by_new_names["output_ids"]
    assert ask(random_seed=8, min_length=40)["output_ids"] != by_new_names["output_ids"]
    for both in ({"seed": 7, "random_seed": 7}, {"min_tokens": 4, "min_length": 4}):
        assert "is the old name of" in ask(**both)["error"]


@pytest.mark.parametrize("model", ["ensemble", BLS])
def test_streamed_texts_join_to_the_answer(triton: Triton, model: str) -> None:
    for pair in (PAIRS[0], *MULTI_BYTE[:3]):
        body = {"text_input": pair.question, "max_tokens": 500}
        pieces = texts(generate_stream(triton, model, **body))
        assert "".join(pieces) == pair.answer
        assert len(pieces) > 1
    assert texts(generate_stream(triton, model, **body, stream=False)) == [pair.answer]


def test_sampling_follows_the_seed_under_its_new_and_its_old_name(triton: Triton) -> None:
    body = {"text_input": QUESTION, "max_tokens": 30, "temperature": 1000.0, "top_p": 1.0}
    answers = [
        generate(triton, **body, **seed)["text_output"]
        for seed in ({"seed": 5}, {"seed": 5}, {"random_seed": 5}, {"seed": 6}, {"seed": 0}, {})
    ]
    assert answers[0] == answers[1] == answers[2]
    assert answers[3] != answers[0]
    assert answers[4] == answers[5]  # TensorRT-LLM's default


def test_what_is_no_input_goes_as_a_parameter(triton: Triton, tokenizer: Tokenizer) -> None:
    """A prompt of token ids, a bias of logits by ids, and no special tokens."""
    ids = tokenizer(QUESTION).input_ids
    body = {"text_input": "", "max_tokens": 500, "prompt_ids": ids_text(ids)}
    assert generate(triton, **body)["text_output"] == ANSWER
    bias = json.dumps({ids[2]: 1000})
    biased = generate(triton, text_input=QUESTION, max_tokens=3, logit_bias=bias)
    assert biased["output_ids"] == [ids[2]] * 3
    counted = {"text_input": QUESTION, "max_tokens": 1, "return_num_input_tokens": True}
    assert generate(triton, **counted)["num_input_tokens"] == len(ids)
    counted["add_special_tokens"] = False
    assert generate(triton, **counted)["num_input_tokens"] == len(ids) - 1


def test_the_prompt_comes_back_when_asked_for(triton: Triton) -> None:
    reply = generate(triton, text_input=QUESTION, max_tokens=500, exclude_input_in_output=False)
    assert reply["text_output"].endswith(ANSWER)
    assert reply["text_output"].startswith(QUESTION)


def infer(
    address: str,
    inputs: Mapping[str, npt.NDArray[Any]],
    outputs: Sequence[str] = (),
    model: str = "ensemble",
    parameters: Mapping[str, Any] | None = None,
) -> list[dict[str, npt.NDArray[Any]]]:
    """A generic gRPC client: all responses, by output name."""
    tensors = [
        grpcclient.InferInput(
            name, value.shape, np_to_triton_dtype(value.dtype)
        ).set_data_from_numpy(value)
        for name, value in inputs.items()
    ]
    wanted = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
    given = {"model_name": model, "inputs": tensors, "outputs": wanted, "parameters": parameters}

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield given

    async def responses() -> list[dict[str, npt.NDArray[Any]]]:
        found = []
        async with grpcclient.InferenceServerClient(address) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None, error.message()
                response = result.get_response()
                found.append({o.name: result.as_numpy(o.name) for o in response.outputs})
                if response.parameters["triton_final_response"].bool_param:
                    break
        return found

    return asyncio.run(responses())


def rows(*prompts: str) -> dict[str, npt.NDArray[Any]]:
    """The inputs of a batch that streams."""
    return {
        "text_input": np.array([[prompt] for prompt in prompts], object),
        "max_tokens": np.full((len(prompts), 1), 500, np.int32),
        "stream": np.full((len(prompts), 1), True),
    }


def test_perf_metrics_are_in_every_response_of_a_stream(triton: Triton) -> None:
    """As with TensorRT-LLM's backend: its clients read them of each, and the last token's time is
    known at the end only."""
    body = {"text_input": QUESTION, "max_tokens": 20, "return_perf_metrics": True}
    before = time.monotonic_ns()
    responses = list(generate_stream(triton, **body))
    assert len(responses) > 1
    assert len({(r["arrival_time_ns"], r["first_token_time_ns"]) for r in responses}) == 1
    *others, last = [response["last_token_time_ns"] for response in responses]
    assert set(others) == {0}
    assert before < responses[0]["arrival_time_ns"] < responses[0]["first_token_time_ns"]
    assert responses[0]["first_token_time_ns"] <= last < time.monotonic_ns()
    assert all("acceptance_rate" in response for response in responses)


def test_postprocessing_passes_log_probabilities_and_logits_through(triton: Triton) -> None:
    """end_to_end_test.py of NVIDIA's v0.8 to v0.13 gives it all of them, and compares what comes back."""
    made = {
        "CUM_LOG_PROBS": np.array([[-1.5]], np.float32),
        "OUTPUT_LOG_PROBS": np.array([[[-0.5, -1.0]]], np.float32),
        "CONTEXT_LOGITS": np.zeros((1, 1, 1), np.float32),
        "GENERATION_LOGITS": np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3),
    }
    tokens = {
        "TOKENS_BATCH": np.array([[[70, 71]]], np.int32),
        "SEQUENCE_LENGTH": np.array([[2]], np.int32),
    }
    outputs = ["OUTPUT", *(f"OUT_{name}" for name in made)]
    (response,) = infer(triton.endpoints.grpc, tokens | made, outputs, "postprocessing")
    (alone,) = infer(triton.endpoints.grpc, tokens, ["OUTPUT"], "postprocessing")
    assert response["OUTPUT"] == alone["OUTPUT"]
    for name, value in made.items():
        assert np.array_equal(response[f"OUT_{name}"], value)


def test_a_long_prompt_keeps_nobody_waiting(paced_triton: Triton) -> None:
    """It is tokenized for seconds; the others' are answered meanwhile."""
    url = f"http://{paced_triton.endpoints.http}/v2/models/preprocessing/infer"
    length = {"name": "REQUEST_OUTPUT_LEN", "shape": [1, 1], "datatype": "INT32", "data": [5]}

    def ask(text: str) -> None:
        query = {"name": "QUERY", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
        reply = client.post(url, json={"inputs": [query, length]})
        assert reply.status_code == 200, reply.text

    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=limit(120), trust_env=False) as client:
        long = pool.submit(ask, "word " * 100_000)
        answered = 0
        while not long.done():
            ask("word")
            answered += 1
        long.result()
    assert answered > 5


def test_a_client_of_ids_gets_nothing_else(triton: Triton, tokenizer: Tokenizer) -> None:
    count = 'nv_inference_count{model="postprocessing",version="1"}'
    before = metrics(triton.endpoints.metrics)[count]
    address = FrameAddress(reader="0" * 32, sequence=7)
    body = {"text_input": QUESTION, "max_tokens": 500, "frames_for": address.parameter()}
    events = list(generate_stream(triton, "ensemble_ids", **body))
    frames = [frame for event in events for frame in decode_frames(event["frames"])]
    ids = [token for frame in frames for token in frame.ids]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ANSWER
    assert [frame.final for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert [frame.start for frame in frames] == [0, *(frame.end for frame in frames[:-1])]
    assert {frame.sequence for frame in frames} == {7}
    assert {frame.input_tokens for frame in frames} == {len(tokenizer(QUESTION).input_ids)}
    sent = {name for event in events for name in event}
    assert {name for name in sent if not name.startswith(("model_", "sequence_"))} == {"frames"}
    assert metrics(triton.endpoints.metrics)[count] == before  # there was no text to make


@pytest.mark.parametrize("model", ["ensemble", BLS])
def test_a_batch_of_prompts(triton: Triton, model: str) -> None:
    """The text's one dimension is the batch, as NVIDIA's clients read it."""
    pairs = PAIRS[:3]
    questions = [pair.question for pair in pairs]
    answers = ["", "", ""]
    for response in infer(triton.endpoints.grpc, rows(*questions), model=model):
        assert response["text_output"].shape == (1,)
        answers[response["batch_index"].item()] += response["text_output"][0].decode()
    assert answers == [pair.answer for pair in pairs]


def test_a_batch_with_one_prompt_too_long_is_refused_whole(triton: Triton) -> None:
    with pytest.raises(AssertionError, match="exceeds maximum input length"):
        infer(triton.endpoints.grpc, rows(QUESTION, "word " * 5000))
    wait_until(lambda: engine_counters(triton)["active"] == 0, 60, "the stop of the other prompt")
    assert generate(triton, text_input=QUESTION, max_tokens=500)["text_output"] == ANSWER
