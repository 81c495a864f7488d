"""Token ids to the engine's model and back, past the ensemble, as NVIDIA's small clients send them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.client.grpc_transport import Channel, Message, infer_request, stream_messages
from cog_triton.client.http_transport import HttpClient, flat_outputs
from cog_triton.client.stream import decode_response
from cog_triton.errors import TritonMalformedEvent
from cog_triton.wire import ENGINE

OUTPUTS = ("output_ids", "sequence_length", "batch_index")

Emit = Callable[[int, list[int]], object]
Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Batch:
    """Prompts of token ids, to be completed together.

    Attributes:
        prompts: all of the same length.
        output_len: the most output tokens of each.
        top_k, top_p: 1 is greedy, 0 is no limit.
        end_id: ends an output; None leaves it to the engine.
        streaming: responses come as tokens are made, and not one at the end.
    """

    prompts: Prompts
    output_len: int
    top_k: int = 1
    top_p: float = 0.0
    beam_width: int = 1
    end_id: int | None = None
    pad_id: int | None = None
    streaming: bool = False

    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """Return the engine's inputs, shapes [batch, tokens] and [batch, 1]."""
        ids = np.array(self.prompts, np.int32)
        values: dict[str, Any] = {
            "input_lengths": np.int32(ids.shape[1]),
            "request_output_len": np.int32(self.output_len),
            "runtime_top_k": np.int32(self.top_k),
            "runtime_top_p": np.float32(self.top_p) if self.top_p > 0 else None,
            "beam_width": np.int32(self.beam_width) if self.beam_width != 1 else None,
            "end_id": None if self.end_id is None else np.int32(self.end_id),
            "pad_id": None if self.pad_id is None else np.int32(self.pad_id),
            "streaming": np.bool_(self.streaming),
            "exclude_input_in_output": np.bool_(True),
        }
        given = {name: value for name, value in values.items() if value is not None}
        return {"input_ids": ids, **{n: np.full((len(ids), 1), v) for n, v in given.items()}}


class TokenClient:
    """Completes batches of token ids, over gRPC. To be used from one event loop."""

    def __init__(self, address: str) -> None:
        self._channel = Channel(address)

    async def complete(self, batch: Batch, emit: Emit = lambda *_: None) -> list[list[int]]:
        """Return the new token ids of each sequence; of several beams, those of the first.

        Args:
            emit: called with a sequence's index and its next ids as they come.

        Raises:
            CogTritonError: Triton cannot be reached, or refused or failed the request.
        """
        rows: list[list[int]] = [[] for _ in batch.prompts]

        def add(row: int, ids: list[int]) -> None:
            # With beams, a streamed response has all tokens so far.
            rows[row] = ids if batch.beam_width > 1 else rows[row] + ids
            emit(row, ids)

        await self._run(batch.inputs(), add)
        return rows

    async def aclose(self) -> None:
        await self._channel.aclose()

    async def _run(self, inputs: dict[str, npt.NDArray[Any]], emit: Emit) -> None:
        request = infer_request(ENGINE, secrets.token_hex(8), inputs, OUTPUTS)
        async for message in stream_messages(self._channel, request):
            if message.tensors:
                emit(*_tokens(message))


class HttpTokenClient(TokenClient):
    """The same over generate_stream, which takes one sequence a request."""

    def __init__(self, address: str) -> None:
        self._client = HttpClient(address, response_timeout=600)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _run(self, inputs: dict[str, npt.NDArray[Any]], emit: Emit) -> None:
        async def run(row: int) -> None:
            own = {name: value[row : row + 1] for name, value in inputs.items()}
            async for event in self._client.events(ENGINE, secrets.token_hex(8), own):
                emit(row, decode_response(flat_outputs(event), 0, None).ids)

        await asyncio.gather(*map(run, range(len(inputs["input_ids"]))))


CLIENTS: dict[str, type[TokenClient]] = {"grpc": TokenClient, "http": HttpTokenClient}


def random_prompts(batch_size: int, length: int, vocabulary: int, seed: int) -> Prompts:
    """Return prompts of random ids below ``vocabulary``; the same again with the same seed."""
    ids = np.random.default_rng(seed).integers(0, vocabulary, (batch_size, length))
    return tuple(tuple(row) for row in ids.tolist())


def _tokens(message: Message) -> tuple[int, list[int]]:
    """Return the index of a response's sequence, and the new ids of its first beam."""
    try:
        ids = message.tensors["output_ids"].reshape(-1, message.tensors["output_ids"].shape[-1])[0]
        length = message.tensors["sequence_length"].flat[0]
    except (KeyError, IndexError) as error:
        raise TritonMalformedEvent(f"a response of {ENGINE} is malformed: {error!r}") from None
    index = message.tensors.get("batch_index")
    return 0 if index is None else int(index.flat[0]), ids[:length].tolist()
