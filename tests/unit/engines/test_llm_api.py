"""The engine on TensorRT-LLM's LLM API, with the fake in tests/fakes, and the fake by its contract."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import queue
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cog_triton.engines.base import (
    EngineError,
    GenerationRequest,
    SamplingParams,
    Step,
    TokenLogProb,
    create_engine,
)
from cog_triton.engines.library import TABLE, log_probs, read_arguments, with_file
from cog_triton.engines.llm_api import (
    TensorrtLlmEngine,
    context_length,
    is_forgetful,
    llm_arguments,
    sampling_arguments,
)
from cog_triton.errors import error_from_text
from cog_triton.repository.variables import VARIABLES
from tests.support import wait_until

TESTS = Path(__file__).resolve().parents[2]
CONTRACT: dict[str, Any] = json.loads(
    (TESTS / "contracts" / "tensorrt_llm_llm_api.json").read_text()
)
NOT_PROMISED = {"backend", "cuda_graph_config", "scheduler_config", "attn_backend"}
# Arguments outside of the contract that the tests here need, as read in TensorRT-LLM's repository.
READ = {"build_config", "sampler_type"}
HONOURS_ALL = "1.3.0rc26"


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The fake as the package tensorrt_llm, even where the real one is installed."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]

    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(TESTS / "fakes"))
    yield importlib.import_module("tensorrt_llm")
    for name in loaded():
        del sys.modules[name]


Make = Callable[..., TensorrtLlmEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines, which are closed at the end."""
    engines = []

    def make(**parameters: str) -> TensorrtLlmEngine:
        given = {"engine": "llmapi", "model": "any", "max_seq_len": "100000", **parameters}
        engine = create_engine(given)
        assert isinstance(engine, TensorrtLlmEngine)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def request(key: str = "a", **values: Any) -> GenerationRequest:
    sampling = SamplingParams(**values.pop("sampling", {}))
    return GenerationRequest(
        key, **{"input_ids": [5, 6, 7], "max_tokens": 8, "sampling": sampling, **values}
    )


class Sink:
    """Keeps what an engine hands over."""

    def __init__(self) -> None:
        self.updates: queue.SimpleQueue[Step] = queue.SimpleQueue()

    def __call__(self, tokens: Step) -> None:
        self.updates.put(tokens)

    def next(self) -> Step:
        return self.updates.get(timeout=10)

    def rest(self) -> list[Step]:
        """All up to the end."""
        updates = [self.next()]
        while not updates[-1].finished:
            updates.append(self.next())
        return updates


def run(engine: TensorrtLlmEngine, one: GenerationRequest) -> list[Step]:
    sink = Sink()
    engine.submit(one, sink)
    return sink.rest()


def ids(updates: list[Step]) -> list[int]:
    assert updates[-1].error is None
    return [token for update in updates for token in update.ids]


# The fake


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_the_fakes_llm_has_the_arguments_of_the_contract_and_no_more(fake: Any) -> None:
    args = importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
    promised = set(CONTRACT["LLM"]["committed_arguments"])
    assert set(args.model_fields) == promised | NOT_PROMISED | READ
    assert set(CONTRACT["LLM"]["not_committed"]) >= NOT_PROMISED
    for name, default in CONTRACT["LLM"]["defaults"].items():
        assert args.model_fields[name].default == default
    defaults = {name: args.model_fields[name].default for name in promised - {"model"}}
    fake.LLM(model="any", **defaults).shutdown()


def test_the_fakes_llm_refuses_what_it_does_not_know(fake: Any) -> None:
    with pytest.raises(ValueError, match="max_batchsize"):
        fake.LLM(model="any", max_batchsize=8)
    with pytest.raises(ValueError, match="valid integer"):
        fake.LLM(model="any", max_batch_size="many")
    with pytest.raises(ValueError, match="max_token"):
        importlib.import_module("tensorrt_llm.llmapi").KvCacheConfig(max_token=1)


def test_the_fakes_requests_are_those_of_the_contract(fake: Any) -> None:
    wanted = CONTRACT["LLM"]["generate_async"]["arguments"]
    assert list(inspect.signature(fake.LLM.generate_async).parameters) == ["self", *wanted]
    methods = public(fake.LLM) - {"generate_async"}
    assert methods == set(CONTRACT["LLM"]["not_committed"]) - NOT_PROMISED
    names = [field.name for field in fields(fake.SamplingParams)]
    assert sorted(names) == sorted(CONTRACT["SamplingParams"])
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    assert sorted(llmapi.KvCacheConfig.model_fields) == sorted(CONTRACT["KvCacheConfig"])


