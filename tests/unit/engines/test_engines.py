from __future__ import annotations

import importlib.util
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cog_triton.engines.base import (
    Engine,
    EngineError,
    GenerationRequest,
    SamplingParams,
    Step,
    TokenLogProb,
    create_engine,
)
from cog_triton.engines.token_sampling import History
from cog_triton.engines.transformers import (
    CPU_BATCH_TOKENS,
    CPU_CACHE_BYTES,
    CPU_PAGE_TOKENS,
    TransformersEngine,
    batching_config,
)
from cog_triton.text.tokenizer import load_tokenizer
from tools.demo_model.corpus import PAIRS

TIMEOUT = 60
PROMPT = [5, 6, 7, 8, 9]
# So hot that every token is about as likely as any other, whatever the model has learned: two seeds give
# the same few tokens by no chance.
RANDOM = SamplingParams(temperature=1000.0, top_p=1.0)
MAX_SEED = 2**64 - 1

# Each one for at least 512 tokens of prompt and output; another engine only has to be added here.
ENGINES: dict[str, Callable[[Path], dict[str, str]]] = {
    "transformers": lambda model: {
        "engine": "transformers",
        "model": str(model),
        "device": "cpu",
        "max_tokens_in_paged_kv_cache": "8192",
    },
    "simulated": lambda model: {"engine": "simulated", "tokenizer_dir": str(model)},
    # On the fake of its interface that tests/unit/engines/test_llm_api.py checks.
    "llmapi": lambda model: {"engine": "llmapi", "model": str(model)},
    # On a GPU a share of its memory: some tests have two engines at a time.
    "vllm": lambda model: (
        {"engine": "vllm", "model": str(model)}
        | ({"kv_cache_free_gpu_mem_fraction": "0.3"} if torch.cuda.is_available() else {})
    ),
}
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"
)
FAKES = Path(__file__).resolve().parents[2] / "fakes"


class Stream:
    """A sink that keeps what comes, for a test to wait for."""

    def __init__(self, on_tokens: Callable[[Stream], object] | None = None) -> None:
        self.all: list[Step] = []
        self._queue: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._on_tokens = on_tokens

    def __call__(self, tokens: Step) -> None:
        self.all.append(tokens)
        self._queue.put(tokens)
        if self._on_tokens is not None:
            self._on_tokens(self)

    @property
    def ids(self) -> list[int]:
        return [token for tokens in self.all for token in tokens.ids]

    @property
    def log_probs(self) -> list[float]:
        return [token.log_prob for token in self.told]

    @property
    def told(self) -> list[TokenLogProb]:
        return [token for tokens in self.all for token in tokens.log_probs]

    @property
    def finished(self) -> bool:
        return bool(self.all) and self.all[-1].finished

    def next(self) -> Step:
        return self._queue.get(timeout=TIMEOUT)

    def wait(self) -> Stream:
        """Waits for the end, which has to be a good one."""
        while not (tokens := self.next()).finished:
            pass
        assert tokens.error is None
        return self


