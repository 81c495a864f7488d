"""The LLM and its executor, a thread here: it steps all requests together, as in-flight batching does.

What it makes reaches a request's output through a queue of the event loop on which the request was
made, as with the real one, which is why that is the only loop that can wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .llm_args import LlmArgs, args_of
from .model import VOCABULARY, Model
from .samplers import honoured
from .sampling_params import SamplingParams

STEP_SECONDS = 0.002
TOKENS_BEFORE_FAILURE = 3
NO_LIMIT = 1 << 31


class RequestError(RuntimeError):
    """One request failed; the LLM lives on."""


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    _tokens_before: int = 0
    _logprobs_before: int = 0

    @property
    def text_diff(self) -> str:
        return ""  # no tokenizer

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._tokens_before :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return self.logprobs[self._logprobs_before :]

    def _add(self, response: _Response) -> None:
        self._tokens_before, self._logprobs_before = len(self.token_ids), len(self.logprobs)
        self.token_ids += response.ids
        self.logprobs += response.logprobs
        self.finish_reason = response.finish_reason


@dataclass
class _Response:
    ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None


class RequestOutput:
    """An asynchronous iterator that yields itself after every update."""

    def __init__(
        self, request_id: int, prompt_token_ids: list[int], abort: Callable[[int], None]
    ) -> None:
        self.request_id = request_id
        self.prompt: str | None = None
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(0)]
        self.context_logits: Any = None
        self.finished = False
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._responses: asyncio.Queue[_Response] = asyncio.Queue()

    def abort(self) -> None:
        self._abort(self.request_id)

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        assert asyncio.get_running_loop() is self._loop
        response = await self._responses.get()
        if response.error is not None:
            raise response.error
        self.outputs[0]._add(response)
        self.finished = response.finish_reason is not None
        return self

    def _put(self, response: _Response) -> None:
        """Called from the executor's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._responses.put_nowait, response)


@dataclass
class _Sequence:
    output: RequestOutput
    sampling: SamplingParams
    interval: int
    adapter: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    sent: int = 0

    def send(self, finish_reason: str | None) -> None:
        self.output._put(
            _Response(self.ids[self.sent :], self.logprobs[self.sent :], finish_reason)
        )
        self.sent = len(self.ids)


class LLM:
    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._version = sys.modules["tensorrt_llm"].__version__
        args = args_of(self._version)
        for name in kwargs:
            if name not in args.model_fields:
                raise ValueError(f"LLM got invalid argument: {name}")
        self._args: LlmArgs = args(
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,  # type: ignore[arg-type]
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            **kwargs,
        )
        _check_code(Path(model), trust_remote_code)
        if str(model) == "broken":
            raise RuntimeError("the weights of broken are broken")
        self._has_tokenizer = not skip_tokenizer_init
        self._model = Model(model)
        # A greater max_seq_len than the model's is cut to that.
        limits = (self._args.max_seq_len, self._model.context_length)
        self._max_seq_len = min((limit for limit in limits if limit), default=NO_LIMIT)
        self._ids = itertools.count(1)
        self._sequences: dict[int, _Sequence] = {}
        self._changed = threading.Condition()
        self._is_shut_down = False
        self._thread = threading.Thread(target=self._run, name="fake-executor", daemon=True)
        self._thread.start()

    def generate_async(
        self,
        inputs: str | list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
    ) -> RequestOutput:
        if self._is_shut_down:
            raise RuntimeError("LLM is shutting down")
        if prompt_adapter_request is not None or isinstance(inputs, str):
            raise NotImplementedError("the fake takes token ids alone")
        if lora_request is not None and self._args.lora_config is None:
            raise ValueError("LoRA is not enabled")
        sampling = honoured(sampling_params or SamplingParams(), self._args, self._version)
        if sampling.end_id is None and not self._has_tokenizer:
            raise ValueError("end_id is needed, there is no tokenizer to take it from")
        self._check_length(len(inputs))
        output = RequestOutput(next(self._ids), inputs, self._abort)
        interval = self._args.stream_interval if streaming else NO_LIMIT
        with self._changed:
            adapter = [] if lora_request is None else [lora_request.lora_int_id % VOCABULARY]
            self._sequences[output.request_id] = _Sequence(output, sampling, interval, adapter)
            self._changed.notify()
        return output

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:  # noqa: ARG002
        return []

    def get_stats_async(self, timeout: float | None = 2) -> Any:
        raise NotImplementedError

    def shutdown(self) -> None:
        self._is_shut_down = True
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _check_length(self, length: int) -> None:
        most = self._args.max_num_tokens
        if most and length > most and not self._args.enable_chunked_prefill:
            raise ValueError(
                f"The sum of prompt length ({float(length)}), query length (0) should not exceed "
                f"max_num_tokens ({most})"
            )
        if length >= self._max_seq_len:
            raise RequestError(
                f"Prompt length ({length}) exceeds maximum input length ({self._max_seq_len - 1})."
            )

    def _abort(self, request_id: int) -> None:
        with self._changed:
            sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            sequence.output._put(_Response(finish_reason="cancelled"))
            print(f"fake LLM: aborted a request after {len(sequence.ids)} tokens", flush=True)

    def _run(self) -> None:
        while not self._is_shut_down:
            with self._changed:
                if not self._sequences:
                    self._changed.wait(0.1)
                sequences = list(self._sequences.values())
            for sequence in sequences:
                self._step(sequence)
            time.sleep(STEP_SECONDS if sequences else 0)

    def _step(self, sequence: _Sequence) -> None:
        if self._args.model == "silent" or self._fail(sequence):
            return
        # An adapter's answer is that to a prompt that begins with its number.
        prompt, sampling = sequence.adapter + sequence.output.prompt_token_ids, sequence.sampling
        token, log_prob = self._model.next_token(prompt, sequence.ids, sampling)
        sequence.ids.append(token)
        if sampling.logprobs:
            sequence.logprobs.append({token: Logprob(log_prob)})
        finish_reason = self._finish_reason(sequence)
        if finish_reason:
            with self._changed:
                if self._sequences.pop(sequence.output.request_id, None) is None:
                    return
        if finish_reason or len(sequence.ids) % sequence.interval == 0:
            sequence.send(finish_reason)

    def _finish_reason(self, sequence: _Sequence) -> str | None:
        sampling, length = sequence.sampling, len(sequence.ids)
        if sequence.ids[-1] == sampling.end_id and not sampling.ignore_eos:
            return "stop"
        room = self._max_seq_len - len(sequence.output.prompt_token_ids)
        return "length" if length >= min(sampling.max_tokens, room) else None

    def _fail(self, sequence: _Sequence) -> bool:
        if len(sequence.ids) < TOKENS_BEFORE_FAILURE:
            return False
        if self._args.model == "failing":
            with self._changed:
                self._sequences.pop(sequence.output.request_id, None)
            sequence.output._put(_Response(error=RequestError("this request cannot be computed")))
            return True
        if self._args.model == "dying":
            # As with the real one, the others are told nothing.
            self._is_shut_down = True
            sequence.output._put(_Response(error=RuntimeError("an illegal memory access")))
            return True
        return False


def _check_code(model: Path, trust_remote_code: bool) -> None:
    config = model / "config.json"
    if not trust_remote_code and config.is_file() and "auto_map" in json.loads(config.read_text()):
        raise ValueError(
            f"The repository {model} contains custom code which must be executed to correctly load the "
            "model. Please pass the argument `trust_remote_code=True` to allow custom code to be run."
        )