def test_the_fakes_outputs_are_those_of_the_contract(fake: Any) -> None:
    async def generate() -> Any:
        llm = fake.LLM(model="any", skip_tokenizer_init=True)
        params = fake.SamplingParams(end_id=-1, max_tokens=3, logprobs=1)
        output = llm.generate_async([1, 2], params, streaming=True)
        diffs = []
        async for update in output:
            assert update is output
            diffs.append(update.outputs[0].token_ids_diff)
        llm.shutdown()
        return output, diffs

    output, diffs = asyncio.run(generate())
    assert public(output) - {"abort"} == set(CONTRACT["RequestOutput"])
    completion = output.outputs[0]
    assert public(completion) == set(CONTRACT["CompletionOutput"]["fields"])
    assert completion.finish_reason in CONTRACT["CompletionOutput"]["finish_reason"]
    assert [len(diff) for diff in diffs] == [1, 1, 1]
    assert completion.token_ids == [token for diff in diffs for token in diff]


def test_the_fake_needs_an_end_id_without_a_tokenizer(fake: Any) -> None:
    async def generate() -> None:
        llm = fake.LLM(model="any", skip_tokenizer_init=True)
        try:
            llm.generate_async([1], fake.SamplingParams())
        finally:
            llm.shutdown()

    with pytest.raises(ValueError, match="end_id"):
        asyncio.run(generate())


# The LLM's arguments

BARE = {"model": "m", "skip_tokenizer_init": True}


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({}, {}),
        ({"max_seq_len": "4096"}, {"max_seq_len": 4096}),
        ({"dtype": "auto"}, {}),
        ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"max_beam_width": "1"}, {}),
        ({"max_beam_width": "4"}, {"max_beam_width": 4}),
        ({"tensor_parallel_size": "2"}, {"tensor_parallel_size": 2}),
        ({"pipeline_parallel_size": "2"}, {"pipeline_parallel_size": 2}),
        ({"max_batch_size": "64"}, {"max_batch_size": 64}),
        ({"max_num_tokens": "16384"}, {"max_num_tokens": 16384}),
        ({"stream_interval": "4"}, {"stream_interval": 4}),
        ({"enable_chunked_context": "true"}, {"enable_chunked_prefill": True}),
        ({"enable_chunked_context": "false"}, {"enable_chunked_prefill": False}),
        ({"trust_remote_code": "true"}, {"trust_remote_code": True}),
        ({"trust_remote_code": "false"}, {}),
        ({"batch_scheduler_policy": "guaranteed_no_evict"}, {}),
        (
            {"batch_scheduler_policy": "max_utilization"},
            {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}},
        ),
        (
            {"enable_kv_cache_reuse": "false", "max_tokens_in_paged_kv_cache": "9000"},
            {"kv_cache_config": {"enable_block_reuse": False, "max_tokens": 9000}},
        ),
        (
            {"max_attention_window_size": "4096,512", "sink_token_length": "4"},
            {"kv_cache_config": {"max_attention_window": [4096, 512], "sink_token_length": 4}},
        ),
        (
            {
                "kv_cache_free_gpu_mem_fraction": "0.8",
                "kv_cache_host_memory_bytes": "45000000000",
            },
            {
                "kv_cache_config": {
                    "free_gpu_memory_fraction": 0.8,
                    "host_cache_size": 45000000000,
                }
            },
        ),
        ({"lora_prefetch_dir": "/a"}, {"enable_lora": True, "lora_config": {}}),
        (
            {"lora_prefetch_dir": "/a", "lora_cache_max_adapter_size": "16"},
            {"enable_lora": True, "lora_config": {"max_lora_rank": 16}},
        ),
        ({"lora_cache_max_adapter_size": "16"}, {}),
        # The predictor's own, and those of the other engines.
        ({"engine": "llmapi", "device": "auto", "simulated_prefill_ms": "0.0"}, {}),
        ({"tokenizer_dir": "t", "exclude_input_in_output": "true"}, {}),
    ],
)
def test_arguments_of_the_llm(parameters: dict[str, str], arguments: dict[str, Any]) -> None:
    assert llm_arguments({"model": "m", **parameters}) == {**BARE, **arguments}


def test_guided_decoding_needs_the_tokenizer() -> None:
    parameters = {"model": "m", "tokenizer_dir": "t", "guided_decoding_backend": "xgrammar"}
    assert llm_arguments(parameters) == {
        "model": "m",
        "tokenizer": "t",
        "guided_decoding_backend": "xgrammar",
    }


