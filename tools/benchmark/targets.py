"""The targets of a load: how a request is sent to each, and the tokens in its answer.

``prepare`` runs before the load, ``send`` during it, ``parse`` after it: while a load runs, a piece of an
answer costs a time stamp, else the generator would be measured as the server.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tools.benchmark.load import Load, Planned
from tools.server_sent_events import EventParser

MODEL = "model"  # the name under which a server with OpenAI's API serves

Pieces = list[tuple[float, Any]]  # seconds of time.perf_counter, and what came then


class Failed(Exception):
    """An answer that is an error; the text is the server's."""


@dataclass(frozen=True)
class Endpoints:
    """The addresses of the servers that are measured.

    Attributes:
        tokenizer: directory of the model's tokenizer, or its Hugging Face id.
        url: of a server over HTTP.
        grpc, http, metrics: host:port of Triton's.
        engine: parameters of the tensorrt_llm model, for an engine in the load generator.
        pids: of the servers; their descendants are watched with them.
    """

    tokenizer: str
    url: str = ""
    grpc: str = ""
    http: str = ""
    metrics: str = ""
    engine: Mapping[str, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()


@dataclass
class Answer:
    """Times and tokens of each chunk with content; ``total`` output tokens, if they were counted."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    total: int | None = None

    def add(self, at: float, tokens: int) -> None:
        self.times.append(at)
        self.tokens.append(tokens)


class Target(ABC):
    """Sends requests to one target, on one event loop."""

    server: ClassVar[str] = ""  # what has to run; nothing for an engine in the load generator

    def __init__(self, endpoints: Endpoints, tokenizer: Any, load: Load) -> None:
        self.endpoints, self.tokenizer, self.load = endpoints, tokenizer, load

    @abstractmethod
    def prepare(self, request: Planned) -> Any: ...

    @abstractmethod
    async def send(self, prepared: Any) -> Pieces: ...

    @abstractmethod
    def parse(self, pieces: Pieces) -> Answer:
        """Return the answer. Raises ``Failed``."""

    async def close(self) -> None:
        return

    def request(self, request: Planned) -> Any:
        """Make the request as the predictor would."""
        from cog_triton.request.request import Request

        return Request(
            prompt=request.prompt,
            seed=0,
            max_tokens=request.output_tokens,
            min_tokens=0 if self.load.ignore_eos else request.output_tokens,
            temperature=self.load.temperature,
            end_id=-1 if self.load.ignore_eos else None,
        )

    def inputs(self, request: Planned) -> dict[str, Any]:
        """Make the ensemble's inputs, the same as the predictor sends."""
        from cog_triton.request.request import triton_inputs

        return triton_inputs(self.request(request))


class HttpTarget(Target):
    """POST with a body of JSON; what comes is read as bytes."""

    path = ""
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, endpoints: Endpoints, tokenizer: Any, load: Load) -> None:
        super().__init__(endpoints, tokenizer, load)
        import aiohttp

        triton = self.server == "triton"
        self._url = (f"http://{endpoints.http}" if triton else endpoints.url) + self.path
        headers = {"Content-Type": "application/json", **self.headers}
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=connector, headers=headers)

    async def send(self, prepared: bytes) -> Pieces:
        async with self._http.post(self._url, data=prepared, timeout=None) as response:
            pieces: Pieces = [(time.perf_counter(), response.status)]
            async for data in response.content.iter_any():
                pieces.append((time.perf_counter(), data))
            return pieces

    async def close(self) -> None:
        await self._http.close()

    def _counted(self, texts: Pieces, total: Any) -> Answer:
        """Return the answer of texts; the tokens of each are those of its text."""
        answer = Answer(total=None if total is None else int(total))
        encoded = self.tokenizer.encode_batch([text for _, text in texts], add_special_tokens=False)
        for (at, _), tokens in zip(texts, encoded, strict=True):
            answer.add(at, len(tokens.ids))
        if len(texts) == 1 and answer.total:
            answer.tokens = [answer.total]
        return answer


