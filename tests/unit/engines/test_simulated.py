from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.deployment.preparation import template_values
from cog_triton.deployment.running import WARM_UP
from cog_triton.engines.base import (
    EngineError,
    GenerationRequest,
    SamplingParams,
    Step,
    Steps,
    TokenLogProb,
    create_engine,
)
from cog_triton.engines.simulated import (
    BURST,
    SPARED_TOKENS,
    TICK,
    Costs,
    Failure,
    FailureKind,
    Failures,
    SimulatedEngine,
)
from cog_triton.errors import (
    ConfigurationError,
    TemplateError,
    TritonOverloaded,
    TritonUnknownError,
    error_from_text,
)
from cog_triton.repository.fill import fill_repository
from cog_triton.repository.variables import VARIABLES
from cog_triton.settings import Settings, read_settings
from cog_triton.text.tokenizer import load_tokenizer

TIMEOUT = 20
TEXT = [10, 11, 12, 13]
MakeEngine = Callable[..., SimulatedEngine]
TEMPLATES = Path(__file__).resolve().parents[3] / "triton_model_repo"


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock moves only by waiting, which takes no time. It stops when nothing is due."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector.select = self._wait  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    def _wait(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            self.stop()
        self.now += timeout or 0.0
        return []


class Clockwork:
    """An engine's requests by a clock that stands still until it is moved."""

    def __init__(self, engine: SimulatedEngine, loop: VirtualLoop) -> None:
        self.engine, self.loop = engine, loop
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.log: list[tuple[float, str, Step]] = []

    def submit(
        self, key: str, prompt_tokens: int = 1, failure: Failure | None = None, **values: Any
    ) -> None:
        request = GenerationRequest(key, [4] * prompt_tokens, **{"max_tokens": 8, **values})
        steps = self.engine._generate(request, failure, self.loop.now)
        self.tasks[key] = self.loop.create_task(self._consume(key, steps))

    async def _consume(self, key: str, steps: Steps) -> None:
        async with aclosing(steps):
            async for step in steps:
                self.log.append((self.loop.now, key, step))

    def abort(self, key: str) -> None:
        self.tasks[key].cancel()

    def run(self, until: float = math.inf) -> None:
        if until < math.inf:
            self.loop.call_at(until, self.loop.stop)
        self.loop.run_forever()

    def ids(self, key: str) -> list[int]:
        return [token for _, name, tokens in self.log if name == key for token in tokens.ids]

    def times(self, key: str) -> list[float]:
        return [at for at, name, _ in self.log if name == key]

    def first(self, key: str) -> float:
        return self.times(key)[0]


MakeClockwork = Callable[..., Clockwork]


@pytest.fixture
def clockworks(engines: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeClockwork]:
    loop = VirtualLoop()
    monkeypatch.setattr("cog_triton.engines.simulated.monotonic", loop.time)

    def make(text: list[int] = TEXT, **costs: Any) -> Clockwork:
        return Clockwork(engines(text, Costs(**costs)), loop)

    yield make
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_forever()
    loop.close()


def exactly(*times: float) -> Any:
    return pytest.approx(list(times), abs=1e-9)


# The pace


def test_tokens_come_one_inter_token_latency_apart_after_the_prefill(
    clockworks: MakeClockwork,
) -> None:
    clockwork = clockworks(prefill=0.05, inter_token=0.02)
    clockwork.submit("a", max_tokens=4)
    clockwork.run(until=0.015)
    clockwork.submit("b", max_tokens=2)
    clockwork.run()
    assert clockwork.times("a") == exactly(0.05, 0.07, 0.09, 0.11)
    assert clockwork.times("b") == exactly(0.065, 0.085)
    assert all(len(tokens.ids) == 1 for _, _, tokens in clockwork.log)


