import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import tokenizers

from cog_triton.deployment.running import WARM_UP
from cog_triton.deployment.template_variables import template_values
from cog_triton.engines.base import GenerationRequest, SamplingParams, Step, TokenLogProb
from cog_triton.engines.event_loop import Steps
from cog_triton.engines.simulated import (
    BURST,
    Costs,
    Failure,
    FailureKind,
    Failures,
    SimulatedEngine,
)
from cog_triton.engines.simulated_text import text_ids
from cog_triton.errors import EngineUnavailable
from cog_triton.repository.fill import fill_repository, read_config
from cog_triton.settings import read_settings
from tests.engines import ENGINES, running
from tests.support import ROOT

TEXT = [10, 11, 12, 13]


class Clockwork(asyncio.SelectorEventLoop):
    """An engine's requests by a clock that moves only by waiting, until nothing is due."""

    engine: SimulatedEngine

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.log: list[tuple[float, str, Step]] = []
        self._selector.select = self._wait  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    def _wait(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            self.stop()
        self.now += timeout or 0.0
        return []

    def submit(self, *keys: str, prompt: Sequence[int] = (4,), **values: Any) -> None:
        for key in keys:
            request = GenerationRequest(key, [*prompt], **{"max_tokens": 8, **values})
            steps = self.engine._generate(request, None, self.now)
            self.tasks[key] = self.create_task(self._consume(key, steps))

    async def _consume(self, key: str, steps: Steps) -> None:
        async with aclosing(steps):
            async for step in steps:
                self.log.append((self.now, key, step))

    def run(self, until: float = math.inf, abort: str = "") -> None:
        """Runs to the end, or to a time at which a request may be aborted."""
        if until < math.inf:
            self.call_at(until, self.stop)
        self.run_forever()
        if abort:
            self.tasks[abort].cancel()
            self.run_forever()

    def sizes(self) -> list[int]:
        return [len(step.ids) for _, key, step in self.log if key == "a"]

    def ids(self) -> list[int]:
        return [token for _, key, step in self.log if key == "a" for token in step.ids]

    def times(self, key: str = "a") -> list[float]:
        return [at for at, name, _ in self.log if name == key]

    def firsts(self, keys: str) -> list[float]:
        return [self.times(key)[0] for key in keys]


MakeClockwork = Callable[..., Clockwork]


@pytest.fixture
def clockworks(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeClockwork]:
    loop = Clockwork()
    monkeypatch.setattr("cog_triton.engines.simulated.monotonic", loop.time)

    def make(text: list[int] = TEXT, **costs: Any) -> Clockwork:
        loop.engine = SimulatedEngine(text, Costs(**costs))
        return loop

    yield make
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_forever()
    loop.close()
    loop.engine.close()


def exactly(*times: float) -> Any:
    return pytest.approx(list(times), abs=1e-9)


# The pace and the prefill


@pytest.mark.parametrize(("steps", "seconds"), [(True, (0.07, 0.09)), (False, (0.065, 0.085))])
def test_tokens_come_one_inter_token_latency_apart_after_the_prefill(
    clockworks: MakeClockwork, steps: bool, seconds: tuple[float, ...]
) -> None:
    clockwork = clockworks(prefill=0.05, inter_token=0.02, steps=steps)
    clockwork.submit("a", max_tokens=4)
    clockwork.run(until=0.015)
    clockwork.submit("b", max_tokens=2)
    clockwork.run()
    assert clockwork.times("a") == exactly(0.05, 0.07, 0.09, 0.11)
    assert clockwork.times("b") == exactly(*seconds)
    assert clockwork.sizes() == [1] * 4


def test_all_that_run_get_their_tokens_with_the_same_steps(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(inter_token=0.02)
    for key, at in zip("abcd", (0.0, 0.004, 0.0131, 0.019), strict=True):
        clockwork.run(until=at)
        clockwork.submit(key, max_tokens=3)
    clockwork.run()
    assert clockwork.times("a") == exactly(0.0, 0.02, 0.04)
    assert clockwork.times("b") == clockwork.times("c") == clockwork.times("d")
    assert clockwork.times("b") == exactly(0.02, 0.04, 0.06)
    clockwork.run(until=0.07)
    clockwork.submit("e", max_tokens=1)  # finds nobody, and waits for no step
    clockwork.run()
    assert clockwork.times("e") == exactly(0.07)


def test_prompts_are_prefilled_one_after_another_beside_the_decoding(
    clockworks: MakeClockwork,
) -> None:
    clockwork = clockworks(prefill_rate=1000, prefill=0.5, inter_token=0.01)
    clockwork.submit("a", "b", prompt=range(100), max_tokens=10)
    clockwork.submit("c", prompt=range(300))
    clockwork.run(until=2)
    clockwork.submit("d", prompt=range(100))  # finds nobody before it
    clockwork.run()
    assert clockwork.firsts("abcd") == exactly(0.6, 0.7, 1.0, 2.6)
    assert clockwork.times("a") == exactly(*(0.6 + 0.01 * i for i in range(10)))


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize(
    ("aborted", "others", "firsts"),
    [("a", "bc", (0.15, 0.25)), ("b", "ac", (0.1, 0.2)), ("c", "ab", (0.1, 0.2))],
)
def test_an_aborted_prompt_leaves_its_share_to_those_behind_it(
    clockworks: MakeClockwork, aborted: str, others: str, firsts: tuple[float, ...], slots: int
) -> None:
    clockwork = clockworks(prefill_rate=1000, max_batch=slots)
    clockwork.submit(*"abc", prompt=range(100), max_tokens=1)
    clockwork.run(until=0.05, abort=aborted)
    clockwork.run()
    assert clockwork.firsts(others) == exactly(*firsts)
    assert not clockwork.times(aborted)


# The maximum batch


def test_requests_queue_first_come_first_served(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill=0.1, inter_token=0.1, max_batch=2)
    for key, tokens in zip("abcd", (5, 2, 2, 9), strict=True):
        clockwork.submit(key, max_tokens=tokens)
    clockwork.run()
    # b ends at 0.2 and c begins, c at 0.4 and d.
    assert clockwork.firsts("abcd") == exactly(0.1, 0.1, 0.3, 0.5)


# Late


def test_late_tokens_come_in_one_step_and_the_next_ones_on_time(clockworks: MakeClockwork) -> None:
    clockwork = clockworks(prefill=0.01, inter_token=0.01)
    clockwork.submit("a", max_tokens=20)
    clockwork.now = 0.055  # the tokens of 10, 20, 30, 40 and 50 ms
    clockwork.run()
    assert clockwork.sizes() == [5] + [1] * 15
    assert clockwork.times()[:2] == exactly(0.055, 0.06)
    assert clockwork.now == pytest.approx(0.2)


# Without costs


def test_without_a_pace_the_first_token_comes_alone_and_later_ones_in_bursts_and_in_turn(
    clockworks: MakeClockwork,
) -> None:
    clockwork = clockworks()
    clockwork.submit(*"abc", max_tokens=100)
    clockwork.run()
    assert clockwork.ids() == TEXT * 25
    assert clockwork.sizes() == [1, 1, 2, 4, 8, 16, BURST, BURST, 4]
    assert "".join(key for _, key, _ in clockwork.log) == "abc" * 9


def test_every_token_is_certain(clockworks: MakeClockwork) -> None:
    clockwork = clockworks()
    clockwork.submit("a", max_tokens=5, return_log_probs=True, top_log_probs=2)
    clockwork.run()
    tokens = [token for _, _, step in clockwork.log for token in step.log_probs]
    assert tokens == [TokenLogProb(i, 0.0, ((i, 0.0), (0, -9999.0))) for i in [*TEXT, 10]]


@pytest.mark.parametrize("delivered", [0, 1, 39])
def test_the_text_begins_at_a_place_that_depends_on_the_prompt_and_is_continued(
    clockworks: MakeClockwork, delivered: int
) -> None:
    clockwork = clockworks(list(range(10, 27)))
    text = list(range(10, 27)) * 4
    prompt = [3, 4, *text[7 : 7 + delivered]]
    clockwork.submit("a", prompt=prompt, max_tokens=40 - delivered, continued=delivered)
    clockwork.run()
    assert clockwork.ids() == text[7 + delivered : 47]


# Failures


def request(i: int, **values: Any) -> GenerationRequest:
    return GenerationRequest(f"request {i}", [i, 7, 9], **{"max_tokens": 100, **values})


KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


def test_which_requests_fail_depends_only_on_prompt_and_seed() -> None:
    failures = Failures(0.3, KINDS)
    of = [failures.of(request(i)) for i in range(500)]
    assert of == [failures.of(replace(request(i), key="other")) for i in range(500)]
    assert of != [failures.of(request(i, sampling=SamplingParams(seed=1))) for i in range(500)]
    # Values that were written down: nothing of a process, such as the seed of its hashes, counts.
    assert [i for i in range(15) if of[i]] == [0, 1, 3, 4, 9, 12, 14]
    wanted = [Failure("error", 31), Failure("stall", 32), Failure("refuse", 92)]
    assert [of[0], of[1], of[4]] == wanted


def test_a_higher_rate_adds_requests_to_those_that_fail() -> None:
    failing = [
        {i for i in range(300) if Failures(rate).of(request(i))} for rate in (0.0, 0.1, 0.5, 1.0)
    ]
    assert failing[0] == set()
    assert failing[1] < failing[2] < failing[3] == set(range(300))


@pytest.mark.parametrize(
    ("tokens", "after"), [(WARM_UP.max_tokens, set()), (3, {1, 2}), (5, {1, 2, 3, 4})]
)
def test_a_short_request_fails_midway_too_and_the_warm_up_never(
    tokens: int, after: set[int]
) -> None:
    of = [Failures(1.0).of(request(i, max_tokens=tokens)) for i in range(50)]
    assert {failure.after for failure in of if failure} == after


def test_a_request_that_is_continued_fails_where_it_would_have() -> None:
    first = request(1)
    rest = replace(first, input_ids=[*first.input_ids, 1, 2, 3], max_tokens=97, continued=3)
    whole, found = (Failures(1.0).of(one) for one in (first, rest))
    assert whole is not None
    assert found == replace(whole, after=whole.after - 3)


# What configures it


def test_requests_that_arrive_together_wake_the_loop_once(demo_model: Path) -> None:
    with running(ENGINES["simulated"](demo_model)) as requests:
        engine, free = requests.engine, threading.Event()
        engine._begin = Mock(wraps=engine._begin)
        engine._loop.call_soon_threadsafe(free.wait)
        gone, *streams = [requests.start(key=key) for key in "abc"]
        engine.abort("a")
        assert engine.running.keys() == {"b", "c"}
        free.set()
        assert [len(stream.wait().ids) for stream in streams] == [8, 8]
        assert (engine._begin.call_count, gone.all) == (1, [])


def test_the_settings_reach_the_engine(demo_model: Path, tmp_path: Path, tokenizer: Any) -> None:
    text = f'Say "ä" \\ 🚀,\nor not.{tokenizer.eos_token}'
    costs = {"PREFILL_MS": "1.5", "PREFILL_TOKENS_PER_S": "8000", "INTER_TOKEN_MS": "0.5"}
    failures = {"FAILURE_RATE": "0.25", "FAILURES": "stall,error"}
    given = {**costs, "MAX_BATCH": "64", "STEPS": "false", **failures, "TEXT": text}
    settings = read_settings({f"SIMULATED_{name}": value for name, value in given.items()})
    values = template_values(settings, "simulated")
    fill_repository(ROOT / "triton_model_repo", tmp_path / "filled", values)
    config = read_config(tmp_path / "filled" / "tensorrt_llm" / "config.pbtxt")
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    with running(parameters | ENGINES["simulated"](demo_model)) as requests:
        engine = requests.engine
        assert engine._costs == Costs(0.0015, 8000, 0.0005, 64, steps=False)
        assert engine._failures == Failures(0.25, ("stall", "error"))
        place = len(tokenizer(text, add_special_tokens=False).input_ids)
        engine._failures = Failures()
        ids = requests.ids([place], max_tokens=500, end_id=tokenizer.eos_token_id)
        assert tokenizer.decode(ids) == text


async def broken(*_: object) -> Steps:
    raise OSError(28, "No space left on device", "/tmp/x")
    yield Step()


async def cut_off(*_: object) -> Steps:
    yield Step([5])


async def cancelled(*_: object) -> Steps:
    yield Step([5])
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (broken, "OSError: /tmp/x: No space left on device"),
        (cut_off, "made no last step"),
        (cancelled, "was cancelled"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_whatever_ends_a_requests_generator_ends_that_request_alone(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, steps: Any, reason: str
) -> None:
    with running(ENGINES["simulated"](demo_model)) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "_generate", steps)
            error = llm.start().last().error
        assert type(error) is EngineUnavailable
        assert reason in str(error)
        assert llm.ids()
        assert not llm.engine.running


def saved_word_level(directory: Path, *words: str, unknown: str | None = "[UNK]") -> Path:
    """A tokenizer that knows some words only."""
    vocabulary = {word: number for number, word in enumerate([unknown or "other", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("unknown", ["[UNK]", None], ids=["unknown token", "no unknown token"])
@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        pytest.param(["alpha", "beta"], None, [1, 2], id="vocabulary"),
        pytest.param(["model", "alpha"], None, [1], id="known words of the usual text"),
        pytest.param(["alpha", "beta"], "beta gamma alpha", [2, 1], id="known words of a text"),
    ],
)
def test_a_tokenizer_that_knows_few_words_repeats_these(
    tmp_path: Path, words: list[str], text: str | None, expected: list[int], unknown: str | None
) -> None:
    parameters = {"tokenizer_dir": str(saved_word_level(tmp_path, *words, unknown=unknown))}
    if text is not None:
        parameters["simulated_text"] = text
    found = text_ids(parameters)
    assert [token for token in found if token] == expected


def test_a_text_that_a_tokenizer_does_not_know_is_an_error_in_ascii(tmp_path: Path) -> None:
    directory = saved_word_level(tmp_path, "alpha")
    parameters = {"tokenizer_dir": str(directory), "simulated_text": "日本語 🚀"}
    with pytest.raises(ValueError, match="set SIMULATED_TEXT to words") as caught:
        SimulatedEngine.from_parameters(parameters)
    assert str(caught.value).isascii()