class Requests:
    """Makes requests with keys of their own and starts them on an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def start(
        self, input_ids: Sequence[int] = PROMPT, stream: Stream | None = None, **values: Any
    ) -> Stream:
        stream = stream or Stream()
        self.engine.submit(request(input_ids, **values), stream)
        return stream

    def ids(self, input_ids: Sequence[int] = PROMPT, **values: Any) -> list[int]:
        return self.start(input_ids, **values).wait().ids


def request(input_ids: Sequence[int] = PROMPT, **values: Any) -> GenerationRequest:
    request.count += 1  # type: ignore[attr-defined]
    defaults = {"key": f"request {request.count}", "max_tokens": 8}  # type: ignore[attr-defined]
    return GenerationRequest(input_ids=list(input_ids), **{**defaults, **values})


request.count = 0  # type: ignore[attr-defined]


# What holds for every engine


@pytest.fixture(
    scope="module",
    params=[*sorted(ENGINES.keys() - {"vllm"}), pytest.param("vllm", marks=NEEDS_VLLM)],
)
def parameters(request: pytest.FixtureRequest, demo_model: Path) -> dict[str, str]:
    return ENGINES[request.param](demo_model)


@pytest.fixture(scope="module", autouse=True)
def fake_tensorrt_llm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FAKES))
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def requests(parameters: dict[str, str]) -> Iterator[Requests]:
    engine = create_engine(parameters)
    yield Requests(engine)
    engine.close()


def test_tokens_come_in_pieces_and_end_once(requests: Requests) -> None:
    stream = requests.start(max_tokens=50).wait()
    requests.ids()  # whatever would still come has come by now

    assert [tokens.finished for tokens in stream.all] == [False] * (len(stream.all) - 1) + [True]
    assert len(stream.all) > 1
    assert all(tokens.ids for tokens in stream.all[:-1])
    assert all(tokens.error is None for tokens in stream.all)
    assert len(stream.ids) == 50
    assert stream.ids == requests.ids(max_tokens=50)


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_max_tokens(requests: Requests, max_tokens: int) -> None:
    assert len(requests.ids(max_tokens=max_tokens)) == max_tokens


def test_an_answer_does_not_depend_on_other_requests(requests: Requests) -> None:
    prompts = [[5 + i, 6, 7 + i, *range(20, 20 + i)] for i in range(12)]
    alone = [requests.ids(prompt, max_tokens=20) for prompt in prompts]

    streams = [requests.start(prompt, max_tokens=20) for prompt in prompts]

    assert [stream.wait().ids for stream in streams] == alone
    assert len({tuple(ids) for ids in alone}) > 1


def test_all_requests_progress_together(requests: Requests) -> None:
    begun: list[int] = []
    ended: list[int] = []

    def note(i: int) -> Callable[[Stream], None]:
        def on_tokens(stream: Stream) -> None:
            if len(stream.all) == 1:
                begun.append(i)
                if i == 0:  # from here on the others are being generated
                    requests.start(stream=late, max_tokens=5)
            if stream.finished:
                ended.append(i)

        return on_tokens

    late = Stream(note(9))
    early = [Stream(note(i)) for i in range(4)]
    for stream in early:
        requests.start(stream=stream, max_tokens=200)
    for stream in [*early, late]:
        stream.wait()

    assert set(begun) == {0, 1, 2, 3, 9}
    assert ended[0] == 9  # it has few tokens, and had not to wait for the end of another


def test_an_abort_frees_the_slot_and_stops_the_tokens(requests: Requests) -> None:
    one = request(max_tokens=400)
    third = threading.Event()

    def abort(stream: Stream) -> None:
        if len(stream.ids) >= 3 and not third.is_set():
            requests.engine.abort(one.key)
            third.set()

    stream = Stream(abort)
    requests.engine.submit(one, stream)
    assert third.wait(TIMEOUT)
    requests.ids()
    had = len(stream.ids)
    requests.ids(max_tokens=20)

    assert had == len(stream.ids) < 10
    assert not stream.finished
    assert requests.engine.active() == 0


def test_an_abort_at_once(requests: Requests) -> None:
    one = request(max_tokens=500)
    stream = Stream()
    requests.engine.submit(one, stream)
    requests.engine.abort(one.key)
    requests.ids()
    had = len(stream.ids)
    requests.ids(max_tokens=20)

    assert had == len(stream.ids)
    assert requests.engine.active() == 0


def test_aborting_what_is_not_there(requests: Requests) -> None:
    one = request()
    requests.engine.abort("unknown")
    requests.engine.submit(one, stream := Stream())
    stream.wait()
    requests.engine.abort(one.key)
    requests.engine.abort(one.key)

    assert len(requests.ids()) == 8


def test_active_counts_what_runs(requests: Requests) -> None:
    counts: list[int] = []
    streams = [Stream(lambda _: counts.append(requests.engine.active())) for _ in range(3)]
    assert requests.engine.active() == 0
    for stream in streams:
        requests.start(stream=stream, max_tokens=100)
    for stream in streams:
        stream.wait()

    assert max(counts) == 3
    assert requests.engine.active() == 0


def test_log_probs_come_when_asked_for(requests: Requests) -> None:
    streams = [requests.start(return_log_probs=i == 1, max_tokens=9) for i in range(3)]
    for stream in streams:
        stream.wait()

    assert [len(stream.log_probs) for stream in streams] == [0, 9, 0]
    assert all(len(t.log_probs) == len(t.ids) for t in streams[1].all)
    assert all(value <= 0 for value in streams[1].log_probs)


def test_the_end_token_ends_the_output_and_is_part_of_it(requests: Requests) -> None:
    ids = requests.ids(max_tokens=30)
    end = next(i for i in range(3, 30) if ids[i] not in ids[:i])

    assert requests.ids(max_tokens=30, end_id=ids[end]) == ids[: end + 1]


def test_the_context_length(parameters: dict[str, str]) -> None:
    engine = create_engine({**parameters, "max_seq_len": "300"})
    assert engine.context_length == 300
    full = Requests(engine).ids(PROMPT * 50, max_tokens=50)
    assert len(full) == 50  # all of it can be used
    engine.close()


def test_closing_ends_the_threads_and_drops_what_runs(parameters: dict[str, str]) -> None:
    before = set(threading.enumerate())
    engine = create_engine(parameters)
    begun = threading.Event()
    running = Requests(engine).start(stream=Stream(lambda _: begun.set()), max_tokens=500)
    assert set(threading.enumerate()) > before
    assert begun.wait(TIMEOUT)

    engine.close()

    assert set(threading.enumerate()) <= before
    had = len(running.all)
    with pytest.raises(EngineError, match="the engine has stopped"):
        engine.submit(request(), Stream())
    assert len(running.all) == had
    assert engine.active() == 0 or not running.finished
    engine.close()


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown engine 'none'; known are"):
        create_engine({"engine": "none"})


# The engine on transformers, against transformers' own generate()


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[TransformersEngine]:
    made = create_engine(ENGINES["transformers"](demo_model))
    assert isinstance(made, TransformersEngine)
    yield made
    made.close()


@pytest.fixture(scope="module")
def llm(engine: TransformersEngine) -> Requests:
    return Requests(engine)


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model).eval()


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return load_tokenizer(str(demo_model))


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Questions whose answers the model knows by heart, each token with a wide margin."""
    return [tokenizer(pair.question).input_ids for pair in PAIRS]


