"""The LLM and its executor, a thread here: it steps all requests together, as in-flight batching does.

What it makes reaches a request's output through a queue of the event loop on which the request was
made, as with the real one, which is why that is the only loop that can wait for it.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .llmapi.llm_args import TorchLlmArgs
from .model import Model
from .sampling_params import SamplingParams

STEP_SECONDS = 0.002


class RequestError(RuntimeError):
    """One request failed; the LLM lives on."""


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    """What is new, and a reason for the end."""

    token_ids_diff: list[int]
    logprobs_diff: list[dict[int, Logprob]]
    finish_reason: str | None = None


class RequestOutput:
    """An asynchronous iterator that yields itself after every update."""

    def __init__(self, llm: "LLM", prompt: list[int], sampling: SamplingParams) -> None:
        self.outputs: list[CompletionOutput] = []
        self.finished = False
        self._llm, self._prompt, self._sampling = llm, prompt, sampling
        self._ids: list[int] = []
        self._new = CompletionOutput([], [])
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[CompletionOutput | Exception] = asyncio.Queue()

    def abort(self) -> None:
        self._llm._abort(self)

    async def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        assert asyncio.get_running_loop() is self._loop
        while not self.finished:
            update = await self._updates.get()
            if isinstance(update, Exception):
                raise update
            self.outputs = [update]
            self.finished = update.finish_reason is not None
            yield self

    def _put(self, update: CompletionOutput | Exception) -> None:
        """Called from the executor's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)


class LLM:
    def __init__(self, model: str | Path, **arguments: Any) -> None:
        self._args = TorchLlmArgs(model=model, **arguments)
        _check_code(Path(model), self._args.trust_remote_code)
        if str(model) == "broken":
            raise RuntimeError("the weights of broken are broken")
        self._model = Model(model)
        self._running: list[RequestOutput] = []
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._thread = threading.Thread(target=self._run, name="fake-executor", daemon=True)
        self._thread.start()

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams,
        lora_request: Any = None,
        prompt_adapter_request: None = None,  # noqa: ARG002
        streaming: bool = False,
    ) -> RequestOutput:
        assert streaming
        if self._is_shut_down:
            raise RuntimeError("LLM is shutting down")
        if lora_request is not None and self._args.lora_config is None:
            raise ValueError("LoRA is not enabled")
        if sampling_params.end_id is None and self._args.skip_tokenizer_init:
            raise ValueError("end_id is needed, there is no tokenizer to take it from")
        most = self._args.max_num_tokens
        if most and len(inputs) > most and not self._args.enable_chunked_prefill:
            raise ValueError(
                f"The sum of prompt length ({float(len(inputs))}), query length (0) should not exceed "
                f"max_num_tokens ({most})"
            )
        # An adapter's answer is that to a prompt that begins with its number.
        prompt = inputs if lora_request is None else [lora_request.lora_int_id, *inputs]
        output = RequestOutput(self, prompt, sampling_params)
        self._running.append(output)
        return output

    def shutdown(self) -> None:
        self._is_shut_down = True
        self._thread.join()

    def _abort(self, output: RequestOutput) -> None:
        with self._lock:
            if output not in self._running:
                return
            self._running.remove(output)
        output._put(CompletionOutput([], [], "cancelled"))
        print(f"fake LLM: aborted a request after {len(output._ids)} tokens", flush=True)

    def _run(self) -> None:
        while not self._is_shut_down:
            with self._lock:
                for output in [*self._running]:
                    try:
                        self._step(output)
                    except Exception as error:
                        # As with the real one, the others are told nothing when the executor dies.
                        self._is_shut_down = not isinstance(error, RequestError)
                        self._running.remove(output)
                        output._put(error)
            time.sleep(STEP_SECONDS)

    def _step(self, output: RequestOutput) -> None:
        ids, sampling, new = output._ids, output._sampling, output._new
        token = self._model.next_token(output._prompt, ids, sampling)
        ids.append(token)
        new.token_ids_diff.append(token)
        if sampling.logprobs:
            new.logprobs_diff.append({token: Logprob(-1.0)})
        if token == sampling.end_id and not sampling.ignore_eos:
            new.finish_reason = "stop"
        elif token in (sampling.stop_token_ids or []):
            new.finish_reason = "stop"
            if not sampling.include_stop_str_in_output:
                ids.pop()
                new.token_ids_diff.pop()
                del new.logprobs_diff[len(new.token_ids_diff) :]
        elif len(ids) >= sampling.max_tokens:
            new.finish_reason = "length"
        if new.finish_reason:
            self._running.remove(output)
        if new.finish_reason or len(ids) % self._args.stream_interval == 0:
            output._put(new)
            output._new = CompletionOutput([], [])


def _check_code(model: Path, trust_remote_code: bool) -> None:
    config = model / "config.json"
    if not trust_remote_code and config.is_file() and "auto_map" in json.loads(config.read_text()):
        raise ValueError(
            f"The repository {model} contains custom code which must be executed to correctly load the "
            "model. Please pass the argument `trust_remote_code=True` to allow custom code to be run."
        )