def test_a_pace_faster_than_a_tick_keeps_its_rate(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(inter_token=TICK / 5)
    clockwork.submit("a", max_tokens=1000)
    clockwork.run()
    assert len(clockwork.ids("a")) == 1000
    assert clockwork.loop.now == pytest.approx(1000 * TICK / 5, abs=2 * TICK)


# The prefill


def test_prompts_are_prefilled_one_after_another(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill_rate=1000, inter_token=1)
    for key, length in (("a", 100), ("b", 100), ("c", 300)):
        clockwork.submit(key, length)
    clockwork.run()
    assert [clockwork.first(key) for key in "abc"] == exactly(0.1, 0.2, 0.5)


def test_the_fixed_latencies_of_prompts_overlap(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill=0.5, prefill_rate=1000, inter_token=1)
    for key in "abc":
        clockwork.submit(key, 100)
    clockwork.run()
    assert [clockwork.first(key) for key in "abc"] == exactly(0.6, 0.7, 0.8)


def test_decoding_goes_on_while_others_are_prefilled(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill_rate=1000, inter_token=0.01)
    clockwork.submit("a", 10, max_tokens=10)
    clockwork.submit("b", 1000)
    clockwork.run()
    assert clockwork.times("a") == exactly(*(0.01 * i for i in range(1, 11)))
    assert clockwork.first("b") == pytest.approx(1.01)


def test_a_prompt_that_finds_nobody_before_it_begins_at_once(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill_rate=1000, inter_token=1)
    clockwork.submit("a", 100)
    clockwork.run(until=0.3)
    clockwork.submit("b", 100)
    clockwork.run()
    assert clockwork.first("b") == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("aborted", "firsts"),
    [("a", {"b": 0.15, "c": 0.25}), ("b", {"a": 0.1, "c": 0.2}), ("c", {"a": 0.1, "b": 0.2})],
)
def test_an_aborted_prompt_leaves_its_share_to_those_behind_it(
    clockworks: MakeClockwork, aborted: str, firsts: dict[str, float]
) -> None:
    clockwork = clockworks(prefill_rate=1000, inter_token=1)
    for key in "abc":
        clockwork.submit(key, 100)
    clockwork.run(until=0.05)
    clockwork.abort(aborted)
    clockwork.run()
    assert {key: clockwork.first(key) for key in firsts} == pytest.approx(firsts)
    assert not clockwork.times(aborted)


# The maximum batch


def test_requests_queue_first_come_first_served(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill=0.1, inter_token=0.1, max_batch=2)
    for key, tokens in (("a", 5), ("b", 2), ("c", 2), ("d", 9)):
        clockwork.submit(key, max_tokens=tokens)
    clockwork.run()
    # b ends at 0.2 and c begins, c at 0.4 and d.
    assert [clockwork.first(key) for key in "abcd"] == exactly(0.1, 0.1, 0.3, 0.5)


def test_a_queued_request_begins_when_a_running_one_is_aborted(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill=0.1, inter_token=0.1, max_batch=1)
    for key in "abc":
        clockwork.submit(key)
    clockwork.run(until=0.25)
    clockwork.abort("a")
    clockwork.run()
    assert clockwork.first("b") == pytest.approx(0.35)
    assert clockwork.times("a") == exactly(0.1, 0.2)


def test_aborting_a_queued_request_frees_nothing_else(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill=0.1, inter_token=0.1, max_batch=1)
    for key in "abc":
        clockwork.submit(key, max_tokens=3)
    clockwork.run(until=0.15)
    clockwork.abort("b")
    clockwork.run()
    assert clockwork.times("a") == exactly(0.1, 0.2, 0.3)
    assert clockwork.times("b") == []
    assert clockwork.times("c") == exactly(0.4, 0.5, 0.6)


def test_a_prompt_needs_a_slot_to_be_prefilled(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill_rate=1000, inter_token=0.1, max_batch=1)
    clockwork.submit("a", 100, max_tokens=3)
    clockwork.submit("b", 100)
    clockwork.run()
    assert clockwork.first("b") == pytest.approx(0.1 + 2 * 0.1 + 0.1)