class CogJson(HttpTarget):
    """POST /predictions, answered as a whole."""

    server, path = "cog", "/predictions"

    def prepare(self, request: Planned) -> bytes:
        inputs = {
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "min_tokens": request.output_tokens,
            "temperature": self.load.temperature,
            "seed": 0,
        }
        return json.dumps({"input": inputs}).encode()

    def parse(self, pieces: Pieces) -> Answer:
        prediction = _json(b"".join(data for _, data in pieces[1:]))
        if pieces[0][1] != 200 or prediction.get("status") != "succeeded":
            raise Failed(_error(prediction, pieces[0][1]))
        text = "".join(prediction["output"])
        total = prediction["metrics"].get("output_token_count")
        return self._counted([(pieces[-1][0], text)], total)


class CogSse(CogJson):
    """POST /predictions, streamed as server-sent events."""

    headers: ClassVar[Mapping[str, str]] = {"Accept": "text/event-stream"}

    def parse(self, pieces: Pieces) -> Answer:
        texts: Pieces = []
        total, status = None, "no event completed"
        for at, name, data in _events(pieces):
            event = _json(data)
            if name == "output" and event["chunk"]:
                texts.append((at, event["chunk"]))
            elif name == "metric" and event["name"] == "output_token_count":
                total = event["value"]
            elif name in ("completed", "error"):
                status = event.get("status") or "failed"
                if status != "succeeded":
                    raise Failed(_error(event))
        if status != "succeeded":
            raise Failed(status)
        return self._counted(texts, total)


class OpenAiSse(HttpTarget):
    """POST /v1/chat/completions, streamed."""

    server, path = "openai", "/v1/chat/completions"

    def prepare(self, request: Planned) -> bytes:
        ignored = self.load.ignore_eos
        body = {
            "model": MODEL,
            **self._prompt(request.prompt),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.output_tokens,
            "temperature": self.load.temperature,
            "seed": 0,
            **({"ignore_eos": True} if ignored else {"min_tokens": request.output_tokens}),
        }
        return json.dumps(body).encode()

    def parse(self, pieces: Pieces) -> Answer:
        texts: Pieces = []
        total = None
        for at, _, data in _events(pieces):
            if data.strip() == b"[DONE]":
                return self._counted(texts, total)
            event = _json(data)
            if "error" in event:
                raise Failed(_error(event))
            for choice in event["choices"]:
                if text := choice.get("text") or choice.get("delta", {}).get("content"):
                    texts.append((at, text))
            total = (event.get("usage") or {}).get("completion_tokens", total)
        raise Failed("no event [DONE]")

    def _prompt(self, text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]}


class OpenAiText(OpenAiSse):
    """POST /v1/completions, streamed: for models without a chat template."""

    path = "/v1/completions"

    def _prompt(self, text: str) -> dict[str, Any]:
        return {"prompt": text}


class VllmServe(OpenAiText):
    """``vllm serve``, by completions."""

    server = "vllm-serve"


class TritonHttp(HttpTarget):
    """generate_stream on the whole ensemble."""

    server, path = "triton", "/v2/models/ensemble/generate_stream"

    def prepare(self, request: Planned) -> bytes:
        from cog_triton.client.http_transport import json_value

        values = {name: json_value(value) for name, value in self.inputs(request).items()}
        return json.dumps({"id": secrets.token_hex(8), **values}).encode()

    def parse(self, pieces: Pieces) -> Answer:
        answer = Answer()
        for at, _, data in _events(pieces):
            event = _json(data)
            if "error" in event:
                raise Failed(str(event["error"]))
            if tokens := int(event["sequence_length"]):
                answer.add(at, tokens)
        answer.total = sum(answer.tokens)
        return answer


def _events(pieces: Pieces) -> Iterator[tuple[float, str, bytes]]:
    """Yield time, name and data of each event of a streamed answer. Raises ``Failed``."""
    if (status := pieces[0][1]) != 200:
        raise Failed(_error(_json(b"".join(data for _, data in pieces[1:])), status))
    parser = EventParser()
    for at, piece in pieces[1:]:
        for name, data in parser.feed(piece):
            yield at, name, data


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Failed(f"not a JSON object: {data[:100]!r}")
    return value


def _error(answer: Mapping[str, Any], status: int = 200) -> str:
    text = answer.get("error") or answer.get("detail") or "no reason given"
    return str(text) if status == 200 else f"HTTP {status}: {text}"
