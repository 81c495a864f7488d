"""Targets that are asked over HTTP: Cog's server, Triton's generate_stream and ``transformers serve``."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from cog_triton.client.http_transport import json_value
from tools.benchmark.driver import Answer, Context, Driver, Failed, ensemble_inputs
from tools.benchmark.http import Event, Piece, Pool, events, parse_reply
from tools.benchmark.load import Planned
from tools.benchmark.vocabulary import Vocabulary


class HttpDriver(Driver):
    """Sends requests as bytes, and takes the replies as they come."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._pool = Pool(f"http://{context.http}" if self.server == "triton" else context.url)

    async def send(self, prepared: bytes) -> list[Piece]:
        return await self._pool.send(prepared)

    async def close(self) -> None:
        self._pool.close()


class CogJson(HttpDriver):
    """POST /predictions, answered as a whole."""

    server = "cog"
    _HEADERS: ClassVar[dict[str, str]] = {}

    def prepare(self, request: Planned) -> bytes:
        inputs = {
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "min_tokens": request.output_tokens,
            "temperature": self._context.temperature,
            "seed": 0,
        }
        body = json.dumps({"input": inputs}).encode()
        return self._pool.message("/predictions", self._HEADERS, body)

    def parse(self, pieces: list[Piece]) -> Answer:
        reply = parse_reply(pieces)
        prediction = json_object(reply.text)
        if reply.status != 200 or prediction.get("status") != "succeeded":
            raise Failed(error_of(prediction, reply.status))
        text = "".join(prediction["output"])
        total = prediction["metrics"].get("output_token_count")
        return counted(self._context.vocabulary, [(pieces[-1][0], text)], total)


class CogSse(CogJson):
    """POST /predictions, streamed as server-sent events."""

    _HEADERS: ClassVar[dict[str, str]] = {"Accept": "text/event-stream"}

    def parse(self, pieces: list[Piece]) -> Answer:
        texts: list[tuple[float, str]] = []
        metrics: dict[str, Any] = {}
        status = "no event completed"
        for event in stream_of(pieces):
            data = json.loads(event.data)
            if event.name == "output" and data["chunk"]:
                texts.append((event.at, data["chunk"]))
            elif event.name == "metric":
                metrics[data["name"]] = data["value"]
            elif event.name in ("completed", "error"):
                status = data.get("status") or "failed"
                if status != "succeeded":
                    raise Failed(error_of(data))
        if status != "succeeded":
            raise Failed(status)
        return counted(self._context.vocabulary, texts, metrics.get("output_token_count"))


class TritonHttp(HttpDriver):
    """generate_stream on the ensemble, which always runs all of it."""

    server = "triton"

    def prepare(self, request: Planned) -> bytes:
        values = {
            name: json_value(value)
            for name, value in ensemble_inputs(request, self._context).items()
        }
        body = json.dumps({"id": secrets.token_hex(8), **values}).encode()
        return self._pool.message("/v2/models/ensemble/generate_stream", {}, body)

    def parse(self, pieces: list[Piece]) -> Answer:
        answer = Answer()
        for event in stream_of(pieces):
            data = json_object(event.data)
            if "error" in data:
                raise Failed(str(data["error"]))
            if tokens := int(data["sequence_length"]):
                answer.add(event.at, tokens)
        return answer


class Serve(HttpDriver):
    """``transformers serve``, through /v1/completions."""

    server = "serve"

    def prepare(self, request: Planned) -> bytes:
        temperature = self._context.temperature
        # The first request's generation configuration stays in force for the batching.
        generation = {
            "do_sample": temperature > 0,
            "eos_token_id": -1,
            "max_new_tokens": request.output_tokens,
            **({"temperature": temperature} if temperature > 0 else {}),
        }
        body = {
            "model": self._context.engine["model"],
            "prompt": request.prompt,
            "stream": True,
            "max_tokens": request.output_tokens,
            "generation_config": json.dumps(generation),
        }
        return self._pool.message("/v1/completions", {}, json.dumps(body).encode())

    def parse(self, pieces: list[Piece]) -> Answer:
        reply = parse_reply(pieces)
        if reply.status != 200:
            raise Failed(f"HTTP {reply.status}: {reply.text[:500]}")
        return completion((event.at, event.data) for event in events(reply.body))


def counted(vocabulary: Vocabulary, texts: list[tuple[float, str]], total: Any) -> Answer:
    """The answer that texts make, with their times.

    Args:
        total: tokens that the server counted; None if it did not, so that its text is measured.
    """
    answer = Answer(counted=total is not None)
    counts = vocabulary.count([text for _, text in texts])
    for (at, _), tokens in zip(texts, counts, strict=True):
        answer.add(at, tokens)
    answer.total = answer.total if total is None else int(total)
    if len(texts) == 1 and answer.counted:
        answer.tokens = [answer.total]
    return answer


def completion(parts: Iterable[tuple[float, str]]) -> Answer:
    """The answer that the events of a completion make: one with text is one token.

    Raises:
        Failed: one of them is an error, or the count at the end is another.
    """
    answer = Answer()
    for at, data in parts:
        if data == "[DONE]":
            break
        event = json_object(data)
        if "error" in event:
            raise Failed(str(event["error"]))
        if event["choices"][0]["text"]:
            answer.add(at, 1)
        usage = event.get("usage")
        if usage and usage["completion_tokens"] != answer.total:
            raise Failed(f"{answer.total} texts for {usage['completion_tokens']} tokens")
    return answer


def stream_of(pieces: list[Piece]) -> Iterator[Event]:
    """The events of a streamed reply.

    Raises:
        Failed: it is another reply, with an error.
    """
    reply = parse_reply(pieces)
    if reply.status != 200:
        raise Failed(error_of(json_object(reply.text), reply.status))
    return events(reply.body)


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a reply.

    Raises:
        Failed: it is no JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError:
        raise Failed(f"no JSON: {text[:100]!r}") from None
    if not isinstance(value, dict):
        raise Failed(f"no JSON object: {text[:100]!r}")
    return value


def error_of(answer: Mapping[str, Any], status: int = 200) -> str:
    """The text of an error."""
    text = answer.get("error") or answer.get("detail") or "no reason given"
    return str(text) if status == 200 else f"HTTP {status}: {text}"
