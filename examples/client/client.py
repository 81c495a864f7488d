#!/usr/bin/env python3
"""A client of the predictor's HTTP API, with httpx alone: a whole answer, a stream, a cancel.

    python examples/client/client.py whole  '{"prompt": "What is machine learning?"}'
    python examples/client/client.py stream '{"prompt": "What is machine learning?"}'
    python examples/client/client.py cancel '{"prompt": "What is machine learning?"}'

The second argument has the inputs of docs/api.md; a third is the server's address.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

# A whole answer is silent until it is complete, so reading may take long.
TIMEOUT = httpx.Timeout(10, read=600)


class PredictionFailed(Exception):
    """The server refused the request, or could not answer it; the text says why, with its code."""


def whole(client: httpx.Client, inputs: dict[str, Any]) -> str:
    """The answer, when it is complete."""
    reply = client.post("/predictions", json={"input": inputs})
    check(reply)
    prediction = reply.json()
    if prediction["status"] != "succeeded":
        raise PredictionFailed(prediction["error"])
    return "".join(prediction["output"])


def stream(client: httpx.Client, prediction_id: str, inputs: dict[str, Any]) -> Iterator[str]:
    """The answer, piece by piece as it is made; after a cancel it ends early.

    Closing the generator before its end closes the connection, which stops the request as well.
    """
    with client.stream(
        "PUT",
        f"/predictions/{prediction_id}",
        json={"input": inputs},
        headers={"Accept": "text/event-stream"},
    ) as reply:
        check(reply)
        for name, data in events(reply.iter_bytes()):
            if name == "output":
                yield data["chunk"]
            elif name == "completed" and data["status"] == "failed":
                raise PredictionFailed(data["error"])


def cancel(client: httpx.Client, prediction_id: str) -> None:
    """Stops a prediction. One that has already ended gives a 404, which is fine here."""
    client.post(f"/predictions/{prediction_id}/cancel")


def check(reply: httpx.Response) -> None:
    """Raises what the server refused: 422 for a wrong input, 409 when it is full."""
    if reply.is_error:
        reply.read()
        raise PredictionFailed(f"HTTP {reply.status_code}: {reply.text}")


def events(pieces: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events, name and data of each.

    An event ends with an empty line. (httpx's iter_lines would also split at characters such as
    U+2028, which may stand in an answer.)
    """
    unfinished = b""
    for piece in pieces:
        *complete, unfinished = (unfinished + piece).split(b"\n\n")
        for event in complete:
            fields = dict(line.partition(b": ")[::2] for line in event.split(b"\n"))
            if b"data" in fields:
                yield fields[b"event"].decode(), json.loads(fields[b"data"])


def show(client: httpx.Client, action: str, inputs: dict[str, Any]) -> None:
    """Prints an answer; with ``cancel``, of a request that is cancelled at its first piece."""
    if action == "whole":
        print(whole(client, inputs))
        return
    prediction_id = uuid.uuid4().hex
    for number, text in enumerate(stream(client, prediction_id, inputs)):
        print(text, end="", flush=True)
        if action == "cancel" and number == 0:
            cancel(client, prediction_id)
    print()


def main() -> None:
    defaults = ["whole", '{"prompt": "What is machine learning?"}', "http://localhost:5000"]
    arguments = sys.argv[1:]
    action, inputs, url = arguments + defaults[len(arguments) :]
    if action not in ("whole", "stream", "cancel"):
        sys.exit(f"usage: {sys.argv[0]} whole|stream|cancel [INPUT] [URL]")
    with httpx.Client(base_url=url, timeout=TIMEOUT) as client:
        try:
            show(client, action, json.loads(inputs))
        except PredictionFailed as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
