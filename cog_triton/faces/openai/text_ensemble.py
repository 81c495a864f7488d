"""Ensembles that give text and no ids: NVIDIA's own, of any age. ``generate_text`` is their ``generate``.

Such an ensemble decodes each response alone, so spaces and characters of several tokens may be lost on its
side, and how many tokens there were is counted here.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton import wire
from cog_triton.adapters.tensors import AdapterTensors
from cog_triton.client.grpc_transport import (
    GrpcClient,
    Message,
    infer_request,
    message_arrivals,
)
from cog_triton.client.stream import Inputs
from cog_triton.deployment.engine_choice import with_own_beginning
from cog_triton.errors import InvalidParameter, TritonMalformedEvent
from cog_triton.generation import Chunk, FinishReason, acquire
from cog_triton.request.admission import Admission, Tenant
from cog_triton.request.request import Request, request_parameters, triton_inputs
from cog_triton.text.stop_sequences import StopSequences
from cog_triton.text.tokenizer import Tokenizer

OLD_NAMES = {"seed": "random_seed", "min_tokens": "min_length"}
NOT_NEEDED = ("return_num_input_tokens",)
WORDS = ("bad_words", "stop_words")
"""Which old ensembles demand."""


class TextClient(GrpcClient):
    """Streams the texts of such an ensemble."""

    def __init__(
        self,
        address: str,
        model: str,
        response_timeout: float,
        adapters: AdapterTensors | None = None,
    ) -> None:
        super().__init__(address, response_timeout=response_timeout)
        self._model = model
        self._adapters = adapters

    def texts(self, request_id: str, inputs: Inputs) -> AsyncGenerator[str, None]:
        """The pieces of text as they come. Closing it early stops the request in the engine.

        As with ``ResumingClient``, TensorRT-LLM is sent an adapter that it does not have.
        """
        if self._adapters is None:
            return self._texts(request_id, inputs)
        return self._adapters.stream(
            lambda *sent: contextlib.aclosing(self._texts(*sent)), request_id, inputs
        )

    async def _texts(self, request_id: str, inputs: Inputs) -> AsyncGenerator[str, None]:
        request = infer_request(self._model, request_id, inputs, ("text_output",))
        arrivals = await message_arrivals(self.channel, request, self._response_timeout)
        try:
            while arrived := await arrivals.take():
                yield "".join(map(_text, arrived))
        finally:
            if arrivals.ended:
                arrivals.close()
            else:
                self.stop(request_id, arrivals)


async def generate_text(
    request: Request,
    client: TextClient,
    known: Mapping[str, bool],
    tokenizer: Tokenizer,
    *,
    admission: Admission,
    request_id: str | None = None,
    tenant: Tenant | None = None,
) -> AsyncGenerator[Chunk, None]:
    """Streams the answer to a request; see ``cog_triton.generation.generate``.

    Args:
        known: the ensemble's inputs, and whether each may be left out.

    Raises:
        CogTritonError: InvalidParameter names what the ensemble has no input for.
    """
    inputs = adapted(with_own_text(request, tokenizer), known)
    stops = StopSequences(request.stop_sequences)
    whole: list[str] = []
    delivered = ""
    input_tokens = len(tokenizer(inputs["text_input"].item().decode()).input_ids)
    texts = client.texts(request_id or secrets.token_hex(8), inputs)
    async with acquire(admission, tenant) as slot, contextlib.aclosing(texts):
        async for piece in texts:
            whole.append(piece)
            slot.used = input_tokens + len(whole)
            text = stops.feed(piece)
            delivered += text
            if stops.matched is not None:
                break
            # An event has a token, mostly; the last chunk counts them.
            yield Chunk(text, len(whole), input_tokens)
            text = ""
    text = stops.flush() if stops.matched is None else text
    # Up to the stop: how much came after it is chance.
    counted = "".join(whole) if stops.matched is None else delivered + stops.matched
    tokens = len(tokenizer(counted, add_special_tokens=False).input_ids)
    if request.include_stop:
        text += stops.matched or ""
    ended = stops.matched is not None or tokens < request.max_tokens
    reason: FinishReason = "stop" if ended else "length"
    yield Chunk(text, tokens, input_tokens, reason, slot.waited, stop_sequence=stops.matched)


def with_own_text(request: Request, tokenizer: Tokenizer) -> dict[str, npt.NDArray[Any]]:
    """The inputs of a request whose prompt is a text, without what its preprocessing will add to it.

    Raises:
        InvalidParameter: it has what only our own preprocessing knows.
    """
    request = with_own_beginning(request, tokenizer)
    parameters = request_parameters(request)
    parameters.pop(wire.ADD_SPECIAL_TOKENS, None)  # which it does
    if request.stop_token_ids:
        raise InvalidParameter(
            "stop_token_ids must be empty: the ensemble of this Triton gives text"
        )
    if not request.skip_special_tokens:
        raise InvalidParameter(
            "skip_special_tokens must be true: the ensemble of this Triton gives text without them"
        )
    for name in parameters:
        raise InvalidParameter(f"{name} is not known to the ensemble of this Triton")
    return triton_inputs(request)


def adapted(
    inputs: Mapping[str, npt.NDArray[Any]], known: Mapping[str, bool]
) -> dict[str, npt.NDArray[Any]]:
    """The inputs under the names that an ensemble has for them, with the words that it demands.

    Raises:
        InvalidParameter: it has none for one of them.
    """
    result: dict[str, npt.NDArray[Any]] = {
        name: np.array([[b""]], np.object_)
        for name in WORDS
        if not known.get(name, True) and name not in inputs
    }
    for name, value in inputs.items():
        target = name if name in known else OLD_NAMES.get(name, name)
        if target in known:
            result[target] = value
        elif name not in NOT_NEEDED:
            raise InvalidParameter(f"{name} is no input of this Triton's ensemble")
    return result


def _text(message: Message) -> str:
    if not message.tensors:
        return ""
    try:
        values = message.tensors["text_output"].reshape(-1)
    except KeyError:
        raise TritonMalformedEvent("a response of the ensemble has no text_output") from None
    return values[0].decode(errors="replace") if values.size else ""
