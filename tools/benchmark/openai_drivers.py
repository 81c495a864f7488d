"""Targets that have OpenAI's API: the face of this project, and vLLM's server."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tools.benchmark.driver import Answer, Failed
from tools.benchmark.http import Piece
from tools.benchmark.http_drivers import HttpDriver, counted, error_of, json_object, stream_of
from tools.benchmark.load import Planned

MODEL = "model"
"""The name under which a server is told to serve its model."""


class OpenAiSse(HttpDriver):
    """POST /v1/chat/completions, streamed."""

    server = "openai"
    path = "/v1/chat/completions"

    def prepare(self, request: Planned) -> bytes:
        body = {
            "model": MODEL,
            **self._prompt(request.prompt),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.output_tokens,
            "temperature": self._context.temperature,
            "seed": 0,
            **(
                {"ignore_eos": True}
                if self._context.ignore_eos
                else {"min_tokens": request.output_tokens}
            ),
        }
        return self._pool.message(self.path, {}, json.dumps(body).encode())

    def parse(self, pieces: list[Piece]) -> Answer:
        texts, total = deltas((event.at, event.data) for event in stream_of(pieces))
        return counted(self._context.vocabulary, texts, total)

    def _prompt(self, text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]}


class OpenAiText(OpenAiSse):
    """POST /v1/completions, streamed: for models without a chat template."""

    path = "/v1/completions"

    def _prompt(self, text: str) -> dict[str, Any]:
        return {"prompt": text}


class VllmServe(OpenAiText):
    """``vllm serve``."""

    server = "vllm-serve"


def deltas(parts: Iterable[tuple[float, str]]) -> tuple[list[tuple[float, str]], int | None]:
    """The texts of a stream with their times, and how many tokens the server counted.

    Raises:
        Failed: it ends with an error, or without its last event.
    """
    texts: list[tuple[float, str]] = []
    total = None
    for at, data in parts:
        if data == "[DONE]":
            return texts, total
        event = json_object(data)
        if "error" in event:
            raise Failed(error_of(event))
        for choice in event["choices"]:
            if text := choice.get("text") or choice.get("delta", {}).get("content"):
                texts.append((at, text))
        total = (event.get("usage") or {}).get("completion_tokens", total)
    raise Failed("no event [DONE]")