def test_a_value_that_is_none_names_its_variable() -> None:
    with pytest.raises(ValueError, match="tensorrt_llm: max_attention_window_size: "):
        llm_arguments({"model": "m", "max_attention_window_size": "1;2"})


def every_parameter() -> dict[str, str]:
    examples: dict[str, object] = {
        "integer": 2,
        "float": 0.5,
        "boolean": True,
        "text": "xgrammar",
        "path": "any",
        "integer list": [64],
    }
    table = VARIABLES["tensorrt_llm"]
    texts = {
        name: v.render(v.choices[-1] if v.choices else examples.get(v.kind))
        for name, v in table.items()
    }
    return {name: text for name, text in texts.items() if text is not None}


def test_no_argument_is_outside_of_the_contract() -> None:
    found = llm_arguments(every_parameter())
    kv_cache = found.pop("kv_cache_config")
    assert set(kv_cache) == set(CONTRACT["KvCacheConfig"])
    assert set(found) <= {*CONTRACT["LLM"]["committed_arguments"], "scheduler_config"}


def test_the_llm_takes_them_all(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    parameters = {**every_parameter(), "engine": "llmapi", "dtype": "float16"}
    del parameters["llm_api_config"]
    make(**{**parameters, "device": "cuda:1"})
    for name in ("decoding_mode", "device"):
        assert f"tensorrt_llm: {name} has no effect with the engine llmapi" in caplog.messages
    assert "gpt_model_type" not in caplog.text
    assert "stream_interval" not in caplog.text


def test_every_variable_is_an_argument_or_said_to_have_no_effect() -> None:
    keys = {  # where the parameter's name differs
        "batching_strategy": "gpt_model_type",
        "encoder_engine_dir": "encoder_model_path",
    }
    apart = {
        "engine",
        "engine_dir",  # said by the filling of the template, for all embedded engines
        "exclude_input_in_output",
        "guided_decoding_backend",
        "llm_api_config",
        "max_tokens_per_response",  # of what delivers the tokens of all embedded engines
        "tokenizer_dir",
        "vllm_config",  # has no effect
    }
    table = VARIABLES["tensorrt_llm"]
    template = (TESTS.parent / "triton_model_repo" / "tensorrt_llm" / "config.pbtxt").read_text()
    quoted = set(re.findall(r'string_value: "\$\{(\w+)\}"', template))
    names = {keys.get(name, name) for name in quoted if not name.startswith("simulated_")}
    assert quoted <= table.keys()
    assert names - TABLE.keys() == apart


# The YAML file


def test_the_file_wins_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours: dict[str, Any] = {
        "model": "m",
        "max_batch_size": 8,
        "max_seq_len": 9,
        "kv_cache_config": {"max_tokens": 1, "sink_token_length": 2},
    }
    theirs = {
        "max_batch_size": 16,
        "max_seq_len": 9,
        "attn_backend": "FLASHINFER",
        "kv_cache_config": {"max_tokens": 3, "event_buffer_max_size": 4},
    }
    file = tmp_path / "llm.yaml"
    file.write_text(json.dumps(theirs))
    assert with_file(ours, {"llm_api_config": str(file)}, "llmapi") == {
        "model": "m",
        "max_batch_size": 16,
        "max_seq_len": 9,
        "attn_backend": "FLASHINFER",
        "kv_cache_config": {"max_tokens": 3, "sink_token_length": 2, "event_buffer_max_size": 4},
    }
    assert caplog.messages == [
        "llm_api_config: kv_cache_config.max_tokens is 3, and not 1 as the template variables have it",
        "llm_api_config: max_batch_size is 16, and not 8 as the template variables have it",
    ]


@pytest.mark.parametrize(("text", "content"), [("", {}), ("a: {b: 1}", {"a": {"b": 1}})])
def test_what_a_file_may_hold(tmp_path: Path, text: str, content: dict[str, Any]) -> None:
    (tmp_path / "llm.yaml").write_text(text)
    assert read_arguments(tmp_path / "llm.yaml", "llm_api_config") == content


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a", "llm.yaml: expected a mapping, got \\['a'\\]"), ("a: [", "llm.yaml: not valid YAML")],
)
def test_what_it_may_not(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "llm.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_arguments(tmp_path / "llm.yaml", "llm_api_config")


def test_the_files_arguments_reach_the_llm(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "llm.yaml"
    file.write_text("max_seq_len: 50\nstream_interval: 3\nkv_cache_config: {max_tokens: 4096}\n")
    engine = make(llm_api_config=str(file), enable_kv_cache_reuse="false")
    assert engine.context_length == 50
    assert [len(tokens.ids) for tokens in run(engine, request(max_tokens=8))] == [3, 3, 2]


EAGLE = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "/eagle"}


@pytest.mark.parametrize("version", ["1.1.0", "1.2.1", "1.3.0rc24"])
def test_the_library_itself_converts_the_files_sections(
    version: str, fake: Any, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fake, "__version__", version)
    file = tmp_path / "llm.yaml"
    sections = {
        "speculative_config": EAGLE,
        "build_config": {"max_beam_width": 2},
        "lora_config": {"max_lora_rank": 8},
        "kv_cache_config": {"max_tokens": 4096},
    }
    file.write_text(json.dumps(sections))
    args = make(llm_api_config=str(file), enable_kv_cache_reuse="false")._llm._args
    assert type(args.speculative_config).__name__ == "EagleDecodingConfig"
    assert args.speculative_config.max_draft_len == 3
    assert args.build_config.max_beam_width == 2
    assert args.lora_config.max_lora_rank == 8
    assert args.kv_cache_config.max_tokens == 4096
    assert args.kv_cache_config.enable_block_reuse is False


@pytest.mark.parametrize("there", [True, False])
def test_where_it_does_not_convert_the_sections_stay_as_they_are(
    there: bool, fake: Any, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fake, "__version__", HONOURS_ALL)
    if not there:
        module = importlib.import_module("tensorrt_llm.llmapi.llm_args")
        monkeypatch.delattr(module, "update_llm_args_with_extra_dict")
    file = tmp_path / "llm.yaml"
    file.write_text(json.dumps({"speculative_config": EAGLE, "max_seq_len": 50}))
    engine = make(llm_api_config=str(file))
    assert engine._llm._args.speculative_config == EAGLE
    assert engine.context_length == 50


def test_a_section_that_cannot_be_converted_names_the_file(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "llm.yaml"
    file.write_text("speculative_config: {max_draft_len: 3}\n")
    with pytest.raises(ValueError, match=r"llm_api_config .*llm.yaml: KeyError: 'decoding_type'"):
        make(llm_api_config=str(file))


# Loading


def test_a_model_with_code_of_its_own_needs_to_be_trusted(make: Make, tmp_path: Path) -> None:
    config = {"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": 0, "auto_map": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="TRUST_REMOTE_CODE=1"):
        make(model=str(tmp_path))
    assert make(model=str(tmp_path), trust_remote_code="true")._llm._args.trust_remote_code


@pytest.mark.parametrize(
    ("parameters", "yaml", "error"),
    [
        ({"model": "broken"}, "", "the weights of broken are broken"),
        ({}, "max_bath_size: 3", "LLM got invalid argument: max_bath_size"),
        ({}, "kv_cache_config: {max_token: 3}", "max_token\n"),
        ({"max_batch_size": "many"}, "", "tensorrt_llm: max_batch_size: invalid literal"),
        ({"llm_api_config": "/none.yaml"}, None, "/none.yaml"),
    ],
)
def test_a_load_that_fails_says_why(
    make: Make, tmp_path: Path, parameters: dict[str, str], yaml: str | None, error: str
) -> None:
    if yaml:
        (tmp_path / "llm.yaml").write_text(yaml)
        parameters = {**parameters, "llm_api_config": str(tmp_path / "llm.yaml")}
    with pytest.raises(Exception, match=error):
        make(**parameters)


def test_a_model_is_needed() -> None:
    with pytest.raises(ValueError, match="model: the engine llmapi needs it"):
        TensorrtLlmEngine({"max_seq_len": "10"})


def test_an_llm_whose_context_is_unknown_is_shut_down_again(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 9, "max_position_embeddings": null, "eos_token_id": 0}'
    )
    shut_down, shutdown = [], fake.LLM.shutdown

    def note(llm: Any) -> None:
        shut_down.append(llm)
        shutdown(llm)

    monkeypatch.setattr(fake.LLM, "shutdown", note)
    with pytest.raises(ValueError, match="set max_seq_len"):
        TensorrtLlmEngine({"model": str(tmp_path)})
    assert len(shut_down) == 1


@pytest.mark.parametrize(
    ("arguments", "args", "config", "length"),
    [
        ({"max_seq_len": 10}, {"max_seq_len": 20}, {"max_position_embeddings": 30}, 10),
        ({}, {"max_seq_len": 20}, {"max_position_embeddings": 30}, 20),
        ({}, {"max_seq_len": None}, {"max_position_embeddings": 30}, 30),
        ({}, {}, {"text_config": {"max_position_embeddings": 40}}, 40),
    ],
)
def test_the_context_length(
    tmp_path: Path,
    arguments: dict[str, Any],
    args: dict[str, Any],
    config: dict[str, Any],
    length: int,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = SimpleNamespace(args=SimpleNamespace(**args))
    assert context_length({"model": str(tmp_path), **arguments}, llm) == length


# Sampling

NONE = {"max_tokens": 8, "end_id": -1, "pad_id": 0, "ignore_eos": True}
GREEDY = {**NONE, "top_k": 1}
SAMPLED = {**NONE, "temperature": 0.5, "top_p": 1.0, "seed": 0}


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({}, GREEDY),
        ({"end_id": 2}, {"max_tokens": 8, "end_id": 2, "top_k": 1}),
        ({"sampling": {"temperature": 0.0, "top_p": 0.9}}, GREEDY),
        ({"sampling": {"temperature": 0.5}}, GREEDY),  # neither top_k nor top_p
        ({"sampling": {"temperature": 0.5, "top_k": 1, "top_p": 0.9}}, GREEDY),
        ({"sampling": {"seed": 7}}, GREEDY),
        ({"sampling": {"temperature": 0.5, "top_p": 1.0}}, SAMPLED),
        ({"sampling": {"temperature": 0.5, "top_p": 0.9}}, {**SAMPLED, "top_p": 0.9}),
        ({"sampling": {"temperature": 0.5, "top_k": 9}}, {**SAMPLED, "top_k": 9}),
        (
            {"sampling": {"temperature": 0.5, "top_k": 9, "top_p": 0.9, "seed": 2**64 - 1}},
            {**SAMPLED, "top_k": 9, "top_p": 0.9, "seed": 2**64 - 1},
        ),
        ({"sampling": {"repetition_penalty": 1.2}}, {**GREEDY, "repetition_penalty": 1.2}),
        ({"sampling": {"presence_penalty": -0.5}}, {**GREEDY, "presence_penalty": -0.5}),
        ({"sampling": {"frequency_penalty": 0.5}}, {**GREEDY, "frequency_penalty": 0.5}),
        ({"sampling": {"min_tokens": 3}}, {**GREEDY, "min_tokens": 3}),
        ({"sampling": {"min_tokens": -1}}, GREEDY),
        ({"sampling": {"bad_words": ((5,), (), (7,))}}, {**GREEDY, "bad_token_ids": [5, 7]}),
        ({"return_log_probs": True}, {**GREEDY, "logprobs": 1}),
        ({"stop_words": ((5, 6),)}, GREEDY),
    ],
)
def test_arguments_of_a_request(values: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert sampling_arguments(request(**values)) == arguments
    assert set(arguments) <= set(CONTRACT["SamplingParams"])


def test_a_bad_word_of_several_tokens_is_refused(
    fake: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "__version__", HONOURS_ALL)
    engine = make()
    with pytest.raises(EngineError, match=r"bad words of several tokens.*\[5, 6\]") as caught:
        engine.submit(request(sampling={"bad_words": ((4,), (5, 6))}), Sink())
    assert error_from_text(str(caught.value)).code == "E1103"
    assert engine.active() == 0


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2},
    {"presence_penalty": -0.5},
    {"frequency_penalty": 0.5},
    {"bad_words": ((4,),)},
]


