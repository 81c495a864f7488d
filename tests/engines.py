"""Engines under test, their requests and what keeps the steps of one."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.base import Engine, GenerationRequest, SamplingParams, Step, create_engine
from cog_triton.protocol.log_probs import TokenLogProb
from tests.late import torch

TIMEOUT = 60
PROMPT = [5, 6, 7, 8, 9]
# So hot that every token is about as likely as any other, whatever the model has learned: two seeds give
# the same few tokens by no chance.
RANDOM = SamplingParams(temperature=1000.0, top_p=1.0)
MAX_SEED = 2**64 - 1

# Each one for at least 512 tokens of prompt and output; another engine only has to be added here.
ENGINES: dict[str, Callable[[Path], dict[str, str]]] = {
    "llmapi": lambda model: {"engine": "llmapi", "model": str(model)},
    "simulated": lambda model: {"engine": "simulated", "tokenizer_dir": str(model)},
    "transformers": lambda model: {
        "engine": "transformers",
        "model": str(model),
        "device": "cpu",
        "max_tokens_in_paged_kv_cache": "8192",
    },
    # On a GPU a share of its memory: some tests have two engines at a time.
    "vllm": lambda model: (
        {"engine": "vllm", "model": str(model)}
        | ({"kv_cache_free_gpu_mem_fraction": "0.3"} if torch.cuda.is_available() else {})
    ),
}
NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
VLLM = pytest.param("vllm", marks=NEEDS_VLLM)
EVERY_ENGINE = [VLLM if name == "vllm" else name for name in sorted(ENGINES)]
_keys = count(1)


def request(input_ids: Sequence[int] = PROMPT, **values: Any) -> GenerationRequest:
    """A request for eight tokens, with a key of its own."""
    defaults = {"key": f"request {next(_keys)}", "max_tokens": 8}
    return GenerationRequest(input_ids=list(input_ids), **{**defaults, **values})


class Stream:
    """A sink that keeps what comes, for a test to wait for."""

    def __init__(self, on_step: Callable[[Stream], object] = lambda _: None) -> None:
        self.all: list[Step] = []
        self.finished = False
        self._queue: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._on_step = on_step

    def __call__(self, step: Step) -> None:
        self.all.append(step)
        self._on_step(self)
        self.finished = step.finished
        self._queue.put(step)

    @property
    def ids(self) -> list[int]:
        return [token for step in self.all for token in step.ids]

    @property
    def tokens(self) -> list[TokenLogProb]:
        return [token for step in self.all for token in step.log_probs]

    @property
    def log_probs(self) -> list[float]:
        return [token.log_prob for token in self.tokens]

    def next(self) -> Step:
        return self._queue.get(timeout=TIMEOUT)

    def last(self) -> Step:
        """Waits for the end, good or bad."""
        while not self.finished:
            self.next()
        return self.all[-1]

    def wait(self) -> Stream:
        """Waits for the end, which has to be a good one."""
        assert self.last().error is None
        return self


class Requests:
    """Starts requests on an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def start(self, input_ids: Sequence[int] = PROMPT, stream: Any = None, **values: Any) -> Stream:
        stream = stream or Stream()
        self.engine.submit(request(input_ids, **values), stream)
        assert isinstance(stream, Stream)
        return stream

    def ids(self, input_ids: Sequence[int] = PROMPT, **values: Any) -> list[int]:
        return self.start(input_ids, **values).wait().ids


@contextmanager
def running(parameters: dict[str, str], **more: str) -> Iterator[Any]:
    """The requests of an engine, which is closed at the end."""
    engine = create_engine({**parameters, **more})
    try:
        yield Requests(engine)
    finally:
        engine.close()


def ids_of_generate(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """The ids that transformers' own generate() chooses greedily for a model, as many as asked for."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        forced_eos_token_id=None,  # a BART's generate() puts it at the end of whatever is cut
        pad_token_id=1,
    )
    return list(output[0, -tokens:].tolist())
