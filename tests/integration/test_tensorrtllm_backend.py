"""The tensorrt_llm model as TensorRT-LLM's backend runs it: requests, streams, ends, stops and errors.

By the stand-in in a real tritonserver; see tests/stand_in/README.md. Prompts are chosen so that their
echo is the case wanted.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cog_triton.client.grpc_transport import infer_request
from cog_triton.errors import InvalidParameter, PromptTooLong, TritonOverloaded, error_from_text
from cog_triton.models.preprocessing import word_list
from cog_triton.wire import stop_inputs
from tests.stand_in.servers import OUTPUTS, Loader, ids, running_loader, tensors
from tests.support import metrics, wait_until

PROMPT = [5, 6, 7, 8]
END = 9


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    with running_loader(tmp_path_factory.mktemp("backend")) as loader:
        yield loader


@pytest.fixture
def loaded(loader: Loader) -> Loader:
    """The model with the template's defaults."""
    loader.load()
    return loader


@pytest.fixture
def slow(loader: Loader) -> Loader:
    """Some requests of 2,000 tokens take until somebody stops them."""
    loader.load(stand_in_inter_token_ms="5", stats_check_period_ms="10")
    return loader


def one(value: Any, dtype: Any = np.int32) -> Any:
    return np.array([[value]], dtype)


def answer(loader: Loader, **inputs: Any) -> list[list[int]]:
    return ids(loader.stream(**{"prompt": PROMPT, "max_tokens": 3, **inputs}))


def refused(loader: Loader, **inputs: Any) -> str:
    """The text of the error that a request gets."""
    with pytest.raises(AssertionError) as caught:
        answer(loader, **inputs)
    return str(caught.value)


# What is made


def test_a_response_for_each_token_and_the_flag_on_the_last(loaded: Loader) -> None:
    assert answer(loaded) == [[5], [6], [7]]


def test_the_seed_says_where_the_prompts_ids_begin(loaded: Loader) -> None:
    seed = one(3, np.uint64)
    assert answer(loaded, seed=seed) == answer(loaded, seed=seed) == [[8], [5], [6]]


@pytest.mark.parametrize(
    ("final", "at_length", "at_end_id"),
    [
        ("as_it_comes", [[5], [6]], [[5], [6], []]),
        ("alone", [[5], [6], []], [[5], [6], []]),
        ("on_last_token", [[5], [6]], [[5], [6]]),
    ],
)
def test_how_a_stream_ends(
    loader: Loader, final: str, at_length: list[list[int]], at_end_id: list[list[int]]
) -> None:
    loader.load(stand_in_final=final)
    assert answer(loader, max_tokens=2) == at_length
    assert answer(loader, prompt=[5, 6, END], max_tokens=9, end_id=one(END)) == at_end_id


def test_the_end_id_waits_for_min_tokens(loaded: Loader) -> None:
    words = answer(loaded, prompt=[5, END], max_tokens=9, end_id=one(END), min_tokens=one(3))
    assert words == [[5], [5], [5], []]


def test_an_end_id_of_minus_one_is_none(loaded: Loader) -> None:
    assert answer(loaded, prompt=[5, END], end_id=one(-1)) == [[5], [9], [5]]


def test_stop_words_end_the_output_and_stay_in_it(loaded: Loader) -> None:
    stops = word_list([[7, 8], [6, 7]])[None]
    assert answer(loaded, max_tokens=9, stop_words_list=stops) == [[5], [6], [7]]


def test_bad_words_are_left_out(loaded: Loader) -> None:
    bad = word_list([[6, 7], [5]])[None]
    assert answer(loaded, max_tokens=4, bad_words_list=bad) == [[6], [8], [6], [8]]


@pytest.mark.parametrize("exclude", [True, False, None])
@pytest.mark.parametrize("default", ["true", "false"])
def test_the_whole_answer_at_once(loader: Loader, default: str, exclude: bool | None) -> None:
    loader.load(exclude_input_in_output=default)
    given = {} if exclude is None else {"exclude_input_in_output": one(exclude, np.bool_)}
    excluded = default == "true" if exclude is None else exclude
    prompt = [] if excluded else PROMPT
    assert answer(loader, streaming=False, **given) == [[*prompt, 5, 6, 7]]


def test_a_stream_never_has_the_prompt(loaded: Loader) -> None:
    assert answer(loaded, exclude_input_in_output=one(False, np.bool_)) == [[5], [6], [7]]