@pytest.mark.parametrize("sampling", PENALTIES)
@pytest.mark.parametrize("version", ["1.1.0", "1.2.1", "1.3.0rc24"])
def test_what_the_default_sampler_ignores_is_refused_until_another_is_chosen(
    version: str,
    sampling: dict[str, Any],
    fake: Any,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    line = "sampler_type: TRTLLMSampler"
    monkeypatch.setattr(fake, "__version__", version)
    with pytest.raises(EngineError, match=next(iter(sampling))) as caught:
        make().submit(request(sampling=sampling), Sink())
    assert f"TensorRT-LLM {version} " in str(caught.value)
    assert f"set {line} in the file that llm_api_config names" in str(caught.value)
    assert error_from_text(str(caught.value)).code == "E1103"
    (tmp_path / "llm.yaml").write_text(line)
    assert ids(run(make(llm_api_config=str(tmp_path / "llm.yaml")), request(sampling=sampling)))


@pytest.mark.parametrize("sampling", PENALTIES)
def test_a_version_whose_sampler_honours_all_refuses_nothing(
    sampling: dict[str, Any], fake: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "__version__", HONOURS_ALL)
    engine = make()
    plain = ids(run(engine, request()))
    bad = {"bad_words": ((plain[0],),)} if "bad_words" in sampling else {}
    changed = ids(run(engine, request(sampling={**sampling, **bad})))
    assert changed != plain or not bad


def test_seeds_that_are_ignored_are_said_once_and_not_refused(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine = make()
    for seed in (1, 2, 1):
        assert ids(run(engine, request(sampling={"top_p": 1.0, "seed": seed})))
    (warning,) = [message for message in caplog.messages if "ignores seeds" in message]
    assert "TensorRT-LLM 1.2.1" in warning
    assert "set sampler_type: TRTLLMSampler" in warning
    caplog.clear()
    (tmp_path / "llm.yaml").write_text("sampler_type: TRTLLMSampler")
    engine = make(llm_api_config=str(tmp_path / "llm.yaml"))
    texts = [ids(run(engine, request(sampling={"top_p": 1.0, "seed": s}))) for s in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert "seeds" not in caplog.text


@pytest.mark.parametrize(
    ("version", "options", "forgetful"),
    [
        ("1.2.1", {}, True),
        ("1.2.1", {"sampler_type": "auto"}, True),
        ("1.2.1", {"sampler_type": "TorchSampler"}, True),
        ("1.2.1", {"sampler_type": SimpleNamespace(value="TRTLLMSampler")}, False),
        ("1.2.1", {"backend": "tensorrt"}, False),
        ("1.3.0rc26", {}, False),
        ("1.3.0", {"sampler_type": "auto"}, False),
        ("nobody knows", {}, True),
    ],
)
def test_samplers(version: str, options: dict[str, Any], forgetful: bool) -> None:
    assert is_forgetful(version, options) is forgetful


def test_a_release_that_is_too_old(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "__version__", "1.0.3")
    with pytest.raises(ValueError, match=r"llmapi needs TensorRT-LLM 1\.1 or later, not 1\.0\.3"):
        TensorrtLlmEngine({"model": "any"})


def test_a_parameter_that_the_llm_refuses(make: Make) -> None:
    with pytest.raises(EngineError, match="top_p must be within"):
        make().submit(request(sampling={"temperature": 0.5, "top_p": 3.0}), Sink())


# Updates


class Update:
    """A RequestOutput of the LLM with one update."""

    def __init__(self, values: dict[str, Any]) -> None:
        given = {"token_ids_diff": [8], "logprobs_diff": [], "finish_reason": None, **values}
        self.outputs, self.finished = [SimpleNamespace(**given)], given["finish_reason"] is not None
        self.updates = [self]

    def __aiter__(self) -> Update:
        return self

    async def __anext__(self) -> Update:
        if not self.updates:
            raise StopAsyncIteration
        return self.updates.pop()

    def abort(self) -> None:
        pass


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({}, Step([8])),
        ({"finish_reason": "length"}, Step([8], finished=True)),
        ({"finish_reason": "stop"}, Step([8, 2], finished=True)),
        ({"finish_reason": "stop", "token_ids_diff": [8, 2]}, Step([8, 2], finished=True)),
        ({"finish_reason": "stop", "token_ids_diff": []}, Step([2], finished=True)),
        (
            {"finish_reason": "timeout"},
            Step(finished=True, error="TensorRT-LLM ended the request: timeout"),
        ),
        (
            {"finish_reason": "cancelled"},
            Step(finished=True, error="TensorRT-LLM ended the request: cancelled"),
        ),
    ],
)
def test_updates(
    values: dict[str, Any], tokens: Step, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sink = make(), Sink()
    monkeypatch.setattr(engine._llm, "generate_async", lambda **_: Update(values))
    engine.submit(request(end_id=2), sink)
    assert sink.next() == tokens


def test_log_probabilities_of_all_releases() -> None:
    entries = [{5: SimpleNamespace(logprob=-0.5), 6: SimpleNamespace(logprob=-1.5)}, -0.25]
    assert log_probs([6, 7], entries) == [TokenLogProb(6, -1.5), TokenLogProb(7, -0.25)]
    assert log_probs([], None) == []


@pytest.mark.parametrize("entries", [None, [], [{9: SimpleNamespace(logprob=-1.0)}]])
def test_a_log_probability_that_is_missing(entries: list[Any] | None) -> None:
    with pytest.raises(EngineError, match="left out the log probability"):
        log_probs([5], entries)


# Errors


class RequestError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (RequestError("no"), False),
        (ValueError("no"), False),
        (AssertionError(), False),
        (EngineError("no"), False),
        (RuntimeError("LLM is shutting down"), True),
        (BrokenPipeError(), True),
    ],
)
def test_which_errors_are_the_end(make: Make, error: Exception, fatal: bool) -> None:
    assert make().is_fatal(error) is fatal


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Prompt length (9) exceeds maximum input length (5).", "E1002"),
        ("The sum of prompt length (9.0), query length (0) should not exceed x", "E1002"),
        ("Deduced -4: prompt length 9 is larger than max_seq_len 5", "E1002"),
        ("EndId (7) is not within acceptable range [-1, 5).", "E1103"),
        ("something else", "E2100"),
    ],
)
def test_the_texts_lead_to_codes(make: Make, text: str, code: str) -> None:
    found = make().error_text(RequestError(text), 9)
    assert text in found
    assert error_from_text(found).code == code
    assert found.startswith("Prompt length (9) exceeds maximum input length") or code != "E1002"