def generate(model: Any, prompt: list[int], **values: Any) -> list[int]:
    output = model.generate(torch.tensor([prompt]), do_sample=False, **values)
    return list(output[0, len(prompt) :].tolist())


def next_logits(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The logits before each token of the output, shape [tokens, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0].float()
    return torch.as_tensor(logits[len(prompt) - 1 : -1])


def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> None:
    """Each token is the likeliest one, but for rounding: kernels differ where two are as likely."""
    logits = next_logits(model, prompt, output)
    taken = logits.gather(1, torch.tensor(output).unsqueeze(-1)).squeeze(-1)
    assert float((logits.amax(-1) - taken).max()) < 1e-3


UNUSUAL = [
    i
    for i, pair in enumerate(PAIRS)
    if sum(not c.isascii() for c in pair.answer) > 5 and len(pair.answer) < 200
]


def test_the_unusual_prompts_are_there() -> None:
    answers = "".join(PAIRS[i].answer for i in UNUSUAL)
    assert all(character in answers for character in ("学", "デ", "ß", "🚀", "\u200d"))


@pytest.mark.parametrize("index", [0, 1, 55, *UNUSUAL])
def test_greedy_ids_are_those_of_generate(
    llm: Requests, reference: Any, tokenizer: Any, prompts: list[list[int]], index: int
) -> None:
    wanted = generate(reference, prompts[index], max_new_tokens=120)
    assert tokenizer.decode(wanted, skip_special_tokens=True) == PAIRS[index].answer

    ids = llm.ids(prompts[index], max_tokens=120, end_id=tokenizer.eos_token_id)

    assert ids == wanted
    assert ids[-1] == tokenizer.eos_token_id


def test_many_prompts_at_once_whose_prefill_crosses_batches(
    llm: Requests, tokenizer: Any, prompts: list[list[int]]
) -> None:
    assert sum(map(len, prompts[:40])) > CPU_BATCH_TOKENS
    streams = [llm.start(p, max_tokens=100, end_id=tokenizer.eos_token_id) for p in prompts[:40]]

    answers = [tokenizer.decode(stream.wait().ids[:-1]) for stream in streams]

    assert answers == [pair.answer for pair in PAIRS[:40]]


@pytest.mark.parametrize("length", [CPU_BATCH_TOKENS - 1, CPU_BATCH_TOKENS, 700])
def test_a_long_prompt_is_prefilled_in_pieces(
    llm: Requests, reference: Any, prompts: list[list[int]], length: int
) -> None:
    prompt = [token for one in prompts for token in one][:length]
    prompt += prompt[: length - len(prompt)]
    others = [llm.start(one, max_tokens=60) for one in prompts[:3]]

    ids = llm.ids(prompt, max_tokens=20)

    assert len(prompt) == length
    assert_greedy(reference, prompt, ids)
    for prompt, other in zip(prompts, others, strict=False):
        assert_greedy(reference, prompt, other.wait().ids)


def test_equal_beginnings_share_the_cache(
    llm: Requests, reference: Any, prompts: list[list[int]]
) -> None:
    beginning = [token for one in prompts for token in one][: 3 * CPU_PAGE_TOKENS]
    for one in prompts[:3]:
        assert_greedy(reference, beginning + one, llm.ids(beginning + one, max_tokens=10))


def test_without_an_end_id_nothing_ends_early(
    llm: Requests, tokenizer: Any, prompts: list[list[int]]
) -> None:
    ids = llm.ids(prompts[25], max_tokens=60)
    assert len(ids) == 60
    assert tokenizer.eos_token_id in ids


@pytest.mark.parametrize("seed", [0, 1, MAX_SEED])
def test_a_seed_gives_the_same_ids_alone_and_among_others(
    llm: Requests, prompts: list[list[int]], seed: int
) -> None:
    sampling = replace(RANDOM, seed=seed)
    alone = llm.ids(prompts[0], max_tokens=30, sampling=sampling)

    others = [
        llm.start(p, max_tokens=25 + i, sampling=replace(RANDOM, top_k=i % 3 * 20, seed=i))
        for i, p in enumerate(prompts[:10])
    ]
    among = llm.ids(prompts[0], max_tokens=30, sampling=sampling)
    for stream in others:
        stream.wait()

    assert among == alone
    assert llm.ids(prompts[0], max_tokens=30, sampling=replace(sampling, seed=seed ^ 7)) != alone


def test_different_seeds_differ(llm: Requests, prompts: list[list[int]]) -> None:
    seeds = [0, 1, 2, 3, 2**32, 2**63, MAX_SEED]
    streams = [
        llm.start(prompts[0], max_tokens=30, sampling=replace(RANDOM, seed=seed)) for seed in seeds
    ]
    assert len({tuple(stream.wait().ids) for stream in streams}) == len(seeds)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, top_p=1.0),
        SamplingParams(temperature=1.5, top_k=1),
        SamplingParams(temperature=1.5, top_p=1e-6),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=1e-6, top_p=1.0),
    ],
)
def test_what_else_is_greedy(
    llm: Requests, prompts: list[list[int]], sampling: SamplingParams
) -> None:
    greedy = llm.ids(prompts[0], max_tokens=40)
    assert llm.ids(prompts[0], max_tokens=40, sampling=replace(sampling, seed=5)) == greedy
    random = replace(RANDOM, seed=5)
    assert llm.ids(prompts[0], max_tokens=40, sampling=random) != greedy