def test_aborting_who_holds_a_slot_in_prefill_passes_both_on(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill_rate=1000, inter_token=1, max_batch=2)
    for key in "abc":
        clockwork.submit(key, 100)
    clockwork.run(until=0.05)
    clockwork.abort("a")
    clockwork.run()
    assert [clockwork.first(key) for key in "bc"] == exactly(0.15, 0.25)


# Late


def test_late_tokens_come_in_one_batch_and_the_next_ones_on_time(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill=0.01, inter_token=0.01)
    clockwork.submit("a", max_tokens=20)
    clockwork.loop.now = 0.055  # the tokens of 10, 20, 30, 40 and 50 ms
    clockwork.run()
    assert [len(tokens.ids) for _, _, tokens in clockwork.log] == [5] + [1] * 15
    assert clockwork.times("a")[:2] == exactly(0.055, 0.06)
    assert clockwork.loop.now == pytest.approx(0.2)


def test_catching_up_ends_exactly_and_in_bursts(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(inter_token=0.001)
    clockwork.submit("a", max_tokens=2 * BURST + 3)
    clockwork.loop.now = 100.0
    clockwork.run()
    assert [len(tokens.ids) for _, _, tokens in clockwork.log] == [BURST, BURST, 3]
    assert [tokens.finished for _, _, tokens in clockwork.log] == [False, False, True]


def test_a_late_prompt_is_prefilled_as_if_on_time_but_not_before_it_was_there(
    clockworks: MakeClockwork,
) -> None:
    clockwork = clockworks(prefill_rate=1000, inter_token=1)
    clockwork.submit("a", 100)
    clockwork.submit("b", 100)
    clockwork.loop.now = 0.35  # by then a and b are through
    clockwork.submit("c", 100)
    clockwork.run()
    assert [clockwork.first(key) for key in "abc"] == exactly(0.35, 0.35, 0.45)


def test_a_slot_is_given_away_late_as_if_on_time(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill=0.1, inter_token=0.1, max_batch=1)
    clockwork.submit("a", max_tokens=3)
    clockwork.submit("b", max_tokens=2)
    clockwork.loop.now = 0.45  # a has ended at 0.3, and b has begun at 0.4
    clockwork.run(until=1.1)
    assert clockwork.times("b") == exactly(0.45, 0.5)
    clockwork.submit("c", max_tokens=1)
    clockwork.run()
    assert clockwork.first("c") == pytest.approx(1.2), "it was not there at 0.5"


# Without costs


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 64, 1000])
def test_max_tokens_is_kept_exactly_and_the_text_is_whole(
    clockworks: MakeClockwork, tokens: int
) -> None:
    clockwork = clockworks()
    clockwork.submit("a", max_tokens=tokens)
    clockwork.run()
    assert clockwork.ids("a") == (TEXT * 1000)[:tokens]
    assert [t.finished for _, _, t in clockwork.log] == [False] * (len(clockwork.log) - 1) + [True]


def test_the_first_token_comes_alone_and_later_ones_in_batches(clockworks: MakeClockwork) -> None:
    clockwork = clockworks()
    clockwork.submit("a", max_tokens=1000)
    clockwork.run()
    sizes = [len(tokens.ids) for _, _, tokens in clockwork.log]
    assert sizes[0] == 1
    assert max(sizes) == BURST
    assert len(sizes) < 1000 / BURST + 10


