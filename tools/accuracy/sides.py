"""The two sides of a comparison: prompts completed greedily, which can be compared token by token."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.http_transport import HttpClient
from cog_triton.client.stream import TritonClient
from cog_triton.errors import (
    ConfigurationError,
    TritonMalformedJSON,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.request.request import Request, triton_inputs
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.tokenizer import Tokenizer

REQUEST_SECONDS = 600.0

Progress = Callable[[int], object]
Complete = Callable[[Sequence[str]], Awaitable["list[Answer]"]]


@dataclass(frozen=True)
class Answer:
    """One side's output for a prompt; token ids before the end token."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Answers:
    """All of a side's answers, and the seconds that their batches took together."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(answer.ids) for answer in self.answers)


def until_end(ids: Sequence[int], end_id: int | None) -> tuple[int, ...]:
    """Return the ids before the end token. Some engines send it, and others do not."""
    return tuple(ids[: ids.index(end_id)] if end_id in ids else ids)


def text_ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of a text by itself, without special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


async def engine_answers(
    address: Mapping[str, str],
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    max_tokens: int,
    end_id: int | None,
    progress: Progress = lambda _: None,
) -> Answers:
    """Complete the prompts by an engine, ``batch_size`` at once; the first one before that, to warm up.

    Args:
        address: ``url`` of a Cog server, or host:port of Triton as ``grpc`` or ``http``.

    Raises:
        CogTritonError: of the first request that failed.
    """
    if "url" in address:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=address["url"], timeout=REQUEST_SECONDS, limits=limits
        ) as http:
            ask = partial(ask_cog, http, tokenizer, max_tokens)
            return await in_batches(at_once(ask), prompts, batch_size, progress)
    transport = HttpClient if "http" in address else GrpcClient
    (endpoint,) = address.values()
    client = transport(endpoint, response_timeout=REQUEST_SECONDS)
    try:
        ask = partial(ask_triton, client, tokenizer, max_tokens, end_id)
        return await in_batches(at_once(ask), prompts, batch_size, progress)
    finally:
        await client.aclose()


def at_once(ask: Callable[[str], Awaitable[Answer]]) -> Complete:
    """Return the function that asks for all prompts of a batch at the same time."""

    async def complete(batch: Sequence[str]) -> list[Answer]:
        return list(await asyncio.gather(*map(ask, batch)))

    return complete


async def in_batches(
    complete: Complete, prompts: Sequence[str], batch_size: int, progress: Progress
) -> Answers:
    """Complete the prompts, ``batch_size`` at once; the first one before that, to warm up."""
    done: list[Answer] = []
    seconds = 0.0
    await complete(prompts[:1])
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        began = time.perf_counter()
        done += await complete(batch)
        seconds += time.perf_counter() - began
        progress(len(batch))
    return Answers(tuple(done), seconds)


async def ask_triton(
    client: TritonClient, tokenizer: Tokenizer, max_tokens: int, end_id: int | None, prompt: str
) -> Answer:
    """Complete by Triton: the ids are the engine's, and the text is made of them as by the predictor."""
    request = Request(
        prompt=prompt, seed=0, max_tokens=max_tokens, temperature=0.0, top_p=1.0, end_id=end_id
    )
    ids: list[int] = []
    async with client.stream(secrets.token_hex(8), triton_inputs(request)) as responses:
        async for response in responses:
            ids += response.ids
    kept = until_end(ids, end_id)
    detokenizer = IncrementalDetokenizer(tokenizer)
    return Answer(kept, detokenizer.decode(list(kept)) + detokenizer.flush())


async def ask_cog(
    client: httpx.AsyncClient, tokenizer: Tokenizer, max_tokens: int, prompt: str
) -> Answer:
    """Complete by Cog's API, which gives no ids: they are those of the text, encoded again."""
    inputs: dict[str, Any] = {
        # The server's defaults must not change the prompt.
        "prompt": prompt,
        "prompt_template": "{prompt}",
        "stop_sequences": "",
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
    }
    try:
        reply = await client.post("/predictions", json={"input": inputs})
    except httpx.TransportError as error:
        raise TritonUnavailable(f"{client.base_url} cannot be reached: {error!r}") from None
    try:
        body = reply.json()
    except ValueError:
        raise TritonMalformedJSON(f"HTTP {reply.status_code}: {reply.text[:200]}") from None
    if reply.is_error or body.get("status") != "succeeded":
        reason = body.get("error") or body.get("detail") or body
        raise TritonUnknownError(f"HTTP {reply.status_code}: {reason}")
    text = "".join(body["output"])
    return Answer(text_ids(text, tokenizer), text)


class Reference:
    """A model of Hugging Face's, in this process. The model's own code is never run.

    Args:
        model: a directory or a Hugging Face id.
        dtype: ``auto`` (as saved), or a name of PyTorch's.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        end_id: the token that ends an output.

    Raises:
        ConfigurationError: it cannot be loaded.
    """

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, dtype: str, device: str, end_id: int | None
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                model, dtype=dtype, trust_remote_code=False
            )
            self._model: Any = loaded.to(device).eval().requires_grad_(False)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"{model} cannot be loaded on {device}: {error}") from error
        self._tokenizer, self._end_id = tokenizer, end_id
        pad_id = tokenizer.pad_token_id
        self._pad_id = pad_id if pad_id is not None else (end_id or 0)

    def answers(
        self, prompts: Sequence[str], batch_size: int, max_tokens: int, progress: Progress
    ) -> Answers:
        """Complete the prompts, see ``in_batches``.

        Prompts of a batch are padded on the left and the padding masked. In half precision that can
        still change a token, so a batch of 1 is the most exact.
        """
        from transformers import GenerationConfig

        # Greedy, whatever the model's files say of sampling and penalties.
        self._model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self._end_id,
            pad_token_id=self._pad_id,
        )
        return asyncio.run(in_batches(self._complete, prompts, batch_size, progress))

    def log_probs(self, prompt: str, ids: Sequence[int]) -> list[float]:
        """Return the log probability of each output token, given the prompt and those before it."""
        if not ids:
            return []
        prompt_ids = self._tokenizer(prompt).input_ids
        tokens = self._tensor([[*prompt_ids, *ids]])
        logits = self._model(input_ids=tokens).logits[0, len(prompt_ids) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, tokens[0, len(prompt_ids) :, None])
        return list(chosen[:, 0].tolist())

    async def _complete(self, prompts: Sequence[str]) -> list[Answer]:
        encoded = [self._tokenizer(prompt).input_ids for prompt in prompts]
        width = max(map(len, encoded))
        padding = [width - len(ids) for ids in encoded]
        rows = zip(padding, encoded, strict=True)
        generated = self._model.generate(
            input_ids=self._tensor([[self._pad_id] * pad + ids for pad, ids in rows]),
            attention_mask=self._tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
        )
        outputs = [until_end(row, self._end_id) for row in generated[:, width:].tolist()]
        decode = self._tokenizer.decode
        return [Answer(ids, decode(list(ids), skip_special_tokens=True)) for ids in outputs]

    def _tensor(self, rows: list[list[int]]) -> Any:
        import torch

        return torch.tensor(rows, device=self._model.device)
