"""Models that continuous batching cannot run: generate()'s ids, one request at a time."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cog_triton.engines.base import EngineError, SamplingParams
from cog_triton.errors import EngineFailure
from tests.engines import RANDOM, Requests, Stream, ids_of_generate, running
from tests.late import transformers, transformers_loading, transformers_sequential
from tests.support import wait_until
from tests.tiny_models import ENCODER_DECODERS, save_tiny_model, tiny_config

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[*range(5, 15)], [*range(3, 61)], [*range(3, 203)], [7], [*range(9, 40)]]


@pytest.fixture(
    scope="module",
    params=[
        "falcon",
        "qwen3_5_text",
        "t5",
        *(
            pytest.param(name, marks=pytest.mark.rare)
            for name in ("deepseek_v3", "stablelm", "nemotron", "llama4_text")
        ),
    ],
)
def engine_and_reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Requests, Any]]:
    model: Path = save_tiny_model(request.param, tmp_path_factory.mktemp("model"))
    loader: Any = transformers.AutoModelForCausalLM
    if request.param in ENCODER_DECODERS:
        loader = transformers.AutoModelForSeq2SeqLM
    parameters = {"engine": "transformers", "model": str(model), "device": "cpu"}
    with running(parameters) as requests:
        yield requests, loader.from_pretrained(model)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("t5", "has an encoder"),
        ("qwen3_5_text", "keeps a recurrent state (like Mamba and linear attention)"),
        ("deepseek_v3", "compresses keys and values (multi-head latent attention)"),
        ("llama4_text", "has chunked attention layers"),
        ("lfm2", "has convolution layers"),
        ("nemotron", "has a custom attention"),
        ("falcon", "has a custom attention"),
        ("llama", None),
    ],
)
def test_the_reason_is_in_the_models_configuration(architecture: str, reason: str | None) -> None:
    config = tiny_config(architecture)
    kind = transformers_loading.model_class(config)
    assert transformers_loading.batching_problem(config, kind) == reason


def test_the_ids_are_those_of_generate_for_all_that_wait(
    engine_and_reference: tuple[Requests, Any],
) -> None:
    engine, model = engine_and_reference
    assert isinstance(engine.engine, transformers_sequential.SequentialEngine)
    streams = [
        engine.start(prompt, max_tokens=12, sampling=GREEDY, return_log_probs=True)
        for prompt in PROMPTS
    ]
    expected = [ids_of_generate(model, prompt, tokens=12) for prompt in PROMPTS]
    assert [stream.wait().ids for stream in streams] == expected
    assert all(len(stream.log_probs) == 12 for stream in streams)
    assert not engine.engine.running


def test_sampling_ends_and_the_continuation_of_an_answer(
    engine_and_reference: tuple[Requests, Any],
) -> None:
    engine, _ = engine_and_reference
    whole = engine.ids(PROMPTS[0], max_tokens=10, sampling=RANDOM)
    assert engine.ids(PROMPTS[0], max_tokens=10, sampling=RANDOM) == whole
    end = whole[4]
    until = whole.index(end) + 1
    assert engine.ids(PROMPTS[0], max_tokens=10, sampling=RANDOM, end_id=end) == whole[:until]
    rest = engine.ids(PROMPTS[0] + whole[:6], max_tokens=4, sampling=RANDOM, continued=6)
    assert rest == whole[6:]


@pytest.fixture(scope="module")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Requests]:
    model: Path = save_tiny_model("falcon", tmp_path_factory.mktemp("falcon"))
    with running({"engine": "transformers", "model": str(model), "device": "cpu"}) as requests:
        yield requests


def test_an_aborted_request_ends_and_lets_the_next_run(falcon: Requests) -> None:
    begun = threading.Event()
    stream = Stream(on_step=lambda _: begun.set())
    falcon.start(PROMPTS[0], stream, key="long", max_tokens=400, sampling=GREEDY)
    waiting = falcon.start(PROMPTS[1], key="waiting", max_tokens=400, sampling=GREEDY)
    assert begun.wait(60)
    falcon.engine.abort("waiting")
    falcon.engine.abort("long")
    assert len(falcon.ids(PROMPTS[3], max_tokens=3, sampling=GREEDY)) == 3
    assert not stream.finished
    assert waiting.ids == []


def test_what_it_cannot_do_is_an_error_of_the_request(
    falcon: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match="lora_task_id with FalconForCausalLM"):
        falcon.start(lora_task_id=1)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    assert isinstance(falcon.engine, transformers_sequential.SequentialEngine)
    monkeypatch.setattr(falcon.engine._model, "generate", fail)
    error = falcon.start().last().error
    assert isinstance(error, EngineFailure)
    assert str(error) == "the model failed: RuntimeError: out of memory"
    monkeypatch.undo()
    assert len(falcon.ids(max_tokens=3)) == 3


@pytest.mark.parametrize("error", [KeyError("no such layer"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("sink", ["well", "broken"])
def test_a_request_whose_model_raises_ends_and_lets_the_next_run(
    falcon: Requests, error: BaseException, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_take(_: Stream) -> None:
        raise OSError("the client is gone")

    stream = Stream(fail_to_take) if sink == "broken" else Stream()
    with monkeypatch.context() as patch:
        patch.setattr(falcon.engine._model, "generate", Mock(side_effect=error))  # type: ignore[attr-defined]
        falcon.start(stream=stream)
        if sink == "well":
            assert isinstance(stream.last().error, EngineFailure)
        else:
            wait_until(lambda: bool(stream.all), 60, "the error was not delivered")
    assert len(falcon.ids()) == 8


def test_a_request_that_the_model_ends_too_early_is_an_error(
    falcon: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(falcon.engine._model, "generate", Mock())  # type: ignore[attr-defined]
        error = falcon.start().last().error
    assert "ended the sequence before its last token" in str(error)