def test_all_requests_get_a_batch_in_turn(clockworks: MakeClockwork) -> None:
    clockwork = clockworks()
    for key in "abc":
        clockwork.submit(key, max_tokens=500)
    clockwork.run()
    order = "".join(key for _, key, _ in clockwork.log)
    assert order == "abc" * (len(order) // 3)


@pytest.mark.parametrize("costs", [{}, {"inter_token": 0.0001}])
def test_the_end_token_ends_a_batch_and_is_part_of_it(
    clockworks: MakeClockwork, costs: Any
) -> None:
    text = list(range(50))
    clockwork = clockworks(text, **costs)
    clockwork.submit("a", 25, max_tokens=500, end_id=40)  # its text begins at 0
    clockwork.loop.now = 10.0
    clockwork.run()
    assert clockwork.ids("a") == text[:41]
    finished = [tokens.finished for _, _, tokens in clockwork.log]
    assert finished == [False] * (len(finished) - 1) + [True]
    assert len(clockwork.log[-1][2].ids) > 1


def test_every_token_has_a_log_probability_when_asked_for(clockworks: MakeClockwork) -> None:
    clockwork = clockworks()
    clockwork.submit("a", max_tokens=100, return_log_probs=True)
    clockwork.submit("b", max_tokens=100)
    clockwork.run()
    for _, key, tokens in clockwork.log:
        wanted = [TokenLogProb(token, 0.0) for token in tokens.ids]
        assert tokens.log_probs == (wanted if key == "a" else [])


# Failures


def request(i: int, **values: Any) -> GenerationRequest:
    return GenerationRequest(f"request {i}", [i, 7, 9], **{"max_tokens": 100, **values})


def ignore(_: Step) -> None:
    pass


def failing(kind: FailureKind, failures: Failures) -> GenerationRequest:
    outcomes = ((r, failures.of(r)) for r in map(request, range(1000)))
    return next(r for r, failure in outcomes if failure is not None and failure.kind == kind)


def test_which_requests_fail_depends_on_prompt_and_seed_alone() -> None:
    failures = Failures(0.3, ("error", "stall", "refuse"))
    of = [failures.of(request(i)) for i in range(500)]
    assert of == [Failures(0.3, failures.kinds).of(request(i)) for i in range(500)]
    assert of == [failures.of(replace(request(i), key="other")) for i in range(500)]
    assert of != [failures.of(request(i, sampling=SamplingParams(seed=1))) for i in range(500)]
    assert 100 < sum(failure is not None for failure in of) < 200
    assert {failure.kind for failure in of if failure} == set(failures.kinds)
    assert all(1 <= failure.after < 100 for failure in of if failure)
    assert len({failure.after for failure in of if failure}) > 20


def test_the_same_request_does_the_same_in_every_process() -> None:
    """Values that were written down: nothing of a process, such as the seed of its hashes, counts."""
    failures = Failures(0.3, ("error", "stall", "refuse"))
    assert [i for i in range(15) if failures.of(request(i))] == [0, 1, 3, 4, 9, 12, 14]
    assert failures.of(request(0)) == Failure("error", after=31)
    assert failures.of(request(1)) == Failure("stall", after=32)
    assert failures.of(request(4)) == Failure("refuse", after=92)


def test_a_higher_rate_adds_requests_to_those_that_fail() -> None:
    few, more = Failures(0.1), Failures(0.5)
    assert all(more.of(request(i)) for i in range(300) if few.of(request(i)))


def test_no_request_fails_at_rate_0_and_every_one_at_1() -> None:
    assert not any(Failures(0.0).of(request(i)) for i in range(100))
    assert all(Failures(1.0).of(request(i)) for i in range(100))


@pytest.mark.parametrize("tokens", range(SPARED_TOKENS + 1, 6))
def test_a_short_request_fails_midway_too(tokens: int) -> None:
    of = [Failures(1.0).of(request(i, max_tokens=tokens)) for i in range(50)]
    assert {failure.after for failure in of if failure} == set(range(1, tokens))


def test_the_warm_up_never_fails() -> None:
    assert WARM_UP.max_tokens <= SPARED_TOKENS
    assert not any(Failures(1.0).of(request(i, max_tokens=SPARED_TOKENS)) for i in range(50))


@pytest.mark.parametrize("costs", [{}, {"inter_token": 0.01}])
def test_an_error_comes_after_a_part_of_the_tokens_and_frees_the_slot(
    clockworks: MakeClockwork, costs: Any
) -> None:
    clockwork = clockworks(max_batch=1, **costs)
    clockwork.submit("a", failure=Failure("error", 5), max_tokens=8)
    clockwork.submit("b")
    clockwork.run()
    assert len(clockwork.ids("a")) == 5
    last = [tokens for _, key, tokens in clockwork.log if key == "a"][-1]
    assert last.finished
    assert last.error == "a simulated failure after 5 tokens (simulated_failure_rate)"
    assert isinstance(error_from_text(last.error), TritonUnknownError)
    assert len(clockwork.ids("b")) == 8


def test_a_stalled_request_keeps_its_slot_until_it_is_aborted(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(max_batch=1, inter_token=0.01)
    clockwork.submit("a", failure=Failure("stall", 5), max_tokens=8)
    clockwork.submit("b")
    clockwork.run()
    assert len(clockwork.ids("a")) == 5
    assert not any(tokens.finished for _, _, tokens in clockwork.log)
    clockwork.abort("a")
    clockwork.run()
    assert len(clockwork.ids("b")) == 8


def test_a_refusal_looks_like_a_full_queue(engines: MakeEngine) -> None:
    failures = Failures(0.3, ("error", "refuse"))
    engine = engines(TEXT, None, failures)
    with pytest.raises(EngineError, match="simulated") as refusal:
        engine.submit(failing("refuse", failures), ignore)
    assert isinstance(error_from_text(str(refusal.value)), TritonOverloaded)
    assert engine.active() == 0


def test_an_unknown_failure() -> None:
    with pytest.raises(ValueError, match="unknown failure 'crash'; known are error, stall, refuse"):
        Failures(0.1, ("crash",))  # type: ignore[arg-type]


# The engine


@pytest.fixture
def engines() -> Iterator[MakeEngine]:
    engines: list[SimulatedEngine] = []

    def make(*arguments: Any, **options: Any) -> SimulatedEngine:
        engines.append(SimulatedEngine(*arguments, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def generate(engine: Any, input_ids: list[int], key: str = "a", **values: Any) -> list[int]:
    tokens: queue.SimpleQueue[Step] = queue.SimpleQueue()
    engine.submit(GenerationRequest(key, input_ids, **values), tokens.put)
    ids: list[int] = []
    while True:
        new = tokens.get(timeout=TIMEOUT)
        ids += new.ids
        if new.finished:
            return ids


def test_the_text_is_read_from_a_place_of_the_prompts(engines: MakeEngine) -> None:
    engine = engines(TEXT)
    assert generate(engine, [4], max_tokens=6) == [10, 11, 12, 13, 10, 11]
    assert generate(engine, [1, 2], max_tokens=2) == [13, 10]


def test_the_engine_goes_by_the_clock(engines: MakeEngine) -> None:
    engine = engines(TEXT, Costs(prefill=0.02, prefill_rate=100, inter_token=0.02))
    times: list[float] = []
    done = threading.Event()

    def sink(tokens: Step) -> None:
        times.extend([time.perf_counter() - start] * len(tokens.ids))
        if tokens.finished:
            done.set()

    start = time.perf_counter()
    engine.submit(GenerationRequest("a", [1, 2, 3], 4), sink)
    assert done.wait(TIMEOUT)
    for i, at in enumerate(times):
        assert at >= 0.05 + i * 0.02 - 2 * TICK


def test_an_abort_wakes_up_an_engine_that_waits_for_something_far_off(engines: MakeEngine) -> None:
    engine = engines(TEXT, Costs(prefill_rate=1000, max_batch=1))
    engine.submit(GenerationRequest("long", [1] * 1_000_000, 4), ignore)
    tokens: queue.SimpleQueue[Step] = queue.SimpleQueue()
    engine.submit(GenerationRequest("short", [1], 1), tokens.put)
    assert engine.active() == 2
    time.sleep(0.05)  # let it begin to wait
    engine.abort("long")
    assert tokens.get(timeout=TIMEOUT).finished
    assert engine.active() == 0


def test_a_request_is_active_until_its_last_tokens_are_handed_over(engines: MakeEngine) -> None:
    engine = engines(TEXT, Costs(prefill=0.5))  # so that all end in one step
    active: list[int] = []
    done = threading.Semaphore(0)

    def sink(_: Step) -> None:
        active.append(engine.active())
        done.release()

    for key in "abc":
        engine.submit(GenerationRequest(key, [1], 1), sink)
    for _ in "abc":
        assert done.acquire(timeout=TIMEOUT)
    assert active == [2, 1, 0]


# What configures it


def test_the_parameters(demo_model: Path) -> None:
    engine = create_engine(
        {
            "engine": "simulated",
            "tokenizer_dir": str(demo_model),
            "simulated_prefill_ms": "20",
            "simulated_prefill_tokens_per_s": "200",
            "simulated_inter_token_ms": "3",
            "simulated_max_batch": "5",
            "simulated_failure_rate": "0.5",
            "simulated_failures": "stall,refuse",
        }
    )
    assert isinstance(engine, SimulatedEngine)
    assert engine._costs == Costs(0.02, 200, 0.003, 5)
    assert engine._failures == Failures(0.5, ("stall", "refuse"))
    assert engine.context_length == 131_072
    engine.close()


def test_without_parameters_it_costs_nothing_and_never_fails(demo_model: Path) -> None:
    engine = create_engine({"engine": "simulated", "tokenizer_dir": str(demo_model)})
    assert isinstance(engine, SimulatedEngine)
    assert engine._costs == Costs()
    assert engine._failures == Failures() == Failures(0.0, ("error",))
    engine.close()


def test_the_text_can_be_given_and_an_end_token_in_it_ends_answers(demo_model: Path) -> None:
    tokenizer = load_tokenizer(str(demo_model))
    text = "Fünf 🚀 words." + str(tokenizer.eos_token)
    engine = create_engine(
        {"engine": "simulated", "tokenizer_dir": str(demo_model), "simulated_text": text}
    )
    length = len(tokenizer(text, add_special_tokens=False).input_ids)
    ids = generate(engine, [length], max_tokens=500, end_id=tokenizer.eos_token_id)
    engine.close()
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["", "{eos}"])
@pytest.mark.parametrize("file", [True, False])
def test_a_text_without_tokens(
    text: str, file: bool, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(demo_model))
    monkeypatch.setattr("cog_triton.text.tokenizer.load_tokenizer", lambda _, **__: tokenizer)
    parameters = {
        "engine": "simulated",
        "tokenizer_dir": str(demo_model if file else tmp_path),
        "simulated_text": text.format(eos=tokenizer.eos_token),
    }
    with pytest.raises(ValueError, match=r"simulated_text .* has no tokens that make text"):
        create_engine(parameters)


def test_the_settings_reach_the_model(tmp_path: Path) -> None:
    text = 'Say "ä" \\ 🚀,\nor not.'
    parameters = filled_parameters(
        read_settings(
            {
                "SIMULATED_PREFILL_MS": "1.5",
                "SIMULATED_PREFILL_TOKENS_PER_S": "8000",
                "SIMULATED_INTER_TOKEN_MS": "9",
                "SIMULATED_MAX_BATCH": "64",
                "SIMULATED_FAILURE_RATE": "0.25",
                "SIMULATED_FAILURES": "stall,error",
                "SIMULATED_TEXT": text,
            }
        ),
        tmp_path,
    )
    assert parameters == {
        "simulated_prefill_ms": "1.5",
        "simulated_prefill_tokens_per_s": "8000.0",
        "simulated_inter_token_ms": "9.0",
        "simulated_max_batch": "64",
        "simulated_failure_rate": "0.25",
        "simulated_failures": "stall,error",
        "simulated_text": text,
    }


def test_the_defaults_of_the_settings_are_those_of_the_engine(tmp_path: Path) -> None:
    parameters = filled_parameters(read_settings({}), tmp_path)
    assert "simulated_text" not in parameters
    assert parameters.pop("simulated_failures") == "error"
    assert all(float(value) == 0 for value in parameters.values())


def filled_parameters(settings: Settings, directory: Path) -> dict[str, str]:
    """The simulated engine's parameters as Triton reads them."""
    fill_repository(TEMPLATES, directory / "filled", template_values(settings, "simulated"))
    text = (directory / "filled" / "tensorrt_llm" / "config.pbtxt").read_text()
    config = text_format.Parse(text, ModelConfig())
    return {
        key: parameter.string_value
        for key, parameter in config.parameters.items()
        if key.startswith("simulated_")
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PREFILL_MS", "-1"),
        ("PREFILL_TOKENS_PER_S", "-1"),
        ("PREFILL_TOKENS_PER_S", "fast"),
        ("MAX_BATCH", "-1"),
        ("MAX_BATCH", "1.5"),
        ("FAILURE_RATE", "1.01"),
        ("FAILURE_RATE", "-0.1"),
        ("FAILURE_RATE", "nan"),
        ("FAILURES", "crash"),
        ("FAILURES", "error,"),
        ("FAILURES", "error;stall"),
    ],
)
def test_a_setting_that_is_not_valid(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SIMULATED_{name}={value!r}"):
        read_settings({f"SIMULATED_{name}": value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("prefill_tokens_per_s", "inf", "a number of at least 0"),
        ("max_batch", -1, "an integer of at least 0"),
        ("failure_rate", 2, "a number from 0 to 1"),
        ("failures", "error,crash", "some of error, stall, refuse, separated by commas"),
        ("failures", [], "some of error, stall, refuse, separated by commas"),
        ("text", 5, "text, in quotes"),
    ],
)
def test_a_variable_that_is_not_valid(name: str, value: Any, expected: str, tmp_path: Path) -> None:
    values = template_values(read_settings({}), "simulated")
    values["tensorrt_llm"][f"simulated_{name}"] = value
    with pytest.raises(TemplateError, match=f"simulated_{name}: expected {expected}"):
        fill_repository(TEMPLATES, tmp_path / "filled", values)


def test_a_list_of_failures_may_be_one_in_the_file() -> None:
    variable = VARIABLES["tensorrt_llm"]["simulated_failures"]
    assert variable.render(["error", "stall"]) == variable.render("error, stall") == "error,stall"


def test_all_name_the_same_failures() -> None:
    kinds = get_args(FailureKind)
    assert VARIABLES["tensorrt_llm"]["simulated_failures"].choices == kinds
    assert read_settings({"SIMULATED_FAILURES": ",".join(kinds)})


@pytest.mark.parametrize("delivered", [1, 5, 39])
def test_an_output_that_is_continued_is_that_of_one_request(
    engines: MakeEngine, delivered: int
) -> None:
    def output(wanted: GenerationRequest) -> list[int]:
        return generate(engines(list(range(10, 27))), **vars(wanted))

    whole = output(GenerationRequest("a", [3, 4], max_tokens=40))
    rest = GenerationRequest(
        "b", [3, 4, *whole[:delivered]], max_tokens=40 - delivered, continued=delivered
    )
    assert output(rest) == whole[delivered:]


def test_a_request_that_is_continued_fails_where_it_would_have() -> None:
    failures = Failures(1.0, ("error",))
    first = request(1)
    failure = failures.of(first)
    assert failure is not None
    assert failure.after > 3
    rest = replace(first, input_ids=[*first.input_ids, 1, 2, 3], max_tokens=97, continued=3)
    assert failures.of(rest) == Failure("error", failure.after - 3)


def test_every_token_is_certain(demo_model: Path) -> None:
    engine = create_engine({"engine": "simulated", "tokenizer_dir": str(demo_model)})
    assert engine.features == {"min_p", "top_logprobs"}
    ended, streamed = threading.Event(), list[Step]()

    def sink(tokens: Step) -> None:
        streamed.append(tokens)
        if tokens.finished:
            ended.set()

    engine.submit(GenerationRequest("a", [5], 9, return_log_probs=True, top_log_probs=3), sink)
    assert ended.wait(20)
    engine.close()
    ids = [token for tokens in streamed for token in tokens.ids]
    places = [token.top for tokens in streamed for token in tokens.log_probs]
    assert [place[0] for place in places] == [(token, 0.0) for token in ids]
    assert all(len({token for token, _ in place}) == 3 for place in places)
    assert all(value < -9000 for place in places for _, value in place[1:])
