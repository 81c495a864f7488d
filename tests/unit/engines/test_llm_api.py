"""The engine on TensorRT-LLM's LLM API, with the fake in tests/fakes, and the fake by its contract."""

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from cog_triton.engines.base import EngineError, SamplingParams, Step, create_engine
from cog_triton.engines.library_arguments import ARGUMENTS
from cog_triton.engines.llm_api import context_length, is_forgetful
from cog_triton.errors import error_from_text
from tests.engines import Requests, request
from tests.support import ROOT
from tests.unit.engines.test_library import LLM_API_REQUESTS

CONTRACT: dict[str, Any] = json.loads(
    (ROOT / "tests/contracts/tensorrt_llm_llm_api.json").read_text()
)
# Arguments outside of the contract that the tests here need, as read in TensorRT-LLM's repository.
READ = {"build_config", "sampler_type"}
HONOURS_ALL = "1.3.0rc26"
TRTLLM_SAMPLER = {"sampler_type": "TRTLLMSampler"}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.5}

Make = Callable[..., Requests]


@pytest.fixture
def fake(fake_tensorrt_llm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake, whose version a test may set."""
    monkeypatch.setattr(fake_tensorrt_llm, "__version__", fake_tensorrt_llm.__version__)
    return fake_tensorrt_llm


@pytest.fixture
def make(fake: Any, tmp_path: Path) -> Iterator[Make]:  # noqa: ARG001
    """Makes engines, with a file of arguments if one is given."""
    engines = []

    def make(file: dict[str, Any] | None = None, **parameters: str) -> Requests:
        given = {"engine": "llmapi", "model": "any", "max_seq_len": "100000", **parameters}
        if file is not None:
            (tmp_path / "llm.yaml").write_text(json.dumps(file))
            given["llm_api_config"] = str(tmp_path / "llm.yaml")
        engines.append(create_engine(given))
        return Requests(engines[-1])

    yield make
    for engine in engines:
        engine.close()


def llm(requests: Requests) -> Any:
    return requests.engine._llm  # type: ignore[attr-defined]


# The fake


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_the_fake_takes_no_more_than_the_contract_promises(fake: Any) -> None:
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    arguments = llmapi.llm_args.TorchLlmArgs.model_fields
    assert arguments.keys() <= {*CONTRACT["LLM"]["committed_arguments"], *READ}
    for name, default in CONTRACT["LLM"]["defaults"].items():
        assert arguments[name].default == default
    assert sorted(llmapi.KvCacheConfig.model_fields) == sorted(CONTRACT["KvCacheConfig"])
    assert {field.name for field in fields(fake.SamplingParams)} <= {*CONTRACT["SamplingParams"]}
    wanted = CONTRACT["LLM"]["generate_async"]["arguments"]
    assert list(inspect.signature(fake.LLM.generate_async).parameters) == ["self", *wanted]
    assert public(fake.LLM) <= {"generate_async", *CONTRACT["LLM"]["not_committed"]}


def test_the_fakes_outputs_are_those_of_the_contract(fake: Any) -> None:
    async def generate() -> Any:
        llm = fake.LLM(model="any", skip_tokenizer_init=True)
        with pytest.raises(ValueError, match="end_id"):
            llm.generate_async([1], fake.SamplingParams(), streaming=True)
        params = fake.SamplingParams(end_id=-1, max_tokens=3, logprobs=1)
        output = llm.generate_async([1, 2], params, streaming=True)
        updates = [update.outputs[0] async for update in output]
        llm.shutdown()
        return output, updates

    output, updates = asyncio.run(generate())
    assert public(output) - {"abort"} <= set(CONTRACT["RequestOutput"])
    assert public(updates[0]) <= set(CONTRACT["CompletionOutput"]["fields"])
    assert updates[-1].finish_reason in CONTRACT["CompletionOutput"]["finish_reason"]
    assert [len(update.token_ids_diff) for update in updates] == [1, 1, 1]


# The LLM's arguments; what holds for all libraries is in test_library.py


def test_no_argument_is_outside_of_the_contract() -> None:
    arguments = {row.llmapi.partition(".")[::2] for row in ARGUMENTS.values() if row.llmapi}
    sections = {section for section, argument in arguments if argument}
    assert sections == {"kv_cache_config", "lora_config", "scheduler_config"}
    names = {argument for section, argument in arguments if section == "kv_cache_config"}
    assert names == set(CONTRACT["KvCacheConfig"])
    plain = {section for section, argument in arguments if not argument}
    assert plain <= set(CONTRACT["LLM"]["committed_arguments"])
    for case in LLM_API_REQUESTS:
        _, sampling_arguments = case.values
        assert isinstance(sampling_arguments, dict)
        assert sampling_arguments.keys() <= {*CONTRACT["SamplingParams"]}


# Its file


def test_the_files_arguments_reach_the_llm(make: Make) -> None:
    requests = make({"max_seq_len": 50, "stream_interval": 3, "lora_config": {"max_lora_rank": 32}})
    assert requests.engine.context_length == 50
    assert [len(step.ids) for step in requests.start().wait().all] == [3, 3, 2]
    assert llm(requests)._args.lora_config.max_lora_rank == 32


@pytest.mark.parametrize("version", ["1.1.0", "1.2.1", "1.3.0rc24"])
def test_the_library_converts_the_files_sections(version: str, fake: Any, make: Make) -> None:
    fake.__version__ = version
    eagle = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "/eagle"}
    build, cache = {"max_beam_width": 2}, {"max_tokens": 4096}
    file = {"speculative_config": eagle, "build_config": build, "kv_cache_config": cache}
    args = llm(make(file, enable_kv_cache_reuse="false"))._args
    assert type(args.speculative_config).__name__ == "EagleDecodingConfig"
    assert args.build_config.max_beam_width == 2
    assert args.kv_cache_config.max_tokens == 4096
    assert args.kv_cache_config.enable_block_reuse is False
    with pytest.raises(ValueError, match=r"llm_api_config .*llm.yaml: KeyError: 'decoding_type'"):
        make({"speculative_config": {"max_draft_len": 3}})


# Loading


def test_a_load_that_fails_says_why(fake: Any, make: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bath_size"):
        make({"max_bath_size": 3})
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "eos_token_id": 0, "auto_map": {}}')
    with pytest.raises(ValueError, match="TRUST_REMOTE_CODE=1"):
        make(model=str(tmp_path))
    assert llm(make(model=str(tmp_path), trust_remote_code="true"))._args.trust_remote_code
    fake.__version__ = "1.0.3"
    with pytest.raises(
        ValueError, match=r"requires TensorRT-LLM 1\.1 or later, but 1\.0\.3 is installed"
    ):
        make()


@pytest.mark.parametrize(
    ("given", "args", "config", "length"),
    [
        pytest.param({"max_seq_len": 10}, {"max_seq_len": 20}, {}, 10, id="of the variable"),
        pytest.param({}, {"max_seq_len": 20}, {"max_position_embeddings": 30}, 20, id="of the LLM"),
        pytest.param(
            {}, {"max_seq_len": None}, {"max_position_embeddings": 30}, 30, id="of the model"
        ),
        pytest.param(
            {},
            {},
            {"text_config": {"max_position_embeddings": 40}},
            40,
            id="of the model's part for texts",
        ),
    ],
)
def test_context_length(tmp_path: Path, given: Any, args: Any, config: Any, length: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = SimpleNamespace(args=SimpleNamespace(**args))
    assert context_length({"model": str(tmp_path), **given}, llm) == length


def test_a_context_length_that_is_unknown_has_to_be_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="set max_seq_len"):
        context_length({"model": str(tmp_path)}, None)


# Sampling


@pytest.mark.parametrize(("name", "value"), [*PENALTIES.items(), ("bad_words", ((4,),))])
def test_what_a_sampler_ignores_is_refused_until_another_is_chosen(
    name: str, value: Any, fake: Any, make: Make
) -> None:
    params = SamplingParams(**{name: value})
    remedy = "set sampler_type: TRTLLMSampler in the file that llm_api_config names"
    with pytest.raises(EngineError, match=rf"TensorRT-LLM 1\.2\.1 .*{name}.*{remedy}") as caught:
        make().start(sampling=params)
    assert error_from_text(str(caught.value)).code == "E1103"
    assert make(TRTLLM_SAMPLER).ids(sampling=params)
    fake.__version__ = HONOURS_ALL
    assert make().ids(sampling=params)


def test_seeds_that_are_ignored_are_said_once_and_not_refused(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    requests = make()
    for seed in (1, 2):
        assert requests.ids(sampling=SamplingParams(top_p=1.0, seed=seed))
    (warning,) = [message for message in caplog.messages if "ignores seeds" in message]
    assert "TensorRT-LLM 1.2.1" in warning
    assert "set sampler_type: TRTLLMSampler" in warning
    caplog.clear()
    make(TRTLLM_SAMPLER)
    assert "seeds" not in caplog.text


@pytest.mark.parametrize(
    ("version", "options", "forgetful"),
    [
        pytest.param("1.2.1", {"sampler_type": "auto"}, True, id="default of 1.2"),
        pytest.param("1.2.1", {"sampler_type": "TorchSampler"}, True, id="PyTorch's of 1.2"),
        pytest.param("1.2.1", {"backend": "tensorrt"}, False, id="TensorRT of 1.2"),
        pytest.param("1.3.0", {"sampler_type": "auto"}, False, id="default of 1.3"),
    ],
)
def test_samplers(version: str, options: dict[str, Any], forgetful: bool) -> None:
    assert is_forgetful(version, options) is forgetful
    assert not is_forgetful(version, {"sampler_type": SimpleNamespace(value="TRTLLMSampler")})


def test_a_bad_word_of_several_tokens_and_what_the_llm_refuses(fake: Any, make: Make) -> None:
    fake.__version__ = HONOURS_ALL
    requests = make()
    with pytest.raises(EngineError, match=r"bad words of several tokens.*\[5, 6\]") as caught:
        requests.start(sampling=SamplingParams(bad_words=((4,), (5, 6))))
    assert error_from_text(str(caught.value)).code == "E1103"
    with pytest.raises(EngineError, match="top_p must be within"):
        requests.start(sampling=SamplingParams(temperature=0.5, top_p=3.0))
    assert len(requests.engine.running) == 0


# Updates and errors


@pytest.mark.parametrize(
    ("finish_reason", "ids", "step"),
    [
        (None, [8], Step([8])),
        ("length", [8], Step([8], finished=True)),
        ("stop", [8], Step([8, 2], finished=True)),
        ("stop", [8, 2], Step([8, 2], finished=True)),
        ("stop", [], Step([2], finished=True)),
        ("stop", [8, 6], Step([8, 6], finished=True)),
        ("timeout", [], "EngineUnavailable('TensorRT-LLM ended the request: timeout')"),
        ("cancelled", [], "EngineUnavailable('TensorRT-LLM ended the request: cancelled')"),
    ],
)
def test_updates(
    finish_reason: str, ids: list[int], step: object, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = SimpleNamespace(token_ids_diff=ids, logprobs_diff=[], finish_reason=finish_reason)
    update = MagicMock(outputs=[new], finished=finish_reason is not None)
    update.__aiter__.return_value = [update]
    requests = make()
    monkeypatch.setattr(llm(requests), "generate_async", lambda *_, **__: update)
    first = requests.start(end_id=2, other_end_ids=(6,)).next()
    assert step == (repr(first.error) if first.error else first)


class RequestError(RuntimeError):
    pass


EXCEEDS = "Prompt length (9) exceeds maximum input length (5)."
LARGER = "Deduced -4: prompt length 9 is larger than max_seq_len 5"
END_ID = "EndId (7) is not within acceptable range [-1, 5)."


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (RequestError("something else"), "something else", "E2100"),
        (AssertionError(), "AssertionError()", "E2100"),
        (ValueError(EXCEEDS), EXCEEDS, "E1002"),
        (ValueError(LARGER), f"Prompt length (9) exceeds maximum input length: {LARGER}", "E1002"),
        (RequestError(END_ID), END_ID, "E1103"),
    ],
)
def test_errors_of_the_library(make: Make, error: Exception, text: str, code: str) -> None:
    engine: Any = make().engine
    found = engine.request_error(error, request([5] * 9))
    assert str(found) == text
    assert error_from_text(text).code == code


@pytest.mark.parametrize("made", [[8], [], [8, 2]], ids=["after a token", "alone", "unscored"])
def test_an_end_token_that_the_llm_left_out_has_a_log_probability(
    make: Make, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make()
    known = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in made if token != 2]
    new = SimpleNamespace(token_ids_diff=made, logprobs_diff=known, finish_reason="stop")
    update = MagicMock(outputs=[new], finished=True)
    update.__aiter__.return_value = [update]
    monkeypatch.setattr(llm(requests), "generate_async", lambda *_, **__: update)
    stream = requests.start(end_id=2, return_log_probs=True, top_log_probs=1).wait()
    assert stream.ids == [*made[:1], 2]
    assert [token.id for token in stream.tokens] == stream.ids
    assert all(token.log_prob <= 0 for token in stream.tokens)


@pytest.mark.parametrize("error", [RuntimeError, BrokenPipeError])
def test_when_the_executor_dies_everything_ends(
    error: type[Exception], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make()
    streams = [requests.start(max_tokens=50_000) for _ in range(4)]
    for stream in streams:
        stream.next()

    def die(*_: object) -> None:
        raise error("an illegal memory access")

    monkeypatch.setattr(llm(requests)._model, "next_token", die)
    reason = "the engine has stopped: an illegal memory access"
    assert {str(stream.last().error) for stream in streams} == {reason}
    assert len(requests.engine.running) == 0
    with pytest.raises(EngineError, match=reason) as caught:
        requests.start()
    assert error_from_text(str(caught.value)).code == "E2105"