def test_min_tokens(llm: Requests, tokenizer: Any, prompts: list[list[int]]) -> None:
    end_id = tokenizer.eos_token_id
    answer = llm.ids(prompts[25], max_tokens=80, end_id=end_id)

    def with_minimum(count: int) -> list[int]:
        sampling = SamplingParams(min_tokens=count)
        return llm.ids(prompts[25], max_tokens=80, end_id=end_id, sampling=sampling)

    length = len(answer) - 1  # the end token may follow so many
    assert with_minimum(length) == answer
    longer = with_minimum(length + 5)
    assert longer[:length] == answer[:-1]
    assert end_id not in longer[: length + 5]


def test_bad_words(llm: Requests, prompts: list[list[int]]) -> None:
    prompt = prompts[0]
    answer = llm.ids(prompt, max_tokens=40)

    def without(*words: tuple[int, ...]) -> list[int]:
        return llm.ids(prompt, max_tokens=40, sampling=SamplingParams(bad_words=words))

    single = (answer[4],)
    double = (answer[6], answer[7])
    across = (prompt[-1], answer[0])
    assert single[0] not in without(single)
    assert without(double)[:7] == answer[:7]
    assert double not in pairwise(without(double))
    assert without(across)[0] != answer[0]
    both = without(single, double)
    assert single[0] not in both
    assert double not in pairwise(both)
    assert without((prompt[0], answer[0]), (answer[0], answer[2])) == answer  # they do not occur


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 8.0},
        {"presence_penalty": 12.0},
        {"frequency_penalty": 15.0},
        {"repetition_penalty": 4.0, "presence_penalty": -1.0, "frequency_penalty": 4.0},
    ],
)
def test_penalties(
    llm: Requests, reference: Any, prompts: list[list[int]], values: dict[str, Any]
) -> None:
    prompt, sampling = prompts[0], SamplingParams(**values)

    streams = [
        llm.start(prompt, max_tokens=40, sampling=sampling),
        llm.start(prompt, max_tokens=40),
        llm.start(prompts[1], max_tokens=40, sampling=sampling),
    ]
    ids, plain, other = (stream.wait().ids for stream in streams)

    assert ids != plain
    for tokens, beginning in ((ids, prompt), (other, prompts[1])):
        logits = next_logits(reference, beginning, tokens)
        for i, token in enumerate(tokens):
            asked = request(beginning, sampling=sampling)
            history = History(asked, logits.shape[-1], torch.device("cpu"))
            history.extend(tokens[:i])
            row = history.penalize(logits[i])
            assert float(row.max() - row[token]) < 1e-3


