"""What a driver is: how a request is sent to one kind of target, and what its answer means.

``prepare`` runs before the load, ``send`` during it, ``parse`` after it. ``send`` does no more than the
protocol needs and notes when each piece came.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tools.benchmark.load import Planned
from tools.benchmark.vocabulary import Vocabulary


class Failed(Exception):
    """The server answered with an error; the text is its own."""


@dataclass
class Answer:
    """The outcome of one request.

    Attributes:
        times: when each chunk with content came, seconds of ``time.perf_counter``.
        tokens: of each of these chunks.
        total: output tokens of the request.
        counted: whether the server counted them. The tokens of a text are not those it was made of.
    """

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    total: int = 0
    counted: bool = True

    def add(self, at: float, tokens: int) -> None:
        self.times.append(at)
        self.tokens.append(tokens)
        self.total += tokens


@dataclass(frozen=True)
class Context:
    """The facts that a driver needs.

    Attributes:
        tokenizer: directory or Hugging Face id that the vocabulary is of.
        url: of the Cog server, or of transformers'.
        grpc, http: host:port of Triton's endpoints.
        engine: parameters of the tensorrt_llm model, for an engine without a server.
        ignore_eos: see ``Load``.
    """

    vocabulary: Vocabulary
    tokenizer: str
    temperature: float = 0.0
    ignore_eos: bool = False
    url: str = ""
    grpc: str = ""
    http: str = ""
    engine: Mapping[str, str] = field(default_factory=dict)


class Driver(ABC):
    """Sends requests to one target. Made and used on one event loop.

    Attributes:
        server: what has to run: ``cog``, ``triton``, ``serve``, or nothing but what this process loads.
    """

    server: ClassVar[str] = ""

    def __init__(self, context: Context) -> None:
        self._context = context

    @abstractmethod
    def prepare(self, request: Planned) -> Any:
        """Make the parts of a request that ``send`` needs, ahead of time."""

    @abstractmethod
    async def send(self, prepared: Any) -> list[Any]:
        """Sends it and returns the pieces of the answer, as ``parse`` wants them."""

    @abstractmethod
    def parse(self, pieces: list[Any]) -> Answer:
        """The answer.

        Raises:
            Failed: it is an error.
        """

    async def close(self) -> None:
        """Ends what was opened."""
        return

    @property
    def own_cpu_s(self) -> float:
        """CPU seconds that this process has spent on generating load."""
        return time.process_time()


def sampling_request(request: Planned, context: Context) -> Any:
    """The request as the predictor would make it."""
    from cog_triton.request.request import Request

    return Request(
        prompt=request.prompt,
        seed=0,
        max_tokens=request.output_tokens,
        min_tokens=0 if context.ignore_eos else request.output_tokens,
        temperature=context.temperature,
        end_id=-1 if context.ignore_eos else None,
    )


def ensemble_inputs(request: Planned, context: Context) -> dict[str, Any]:
    """The ensemble's inputs, the same as the predictor sends."""
    from cog_triton.request.request import triton_inputs

    return triton_inputs(sampling_request(request, context))


def engine_inputs(request: Planned, context: Context) -> dict[str, Any]:
    """The tensorrt_llm model's inputs, as the ensemble would make them; batch of one."""
    import numpy as np

    ids = context.vocabulary.encode(request.prompt)
    ensemble = ensemble_inputs(request, context)
    renamed = {"top_k": "runtime_top_k", "top_p": "runtime_top_p"}
    same = ("temperature", "seed", "min_tokens", "return_num_input_tokens")
    end_id = -1 if context.ignore_eos else context.vocabulary.end_id
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": ensemble["max_tokens"],
        "streaming": ensemble["stream"],
        **{
            renamed.get(name, name): ensemble[name]
            for name in (*same, *renamed)
            if name in ensemble
        },
        **({} if end_id is None else {"end_id": np.array([[end_id]], np.int32)}),
    }