def test_an_error_without_a_text(make: Make) -> None:
    assert make().error_text(AssertionError(), 1) == "AssertionError()"


# Running


def test_tokens_come_as_they_are_made(make: Make) -> None:
    updates = run(make(), request(max_tokens=5))
    assert [len(update.ids) for update in updates] == [1] * 5
    assert [update.finished for update in updates] == [False] * 4 + [True]
    assert not any(update.log_probs for update in updates)


def test_the_end_id_ends_the_output_and_is_part_of_it(make: Make) -> None:
    engine = make()
    free = ids(run(engine, request(max_tokens=20)))
    end_id = free[4]
    until = free[: free.index(end_id) + 1]
    assert ids(run(engine, request(max_tokens=20, end_id=end_id))) == until
    held = request(max_tokens=20, end_id=end_id, sampling={"min_tokens": 10})
    assert end_id not in ids(run(engine, held))[:10]


def test_a_bad_word_of_one_token_does_not_occur(
    fake: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "__version__", HONOURS_ALL)
    engine = make()
    bad = ids(run(engine, request()))[2]
    assert bad not in ids(run(engine, request(sampling={"bad_words": ((bad,),)})))


def test_a_seed_decides_what_is_sampled(
    fake: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "__version__", HONOURS_ALL)
    engine = make()
    texts = [ids(run(engine, request(sampling={"top_p": 1.0, "seed": seed}))) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_an_adapter_changes_the_requests_that_name_it(make: Make, tmp_path: Path) -> None:
    """The fake answers as it does to a prompt that begins with the adapter's number."""
    engine = make(lora_prefetch_dir=str(tmp_path), lora_cache_max_adapter_size="16")
    assert engine._llm._args.lora_config.max_lora_rank == 16
    assert engine.features == {"lora_task_id"}
    assert not make().features
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "7").mkdir(exist_ok=True)
        (tmp_path / "7" / file).touch()
    changed = ids(run(engine, request(lora_task_id=7)))
    assert changed == ids(run(engine, request(input_ids=[1, 5, 6, 7])))
    assert changed != ids(run(engine, request()))
    (tmp_path / "7" / "adapter_model.safetensors").write_text("replaced")
    replaced = ids(run(engine, request(lora_task_id=7)))
    assert replaced == ids(run(engine, request(input_ids=[2, 5, 6, 7]))) != changed
    with pytest.raises(EngineError, match="lora_task_id 8: there is no such adapter"):
        engine.submit(request(lora_task_id=8), Sink())
    (tmp_path / "8").mkdir()
    for file in ("model.lora_config.npy", "model.lora_weights.npy"):
        (tmp_path / "8" / file).touch()
    with pytest.raises(EngineError, match=r"lora_task_id 8: .*/8 has no adapter_config\.json"):
        engine.submit(request(lora_task_id=8), Sink())