def test_a_repetition_penalty_is_the_one_of_generate(
    llm: Requests, reference: Any, prompts: list[list[int]]
) -> None:
    wanted = generate(reference, prompts[0], max_new_tokens=20, repetition_penalty=1.2)
    sampling = SamplingParams(repetition_penalty=1.2)
    assert llm.ids(prompts[0], max_tokens=len(wanted), sampling=sampling) == wanted


def test_log_probs_are_those_of_the_models_distribution(
    llm: Requests, reference: Any, prompts: list[list[int]]
) -> None:
    streams = [
        llm.start(prompts[i], max_tokens=30, return_log_probs=True, sampling=sampling)
        for i, sampling in enumerate(
            [SamplingParams(), RANDOM, SamplingParams(top_k=5, presence_penalty=-8.0, seed=3)]
        )
    ]
    for prompt, stream in zip(prompts, streams, strict=False):
        ids = stream.wait().ids
        wanted = next_logits(reference, prompt, ids).log_softmax(-1)
        wanted = wanted.gather(1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)
        assert stream.log_probs == pytest.approx(wanted.tolist(), abs=2e-3)


# When the KV cache is full


SMALL_CONTEXT = 256


class Crowded:
    """An engine whose KV cache holds little more than one sequence of its context."""

    def __init__(self, model: Path, **more: str) -> None:
        least = SMALL_CONTEXT + 2 * CPU_PAGE_TOKENS
        engine = create_engine(
            {
                **ENGINES["transformers"](model),
                "max_seq_len": str(SMALL_CONTEXT),
                "max_tokens_in_paged_kv_cache": str(least),
                **more,
            }
        )
        assert isinstance(engine, TransformersEngine)
        self.engine = engine
        self.requests = Requests(engine)
        processor = engine._manager.batch_processor
        self.scheduler = processor.scheduler
        self.resets = 0
        self.on_reset: Callable[[], object] = lambda: None
        manager = processor.offloading_manager
        offload = manager.offload_requests

        def counted() -> bool:
            done: bool = offload()
            if self.scheduler.block_new_requests:
                self.resets += 1
                self.on_reset()
            return done

        manager.offload_requests = counted


