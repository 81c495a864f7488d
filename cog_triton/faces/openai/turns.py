"""A chat as every API here asks for it: its request, and what the answer's text means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import ChatBody, NamedTool
from cog_triton.faces.openai.prompts import chat_prompt, effort_switches, template_text
from cog_triton.faces.openai.reasoning import ReasoningParser, thinks
from cog_triton.faces.openai.sampling import guides, log_probs, longest_output, sampling
from cog_triton.faces.openai.served import Served
from cog_triton.faces.openai.tools.calls import Format, call_parser, format_of
from cog_triton.faces.openai.tools.choice import call_guide, is_enforced, offered_tools
from cog_triton.faces.openai.tools.events import CallStart, Event, Parser, Text
from cog_triton.generation import Chunk
from cog_triton.request.request import Request


@dataclass(frozen=True)
class Turn:
    """One chat to be answered.

    Attributes:
        request: of the first answer.
        known: how the model writes calls; None if it is offered no tools.
        enforced: whether the answer has to be a call.
        named: whether that of one function.
        thinks: whether the answer may begin with thoughts.
    """

    request: Request
    known: Format | None
    enforced: bool
    named: bool
    thinks: bool

    def reader(self, new_call_id: Callable[[], str] | None = None) -> Reader:
        """For one answer.

        Args:
            new_call_id: makes an id of a call, where the model's format has no demands on it.
        """
        calls: Parser | None = None
        if self.known is not None:
            new_id = None if self.known.short_ids else new_call_id
            calls = call_parser(self.known, guided=self.enforced, new_id=new_id)
        if self.thinks:
            return Reader(ReasoningParser(self.request.prompt, calls))
        return Reader(calls)


def chat_turn(body: ChatBody, served: Served) -> Turn:
    """What a body asks for.

    Raises:
        ApiError, UserError: it asks for what cannot be had.
    """
    template = template_text(served.backend.tokenizer)
    known = _tool_format(body, template)
    request = chat_request(body, served, known)
    return Turn(
        request,
        known,
        is_enforced(body),
        isinstance(body.tool_choice, NamedTool),
        thinks(template) and request.guide is None,
    )


def chat_request(body: ChatBody, served: Served, known: Format | None) -> Request:
    """The request for the first answer.

    Raises:
        ApiError, UserError: the body asks for what cannot be had.
    """
    values = sampling(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    if known is not None and is_enforced(body):
        # A response_format is that of a text, of which there will be none.
        for name in guides(body):
            raise invalid(f"tool_choice and {name} contradict", "tool_choice")
        values["guide"] = call_guide(body, known)
    prompt = body_prompt(body, served)
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Request(
        prompt=prompt,
        add_special_tokens=bool(body.add_special_tokens),
        adapter=served.adapter(body.model),
        max_tokens=longest_output(served) if given is None else given,
        **log_probs(body),
        shown_tokens=known.marks if known else (),
        **served.token_ids(),
        **values,
    )


def body_prompt(body: ChatBody, served: Served) -> str:
    """The text that the model sees of a body."""
    switches = effort_switches(body.reasoning_effort, served.backend.tokenizer)
    return chat_prompt(
        served.backend,
        body.messages,
        offered_tools(body),
        switches | (body.chat_template_kwargs or {}),
        body.add_generation_prompt,
        body.continue_final_message,
    )


def _tool_format(body: ChatBody, template: str) -> Format | None:
    """How the model writes calls, None if it is not offered tools.

    Raises:
        ApiError: it is offered some, and its template takes none.
    """
    if not offered_tools(body):
        return None
    if (known := format_of(template)) is None:
        raise invalid("tools: the chat template of this model takes none", "tools")
    return known


class Reader:
    """Tells what the chunks of one answer mean.

    Attributes:
        plain: whether all of the text is for the reader.
        called: whether there has been a call.
    """

    def __init__(self, parser: Parser | None) -> None:
        self.plain = parser is None
        self.called = False
        self._parser = parser

    def read(self, chunk: Chunk) -> list[Event]:
        """The events that are certain with this chunk."""
        if self._parser is None:
            return [Text(chunk.text)] if chunk.text else []
        events = self._parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            events += self._parser.flush()
        self.called = self.called or any(isinstance(event, CallStart) for event in events)
        return events