def test_each_response_has_all_tokens_so_far_with_several_beams(loader: Loader) -> None:
    loader.load(max_beam_width="2")
    inputs = {"prompt": [5, 6, END], "max_tokens": 9, "end_id": one(END), "beam_width": one(2)}
    *_, last = responses = list(loader.stream(**inputs))
    assert [response["sequence_length"].tolist() for response in responses] == [
        [[1, 1]],
        [[2, 1]],
        [[2, 1]],
    ]
    assert last["output_ids"].tolist() == [[[5, 6], [6, -1]]]


def test_static_batching_streams_nothing(loader: Loader) -> None:
    loader.load(batching_strategy="V1", exclude_input_in_output="false")
    assert answer(loader) == [[5, 6, 7]]


def test_a_batch_of_two_prompts(loaded: Loader) -> None:
    inputs = {
        "input_ids": np.array([[5, 6, 0], [7, 8, 9]], np.int32),
        "input_lengths": np.array([[2], [3]], np.int32),
        "request_output_len": np.array([[2], [3]], np.int32),
        "streaming": np.array([[False], [False]]),
    }
    outputs = (*OUTPUTS, "batch_index")
    found = {
        int(response["batch_index"].item()): response["output_ids"].tolist()
        for response in loaded.send(inputs, outputs=outputs)
    }
    assert found == {0: [[[5, 6]]], 1: [[[7, 8, 9]]]}


def test_a_request_is_shortened_to_the_engines_length(loader: Loader) -> None:
    loader.load(engine_dir=loader.engine(max_seq_len=10))
    assert len(answer(loader, max_tokens=100)) == 6


# Outputs


@pytest.mark.parametrize("missing", OUTPUTS)
def test_ids_and_lengths_must_both_be_asked_for(loaded: Loader, missing: str) -> None:
    outputs = tuple(output for output in OUTPUTS if output != missing)
    with pytest.raises(AssertionError, match=f"{missing} tensor must be present in list of output"):
        list(loaded.send(tensors(PROMPT, 3), outputs=outputs))


def test_other_outputs_are_made_on_request_alone(loaded: Loader) -> None:
    optional = ("num_input_tokens", "num_output_tokens", "cum_log_probs", "output_log_probs")
    inputs = tensors(PROMPT, 2, streaming=False)
    (plain,) = loaded.send(inputs, outputs=(*OUTPUTS, *optional))
    assert set(plain) == set(OUTPUTS)
    flags = ("return_num_input_tokens", "return_num_output_tokens", "return_log_probs")
    inputs |= {flag: one(True, np.bool_) for flag in flags}
    (unnamed,) = loaded.send(inputs)
    assert set(unnamed) == set(OUTPUTS)
    (full,) = loaded.send(inputs, outputs=(*OUTPUTS, *optional))
    assert {name: full[name].tolist() for name in optional} == {
        "num_input_tokens": [[4]],
        "num_output_tokens": [[2]],
        "cum_log_probs": [[-2.0]],
        "output_log_probs": [[[-1.0, -1.0]]],
    }


def test_performance_metrics_come_whether_named_or_not(loaded: Loader) -> None:
    inputs = {**tensors(PROMPT, 2, streaming=False), "return_perf_metrics": one(True, np.bool_)}
    (response,) = loaded.send(inputs)
    times = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")
    first, *others = [int(response[name].item()) for name in (*times, "last_token_time_ns")]
    assert 0 < first <= others[0] <= others[1] <= others[2]
    assert response["kv_cache_alloc_total_blocks"].item() == 1


# Stops


class Stream(threading.Thread):
    """A request that runs beside the test."""

    def __init__(self, loader: Loader, request_id: str, max_tokens: int = 2000) -> None:
        super().__init__(daemon=True)
        self._responses = loader.stream(prompt=PROMPT, max_tokens=max_tokens, request_id=request_id)
        self.ids: list[list[int]] = []
        self.error = ""
        self.start()

    def run(self) -> None:
        try:
            for response in self._responses:
                self.ids += ids(iter([response]))
        except AssertionError as error:
            self.error = str(error)