@pytest.fixture
def crowded(demo_model: Path) -> Iterator[Crowded]:
    made = Crowded(demo_model)
    yield made
    made.engine.close()


def test_more_requests_than_the_cache_holds(
    crowded: Crowded, llm: Requests, prompts: list[list[int]]
) -> None:
    samplings = [
        SamplingParams(),
        replace(RANDOM, seed=1),
        replace(RANDOM, seed=2, frequency_penalty=0.5, repetition_penalty=1.1),
        SamplingParams(presence_penalty=1.0, bad_words=((40,), (41, 42))),
        replace(RANDOM, top_p=0.9, seed=MAX_SEED),
        SamplingParams(),
    ]
    values: list[dict[str, Any]] = [
        {"input_ids": prompts[i] * 4, "sampling": s, "max_tokens": 150, "return_log_probs": True}
        for i, s in enumerate(samplings)
    ]
    values[1]["top_log_probs"] = 1
    wanted = [llm.start(**one) for one in values]
    streams = [crowded.requests.start(**one) for one in values]

    for stream, other in zip(streams, wanted, strict=True):
        assert stream.wait().ids == other.wait().ids
        assert stream.log_probs == pytest.approx(other.log_probs, abs=2e-3)
        assert all(len(tokens.ids) == 1 for tokens in stream.all)
    assert [token.id for token in streams[1].told] == streams[1].ids
    assert {len(token.top) for token in streams[1].told} == {1}
    assert crowded.resets > 0
    assert crowded.engine.active() == 0


def test_a_prompt_that_goes_through_the_model_twice_is_told_of_once(
    crowded: Crowded, prompts: list[list[int]]
) -> None:
    asked = [one * 3 for one in prompts[:4]]
    streams = [
        crowded.requests.start(one, max_tokens=150, return_log_probs=True, prompt_log_probs=True)
        for one in asked
    ]
    for one, stream in zip(asked, streams, strict=True):
        told = [token for tokens in stream.wait().all for token in tokens.prompt_log_probs]
        assert [token.id for token in told] == one
    assert crowded.resets > 0


def test_an_abort_lets_in_what_waits_for_room(crowded: Crowded, prompts: list[list[int]]) -> None:
    keys: dict[str, Stream] = {}
    kept = threading.Event()

    def abort_the_running() -> None:
        if not kept.is_set():
            kept.set()
            for key in list(crowded.scheduler.active_requests):
                crowded.engine.abort(key)
                del keys[key]

    crowded.on_reset = abort_the_running
    for i in range(4):
        one = request(prompts[i] * 4, max_tokens=180)
        keys[one.key] = Stream()
        crowded.engine.submit(one, keys[one.key])

    assert kept.wait(TIMEOUT)
    assert 0 < len(keys) < 4
    for stream in list(keys.values()):
        assert len(stream.wait().ids) == 180


