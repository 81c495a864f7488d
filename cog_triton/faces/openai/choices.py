"""Responses that are a list of choices: those of chats and of text completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cog_triton.faces.openai.answers import Answer, Answering
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.fields import Sampling
from cog_triton.faces.openai.sampling import check_fields
from cog_triton.faces.openai.served import Served
from cog_triton.faces.openai.wire import DONE, Head, dumps, event, new_id, usage
from cog_triton.generation import Chunk
from cog_triton.request.request import Request


class Choice(Protocol):
    """What becomes of one answer's chunks."""

    def begin(self) -> bytes:
        """The events before the first chunk."""

    def events(self, chunk: Chunk) -> bytes:
        """The events of a chunk."""

    def add(self, chunk: Chunk) -> None:
        """Takes a chunk in; the other way of giving an answer."""

    def body(self) -> dict[str, Any]:
        """The whole answer, of the chunks taken in."""

    def prompt(self) -> dict[str, Any]:
        """Fields of the whole response that are about the answer's prompt."""


@dataclass
class Counts:
    """Tokens of the answers to one request.

    Attributes:
        choices: how many a prompt has.
        prompts: tokens of each prompt, by the number of its first choice.
        outputs: by the number of the choice.
    """

    choices: int
    prompts: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)

    def add(self, number: int, chunk: Chunk) -> None:
        self.outputs[number] = chunk.output_tokens
        if chunk.input_tokens is not None:
            self.prompts[number // self.choices] = chunk.input_tokens

    def usage_of(self, number: int) -> dict[str, Any]:
        """That of one choice so far."""
        return usage(self.prompts.get(number // self.choices, 0), self.outputs.get(number, 0))

    def usage(self) -> dict[str, Any]:
        return usage(sum(self.prompts.values()), sum(self.outputs.values()))


@dataclass(frozen=True)
class Choices:
    """See ``answers.Writer``."""

    head: Head
    choices: Sequence[Choice]
    counts: Counts
    continuous_usage: bool = False

    def begin(self, chunk: Chunk) -> bytes:
        """See ``Writer``."""
        if chunk.input_tokens is not None:
            self.counts.prompts[0] = chunk.input_tokens
        return b"".join(
            self._with_usage(number, choice.begin()) for number, choice in enumerate(self.choices)
        )

    def events(self, number: int, chunk: Chunk) -> bytes:
        """See ``Writer``."""
        self.counts.add(number, chunk)
        return self._with_usage(number, self.choices[number].events(chunk))

    def _with_usage(self, number: int, events: bytes) -> bytes:
        if not self.continuous_usage:
            return events
        # Each event ends with the null that stands for its usage; a text has its quotes escaped.
        counts = dumps(self.counts.usage_of(number))
        return events.replace(b'"usage":null}\n\n', b'"usage":' + counts + b"}\n\n")

    def end(self) -> bytes:
        """See ``Writer``."""
        return (self.head.event([], self.counts.usage()) if self.head.usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        """See ``Writer``."""
        return event(error.body()) + DONE

    def add(self, number: int, chunk: Chunk) -> None:
        """See ``Writer``."""
        self.counts.add(number, chunk)
        self.choices[number].add(chunk)

    def body(self) -> dict[str, Any]:
        """See ``Writer``."""
        whole = self.head.body([choice.body() for choice in self.choices], self.counts.usage())
        return whole | self.choices[0].prompt()


def head_of(body: Sampling, served: Served, prefix: str, kind: str, chunk: str) -> Head:
    """The head of the response to a body, whose id begins with a prefix; see ``Head`` for the rest."""
    return Head(new_id(prefix), kind, chunk, served.now(), body.model, body.include_usage)


def answering(
    body: Sampling,
    served: Served,
    head: Head,
    requests: Sequence[Request],
    choices: Sequence[Choice],
    request_id: str,
) -> Answering:
    """The response to a body.

    Args:
        requests: in the order of the choices: all to the first prompt, all to the second.

    Raises:
        ApiError: the body has a field that no engine honours.
    """
    answer = Answer(
        served,
        Choices(head, choices, Counts(body.choices), body.continuous_usage),
        lambda: served.generate(requests, request_id),
        check_fields(body),
    )
    return Answering(answer, stream=bool(body.stream))
