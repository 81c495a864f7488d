"""Requests of every kind whose answers, some hundred tokens each, have to go on after a failure."""

from dataclasses import dataclass, field
from typing import Any, Literal

from tests.openai_server import MESSAGES, QUESTION

TOKENS = 120
Json = dict[str, Any]


@dataclass(frozen=True)
class ResumingRequest:
    """A request, as a client sends it."""

    api: Literal["openai", "cog"]
    path: str
    body: Json
    headers: dict[str, str] = field(default_factory=dict)
    has_webhook: bool = False  # that gets the answer; the test adds its address to the body


def chat(**fields: Any) -> ResumingRequest:
    """A chat that is sampled and streamed, but for these fields."""
    return ResumingRequest("openai", "chat/completions", {"messages": MESSAGES, **sampled(fields)})


def completion(**fields: Any) -> ResumingRequest:
    """The same of a text."""
    return ResumingRequest("openai", "completions", {"prompt": QUESTION, **sampled(fields)})


def sampled(fields: Json) -> Json:
    return {
        "model": "demo",
        "max_tokens": TOKENS,
        "stream": True,
        "temperature": 1.0,
        "seed": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def prediction(
    headers: dict[str, str], *, has_webhook: bool = False, **inputs: Any
) -> ResumingRequest:
    """A prediction of Cog's API that is sampled, but for these inputs."""
    defaults = {"prompt": QUESTION, "max_tokens": TOKENS, "temperature": 1.0, "seed": 1}
    body = {"input": {**defaults, "ignore_eos": True, **inputs}}
    return ResumingRequest("cog", "predictions", body, headers, has_webhook)


EVENTS = {"Accept": "text/event-stream"}
IN_BACKGROUND = {"Prefer": "respond-async"}
STUDENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 120, "maxLength": 150},
        "grade": {"type": "integer"},
        "sure": {"type": "boolean"},
    },
    "required": ["name", "grade", "sure"],
    "additionalProperties": False,
}
LONG_TEXT = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 150, "maxLength": 170}},
    "required": ["a"],
}
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 80, "maxLength": 99}},
    "required": ["text"],
}
ONE_OF_TWO = [
    "one of several answers of which each is as long as it has to be, so that it is cut in the "
    "middle, 123456789012345678901234567890",
    "one of several answers of which each is as long as it has to be, and so that none is done "
    "too soon, 098765432109876543210987654321",
]

REQUESTS: dict[str, ResumingRequest] = {
    "greedy": chat(temperature=0),
    "sampled": completion(seed=3),
    "json schema": chat(
        ignore_eos=False,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "one", "schema": STUDENT},
        },
    ),
    "greedy json schema": chat(ignore_eos=False, temperature=0, guided_json=LONG_TEXT),
    "regex": completion(ignore_eos=False, structured_outputs={"regex": "(yes|no), [a-f0-9]{90}"}),
    "grammar": completion(
        ignore_eos=False,
        structured_outputs={"grammar": 'root ::= "a" ("b" | "cd" | "d") root'},
    ),
    "choice": chat(ignore_eos=False, guided_choice=ONE_OF_TWO),
    "call": chat(
        ignore_eos=False,
        tool_choice="required",
        parallel_tool_calls=False,
        tools=[{"type": "function", "function": {"name": "note", "parameters": NOTE}}],
    ),
    "three": chat(n=3, seed=5),
    "list": completion(prompt=["What is a token?", "What is a KV cache?"], seed=6),
    "log probabilities": chat(logprobs=True, top_logprobs=2),
    "greedy log probabilities": completion(logprobs=1, temperature=0),
    "prompt log probabilities": completion(prompt_logprobs=1, logprobs=0, stream=False),
    "penalties": completion(
        presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2, bad_words=["the"]
    ),
    "minimum": completion(ignore_eos=False, min_tokens=100, temperature=0, presence_penalty=0.2),
    "stop": completion(stop=["is then applied to inputs it has never seen", "zzz"], seed=2),
    "reasoning": chat(chat_template_kwargs={"enable_thinking": True}),
    "whole": chat(stream=False, seed=9),
    "responses": ResumingRequest(
        "openai",
        "responses",
        {
            "model": "demo",
            "input": QUESTION,
            "max_output_tokens": TOKENS,
            "stream": False,
            "temperature": 0,
            "seed": 1,
        },
    ),
    "messages": ResumingRequest(
        "openai",
        "messages",
        {
            "model": "demo",
            "messages": MESSAGES,
            "max_tokens": TOKENS,
            "stream": True,
            "temperature": 0,
        },
    ),
    "adapter": completion(model="poet"),
    "greedy adapter": completion(model="poet", temperature=0),
    "sse": prediction(EVENTS, seed=4),
    "json": prediction({}, temperature=0),
    "webhook": prediction(IN_BACKGROUND, has_webhook=True, seed=8),
    "guided sse": prediction(EVENTS, regex="[a-f]{60}[g-k]{60}", seed=8, ignore_eos=False),
}