def stop(loader: Loader, request_id: str) -> list[Any]:
    """Sends a stop; returns its responses without their tensors."""
    with grpc.insecure_channel(loader.server.endpoints.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = infer_request(loader.model, request_id, stop_inputs(), ())
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        return list(stub.ModelStreamInfer(iter([request]), timeout=60))


def test_a_stop_ends_the_requests_of_its_id_with_an_empty_last_response(slow: Loader) -> None:
    first, second = Stream(slow, "first"), Stream(slow, "second", 50)
    wait_until(lambda: first.ids and second.ids, 20, "the streams")
    (reply,) = stop(slow, "first")
    assert not reply.error_message
    assert not reply.infer_response.outputs
    assert reply.infer_response.parameters["triton_final_response"].bool_param
    first.join(20)
    assert first.ids[-1] == []
    second.join(20)
    assert len(second.ids) == 50
    wait_until(lambda: slow.count("cancelled") == 1, 10, "the count")


def test_a_stop_of_nothing_is_no_error_and_one_without_an_id_is(loaded: Loader) -> None:
    (unknown,) = stop(loaded, "no such")
    assert not unknown.error_message
    (nameless,) = stop(loaded, "")
    assert nameless.error_message == "Trying to stop a request but request ID is not provided"


def test_a_stop_is_seen_before_any_other_input(loaded: Loader) -> None:
    """The lengths contradict each other, and there is no prompt."""
    inputs = {name: stop_inputs()[name] for name in ("stop", "input_lengths", "request_output_len")}
    assert list(loaded.send(inputs, request_id="no such")) in ([], [{}])


def test_a_client_that_goes_away_frees_its_sequence(slow: Loader) -> None:
    def used() -> float:
        return slow.metric("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "used")

    responses = slow.stream(prompt=PROMPT, max_tokens=2000)
    next(responses)
    wait_until(lambda: used() > 0, 10, "the use of a block")
    responses.close()  # type: ignore[attr-defined]
    wait_until(lambda: used() == 0, 10, "the blocks' release")
    assert slow.count("finished") == 0


# Refusals


def test_a_prompt_that_is_too_long(loader: Loader) -> None:
    loader.load(engine_dir=loader.engine(max_seq_len=4))
    text = refused(loader)
    assert "Prompt length (4) exceeds maximum input length (3)" in text
    assert re.match(r"Executor failed process requestId \d+ due to the following error: ", text)
    assert isinstance(error_from_text(text), PromptTooLong)


@pytest.mark.parametrize(
    ("build", "chunked", "longest"),
    [
        ({"max_seq_len": 20, "max_num_tokens": 9}, "false", 9),
        ({"max_seq_len": 20, "max_num_tokens": 9}, "true", 19),
        ({"max_seq_len": 20, "max_input_len": 7, "plugin_config": {"context_fmha": False}}, "", 7),
    ],
)
def test_how_long_a_prompt_may_be(
    loader: Loader, build: dict[str, Any], chunked: str, longest: int
) -> None:
    loader.load(engine_dir=loader.engine(**build), enable_chunked_context=chunked or None)
    assert answer(loader, prompt=[5] * longest, max_tokens=1) == [[5]]
    assert f"maximum input length ({longest})" in refused(loader, prompt=[5] * (longest + 1))


def test_a_stream_that_might_be_evicted(loader: Loader) -> None:
    loader.load(
        engine_dir=loader.engine(max_seq_len=20, max_num_tokens=8),
        batch_scheduler_policy="max_utilization",
    )
    assert len(answer(loader, max_tokens=5)) == 5
    text = refused(loader, max_tokens=6)
    assert "Request sequence length is potentially greater than max input length" in text
    error = error_from_text(text)
    assert isinstance(error, PromptTooLong)
    assert error.code == "E1002"
    assert len(answer(loader, max_tokens=6, streaming=False)) == 1


def test_an_end_id_that_is_no_token(loaded: Loader) -> None:
    for end_id in (-2, 1024):
        text = refused(loaded, end_id=one(end_id))
        assert f"EndId ({end_id}) is not within acceptable range [-1, 1024)." in text
        assert isinstance(error_from_text(text), InvalidParameter)


def test_a_full_queue(loader: Loader) -> None:
    loader.load(
        engine_dir=loader.engine(max_batch_size=1),
        max_queue_size="2",
        stand_in_inter_token_ms="5",
        stats_check_period_ms="10",
    )

    def requests(kind: str) -> float:
        return loader.metric("nv_trt_llm_request_metrics", "request_type", kind)

    running = [Stream(loader, "running")]
    wait_until(lambda: requests("active") == 1, 10, "the start")
    running += [Stream(loader, name, 1) for name in ("second", "third")]
    wait_until(lambda: requests("waiting") == 2, 10, "the queue")
    text = refused(loader)
    assert text == "Maximum queue size of 2 has been reached, please try again later"
    error = error_from_text(text)
    assert isinstance(error, TritonOverloaded)
    assert error.code == "E2106"
    stop(loader, "running")
    for request in running:
        request.join(20)
    assert [request.ids[-1] for request in running] == [[], [5], [5]]


def test_a_queue_without_limit(loader: Loader) -> None:
    loader.load(engine_dir=loader.engine(max_batch_size=1), max_queue_size="0")
    requests = [Stream(loader, str(number), 20) for number in range(16)]
    for request in requests:
        request.join(20)
    assert [len(request.ids) for request in requests] == [20] * 16


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"prompt": []}, "!mInputTokenIds.empty()"),
        ({"max_tokens": 0}, "mMaxNewTokens > 0"),
        ({"temperature": one(-1, np.float32)}, "temperature.value() >= 0.f"),
        ({"runtime_top_p": one(1.5, np.float32)}, "topP.value() <= 1.f"),
        ({"runtime_top_k": one(-1)}, "topK.value() >= 0"),
        ({"repetition_penalty": one(0, np.float32)}, "repetitionpenalty.value() > 0.f"),
        ({"min_tokens": one(-1)}, "minTokens.value() >= 0"),
        ({"beam_width": one(0)}, "beamWidth > 0"),
        ({"return_context_logits": one(True, np.bool_)}, "gather_context_logits"),
        ({"stop_words_list": np.array([[[5], [2]]], np.int32)}, "out-of-bound offsets"),
    ],
)
def test_values_that_are_refused(loaded: Loader, inputs: dict[str, Any], text: str) -> None:
    assert text in refused(loaded, **inputs)