def test_the_file_says_more_of_adapters(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "llm.yaml"
    file.write_text("lora_config: {max_lora_rank: 32}")
    engine = make(lora_prefetch_dir=str(tmp_path), llm_api_config=str(file))
    assert engine._llm._args.lora_config.max_lora_rank == 32


def test_log_probabilities(make: Make) -> None:
    updates = run(make(), request(return_log_probs=True))
    assert [len(update.log_probs) for update in updates] == [1] * 8
    assert all(token.log_prob < 0 for update in updates for token in update.log_probs)


def test_many_at_once_do_not_mix(make: Make) -> None:
    engine = make()
    requests = [request(f"{i}", input_ids=[i, i + 1], max_tokens=10 + i) for i in range(16)]
    alone = [ids(run(engine, one)) for one in requests]
    sinks = [Sink() for _ in requests]
    for one, sink in zip(requests, sinks, strict=True):
        engine.submit(one, sink)
    assert 0 < engine.active() <= 16
    assert [ids(sink.rest()) for sink in sinks] == alone
    assert engine.active() == 0


def test_an_abort_reaches_the_llm(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make()
    sink, other = Sink(), Sink()
    engine.submit(request("a", max_tokens=50_000), sink)
    engine.submit(request("b", max_tokens=50), other)
    sink.next()
    engine.abort("a")
    assert engine.active() <= 1
    wait_until(lambda: "aborted a request" in capsys.readouterr().out, 5, "the LLM's abort")
    while not sink.updates.empty():
        assert not sink.next().finished
    assert len(ids(other.rest())) == 50
    assert sink.updates.empty()


def test_an_abort_before_the_first_step_and_of_what_is_unknown(make: Make) -> None:
    engine = make(model="silent")
    sink = Sink()
    for _ in range(20):
        engine.submit(request(), sink)
        engine.abort("a")
    engine.abort("a")
    engine.abort("never there")
    assert engine.active() == 0
    assert sink.updates.empty()


def test_an_abort_after_the_end_does_nothing(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make()
    run(engine, request())
    engine.abort("a")
    run(engine, request("b"))
    assert "aborted" not in capsys.readouterr().out


def test_a_request_that_fails_fails_alone(make: Make) -> None:
    engine = make(model="failing")
    *updates, last = run(engine, request())
    assert [len(update.ids) for update in updates] == [1, 1, 1]
    assert last == Step([], finished=True, error="this request cannot be computed")
    assert ids(run(engine, request(max_tokens=2)))
    assert engine.active() == 0


def test_a_prompt_longer_than_a_step(make: Make) -> None:
    engine = make(max_num_tokens="10")
    (last,) = run(engine, request(input_ids=[1] * 11))
    assert last.error is not None
    assert last.error.startswith("Prompt length (11) exceeds maximum input length: The sum of")
    assert ids(run(engine, request()))
    chunked = make(max_num_tokens="10", enable_chunked_context="true")
    assert ids(run(chunked, request(input_ids=[1] * 11)))


def test_when_the_executor_dies_everything_ends(make: Make) -> None:
    engine = make(model="dying")
    sinks = [Sink() for _ in range(4)]
    for i, sink in enumerate(sinks):
        engine.submit(request(str(i), max_tokens=100), sink)
    reason = "the engine has stopped: an illegal memory access"
    assert {sink.rest()[-1].error for sink in sinks} == {reason}
    assert engine.active() == 0
    with pytest.raises(EngineError, match=reason) as caught:
        engine.submit(request(), Sink())
    assert error_from_text(str(caught.value)).code == "E2105"


def test_an_llm_that_was_shut_down_is_noticed(make: Make) -> None:
    engine = make(model="silent")
    waiting, late = Sink(), Sink()
    engine.submit(request("a"), waiting)
    wait_until(lambda: engine._llm._sequences, 5, "the request's start")
    engine._llm.shutdown()
    engine.submit(request("b"), late)
    reason = "the engine has stopped: LLM is shutting down"
    assert [late.next().error, waiting.next().error] == [reason, reason]


def test_closing_drops_what_runs_and_may_be_repeated(make: Make) -> None:
    engine = make()
    sink = Sink()
    engine.submit(request(max_tokens=50_000), sink)
    sink.next()
    engine.close()
    assert engine.active() == 0
    received = sink.updates.qsize()
    time.sleep(0.05)
    assert sink.updates.qsize() == received
    engine.abort("a")
    with pytest.raises(EngineError, match="the engine has stopped: it was closed"):
        engine.submit(request(), sink)
    engine.close()


def test_the_demo_models_answer(demo_model: Path) -> None:
    from cog_triton.text.tokenizer import load_tokenizer
    from tools.demo_model.corpus import PAIRS

    tokenizer = load_tokenizer(str(demo_model))
    engine = create_engine({"engine": "llmapi", "model": str(demo_model)})
    assert isinstance(engine, TensorrtLlmEngine)
    assert engine.context_length == 2048
    one = request(
        input_ids=tokenizer(PAIRS[0].question).input_ids,
        max_tokens=500,
        end_id=tokenizer.eos_token_id,
    )
    found = ids(run(engine, one))
    assert tokenizer.decode(found, skip_special_tokens=True) == PAIRS[0].answer
    assert ids(run(engine, replace(one, max_tokens=3))) == found[:3]
    engine.close()