# What must not end the engine


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": [5, 5000]}, "token ids must be between 0 and 1023"),
        ({"input_ids": [-1]}, "token ids must be between 0 and 1023"),
        ({"end_id": 1024}, r"EndId \(1024\) is not within acceptable range \[-1, 1024\)"),
        (
            {"sampling": SamplingParams(bad_words=((5, 1024),))},
            "token ids must be between 0 and 1023",
        ),
    ],
)
def test_ids_that_the_model_does_not_have(
    llm: Requests, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        llm.start(**values)
    assert llm.engine.active() == 0
    assert len(llm.ids()) == 8


def test_a_cancellation_that_overtakes_its_request_is_repeated(
    engine: TransformersEngine, llm: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel, lost = engine._manager.cancel_queue.put, threading.Event()

    def lose_the_first(key: str) -> None:
        if lost.is_set():
            cancel(key)
        lost.set()

    monkeypatch.setattr(engine._manager.cancel_queue, "put", lose_the_first)
    one = request(max_tokens=500)
    engine.submit(one, Stream())
    engine.abort(one.key)
    assert lost.is_set()

    llm.ids(max_tokens=20)  # by its end the engine has come to the second

    assert one.key not in engine._manager.batch_processor.scheduler.active_requests


def test_when_the_model_fails_everything_ends_with_the_reason(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_engine(ENGINES["transformers"](demo_model))
    assert isinstance(engine, TransformersEngine)
    runner = engine._manager.batch_processor.model_runner

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    def break_it(stream: Stream) -> None:
        if len(stream.all) == 3:
            monkeypatch.setattr(runner, "_sample", fail)

    streams = [Stream(break_it), Stream()]
    for stream in streams:
        engine.submit(request(max_tokens=100), stream)
    for stream in streams:
        while not (last := stream.next()).finished:
            pass
        assert last.error == "the engine has stopped: out of memory"
        assert last.ids == []
        assert len(stream.ids) < 10
    assert engine.active() == 0
    with pytest.raises(EngineError, match="the engine has stopped: out of memory"):
        engine.submit(request(), Stream())
    engine.close()


# Its configuration


def test_a_cache_that_cannot_hold_a_sequence_is_refused(demo_model: Path) -> None:
    with pytest.raises(
        ValueError, match=r"max_tokens_in_paged_kv_cache=128 .* 256 tokens; 320 is the least"
    ):
        create_engine(
            {
                **ENGINES["transformers"](demo_model),
                "max_seq_len": "256",
                "max_tokens_in_paged_kv_cache": "128",
            }
        )


def test_batching(reference: Any) -> None:
    config = batching_config(reference, 2048, {})
    tokens = config.num_blocks * CPU_PAGE_TOKENS
    text = reference.config
    per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    # With the attention mask that goes with it.
    used = tokens * (per_token + CPU_BATCH_TOKENS * 4)
    assert CPU_CACHE_BYTES * 0.99 < used <= CPU_CACHE_BYTES
    assert config.allow_block_sharing

    config = batching_config(
        reference,
        512,
        {"enable_kv_cache_reuse": "false", "max_tokens_in_paged_kv_cache": "1000"},
    )
    assert not config.allow_block_sharing
    assert config.num_blocks == 1000 // CPU_PAGE_TOKENS


def test_max_seq_len_cannot_exceed_the_models(demo_model: Path, llm: Requests) -> None:
    assert llm.engine.context_length == 2048
    engine = create_engine({**ENGINES["transformers"](demo_model), "max_seq_len": "100000"})
    assert engine.context_length == 2048
    engine.close()


# Log probabilities, biases and limits, against the model's own logits


def test_log_probs_have_the_most_likely_tokens_of_the_unchanged_distribution(
    llm: Requests, reference: Any, prompts: list[list[int]]
) -> None:
    sampling = replace(RANDOM, presence_penalty=2.0, min_p=0.01)
    values: dict[str, Any] = {"sampling": sampling, "logit_bias": {9: 3.0}, "max_tokens": 20}
    asking: dict[str, Any] = {"return_log_probs": True, "top_log_probs": 3}

    stream = llm.start(prompts[0], **values, **asking)
    one = llm.start(prompts[0], **values, return_log_probs=True, top_log_probs=1)
    none = llm.start(prompts[0], **values)
    top = [token.top for token in stream.wait().told]

    likeliest = [place[0] for place in top]
    [ids, log_probs] = zip(*(token.top[0] for token in one.wait().told), strict=True)
    assert [token for token, _ in likeliest] == [*ids]
    assert [value for _, value in likeliest] == pytest.approx(log_probs, abs=1e-3)
    assert none.wait().told == []
    logits = next_logits(reference, prompts[0], stream.ids).log_softmax(-1)
    expected = logits.topk(3)
    for place, values_, chosen, token in zip(
        top, expected.values.tolist(), stream.log_probs, stream.ids, strict=True
    ):
        assert [value for _, value in place] == pytest.approx(values_, abs=1e-3)
        assert dict(place).get(token, chosen) == chosen  # the same number, not one nearly the same
    assert [logits[i, t].item() for i, t in enumerate(stream.ids)] == pytest.approx(
        stream.log_probs, abs=1e-3
    )


@pytest.mark.parametrize("length", [1, CPU_PAGE_TOKENS, 700])
def test_log_probs_of_the_prompt_are_those_of_the_models_distribution(
    llm: Requests, reference: Any, prompts: list[list[int]], length: int
) -> None:
    """In pieces, beside other requests, and where others have had the same beginning."""
    prompt = ([token for one in prompts for token in one] * 9)[:length]
    llm.ids(prompt)
    others = [llm.start(one, max_tokens=60, return_log_probs=True) for one in prompts[:3]]
    asking: dict[str, Any] = {"return_log_probs": True, "top_log_probs": 2}
    streams = [llm.start(prompt, prompt_log_probs=True, **asking) for _ in range(2)]
    without = llm.start(prompt, **asking).wait()

    expected = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    most = expected.topk(2).values
    for stream in streams:
        told = stream.wait().all[0].prompt_log_probs
        assert [one.id for one in told] == prompt
        assert told[0] == TokenLogProb(prompt[0], 0.0)
        for i, one in enumerate(told[1:]):
            assert one.log_prob == pytest.approx(expected[i, one.id].item(), abs=2e-3)
            assert [v for _, v in one.top] == pytest.approx(most[i].tolist(), abs=2e-3)
            assert dict(one.top).get(one.id, one.log_prob) == one.log_prob
        assert not any(tokens.prompt_log_probs for tokens in stream.all[1:])
        assert stream.ids == without.ids
    assert not any(tokens.prompt_log_probs for tokens in without.all)
    for beginning, other in zip(prompts, others, strict=False):
        assert_greedy(reference, beginning, other.wait().ids)
        assert len(other.log_probs) == 60


def test_a_bias_is_added_to_the_logits(
    llm: Requests, reference: Any, tokenizer: Any, prompts: list[list[int]]
) -> None:
    limits: dict[str, Any] = {"max_tokens": 30, "end_id": tokenizer.eos_token_id}
    plain = llm.ids(prompts[0], **limits)
    bias = {plain[0]: -20.0, plain[3]: -6.0, 264: 2.5}
    pairs = [[[token], value] for token, value in bias.items()]

    wanted = generate(reference, prompts[0], max_new_tokens=30, sequence_bias=pairs)

    assert llm.ids(prompts[0], logit_bias=bias, **limits) == wanted
    assert wanted != plain
    assert llm.ids(prompts[0], max_tokens=5, logit_bias={7: 1000.0}) == [7] * 5


@pytest.mark.parametrize("seed", [1, 2])
def test_only_allowed_tokens_are_chosen(llm: Requests, prompts: list[list[int]], seed: int) -> None:
    sampled = SamplingParams(temperature=5.0, top_p=1.0, seed=seed)
    for sampling in (SamplingParams(), sampled, replace(sampled, frequency_penalty=1.0)):
        ids = llm.ids(prompts[0], max_tokens=30, allowed_ids=(264, 270), sampling=sampling)
        assert len(ids) == 30
        assert {*ids} <= {264, 270}
    assert {*ids} == {264, 270}
    with pytest.raises(EngineError, match="token ids must be between 0 and"):
        llm.ids(prompts[0], allowed_ids=(10**6,))


def test_without_an_end_token_the_minimum_and_the_maximum_are_as_before(
    llm: Requests, prompts: list[list[int]]
) -> None:
    sampling = SamplingParams(min_tokens=60)
    assert llm.ids(prompts[25], max_tokens=60, sampling=sampling) == llm.ids(
        prompts[25], max_tokens=60
    )