@pytest.mark.parametrize("top_p", [0.0, -1.0])
def test_a_top_p_of_nothing_is_none(loaded: Loader, top_p: float) -> None:
    assert answer(loaded, runtime_top_p=one(top_p, np.float32)) == [[5], [6], [7]]


def test_inputs_that_have_no_effect_are_let_through(loaded: Loader) -> None:
    inputs = {
        "len_penalty": one(2, np.float32),
        "num_return_sequences": one(2),
        "presence_penalty": one(1, np.float32),
    }
    assert answer(loaded, **inputs) == [[5], [6], [7]]


# Not decoupled


def infer(loader: Loader, **inputs: Any) -> service_pb2.ModelInferResponse:
    with grpc.insecure_channel(loader.server.endpoints.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return stub.ModelInfer(
            infer_request(loader.model, "", tensors(**inputs), OUTPUTS), timeout=60
        )


def test_normal_mode_gives_one_response_and_refuses_to_stream(loader: Loader) -> None:
    loader.load(decoupled_mode="false")
    reply = infer(loader, prompt=PROMPT, max_tokens=3, streaming=False)
    assert np.frombuffer(reply.raw_output_contents[0], np.int32).tolist() == [5, 6, 7]
    with pytest.raises(grpc.RpcError) as caught:
        infer(loader, prompt=PROMPT, max_tokens=3, streaming=True)
    assert "Streaming is only supported if model is deployed using decoupled mode." in str(
        caught.value
    )


# Metrics


def test_tritons_statistics_and_the_backends_metrics(loaded: Loader) -> None:
    answer(loaded)
    refused(loaded, end_id=one(-2))
    wait_until(lambda: loaded.count("failed") == 1, 10, "the count")
    success = f'nv_inference_request_success{{model="{loaded.model}",version="1"}}'
    assert metrics(loaded.server.endpoints.metrics)[success] == 1
    assert loaded.metric("nv_trt_llm_request_metrics", "request_type", "max") == 64


def test_the_generate_endpoint(loaded: Loader) -> None:
    url = f"http://{loaded.server.endpoints.http}/v2/models/{loaded.model}/generate"
    body = {"input_ids": PROMPT, "input_lengths": 4, "request_output_len": 3}
    reply = httpx.post(url, json=body, timeout=30, trust_env=False).json()
    assert reply["output_ids"] == [5, 6, 7]
    assert reply["sequence_length"] == 3
