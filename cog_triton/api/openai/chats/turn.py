"""One chat to be answered: its request, and what its answer may be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cog_triton.api.openai.call import current
from cog_triton.api.openai.chats.call_guides import call_guide, either_guide
from cog_triton.api.openai.chats.loose_schemas import has_mistake
from cog_triton.api.openai.chats.prompt import chat_prompt, template_text
from cog_triton.api.openai.chats.sampling import UNKNOWN_CONTEXT, sampling
from cog_triton.api.openai.chats.tool_use import ToolUse, tool_use
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.tools import Tool
from cog_triton.api.openai.served import Served
from cog_triton.api.openai.tool_calls.blocks import AnswerStart, Parser, Thoughts, thoughts_of
from cog_triton.api.openai.tool_calls.format import Format
from cog_triton.api.openai.tool_calls.formats import GuidedTo, format_of, new_parser
from cog_triton.request.request import Request


@dataclass(frozen=True)
class Turn:
    """One chat to be answered.

    Attributes:
        request: the request for the first answer.
        call_format: the format of the model's calls; None if the answer can have none.
        thoughts: the marks of the thoughts that the answer may begin with.
        guided_to: what a guide limits the answer to, if it asks for calls.
        parallel: the answer may have several calls.
    """

    request: Request
    use: ToolUse
    call_format: Format | None
    thoughts: Thoughts | None
    guided_to: GuidedTo | None = None
    parallel: bool = True

    def parser(self, prefix: str = "call_", draw: Callable[[], str] = str) -> Parser:
        """Return the parser of one answer, whose calls have ids of a prefix, and of letters if drawn."""
        call_format = self.call_format
        if call_format is None:
            return Parser(AnswerStart(self.request.prompt, self.thoughts))
        start = AnswerStart(
            prompt=self.request.prompt,
            thoughts=self.thoughts,
            schemas=self.use.schemas,
            new_id=lambda: call_format.new_id(prefix, draw()),
            max_calls=None if self.parallel else 1,
        )
        return new_parser(call_format, start, self.guided_to)


def chat_turn(body: ChatBody, served: Served, tool_places: Mapping[str, str] | None = None) -> Turn:
    """Return what a body asks for, or raise ApiError or UserError.

    Args:
        tool_places: where the schemas of tools are in the client's body, by the names of the tools; if it
            is None, those of a chat's body.
    """
    template = template_text(served.backend.tokenizer)
    use = tool_use(body)
    call_format = _call_format(template, use)
    parallel = body.parallel_tool_calls is not False
    values = sampling(body, served)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    guided_to: GuidedTo | None = None
    if call_format and use.enforced:
        # A response_format is that of a text, of which there will be none.
        for name in body.vllm_guides():
            raise invalid(f"tool_choice and {name} cannot be combined", "tool_choice")
        guided_to = "calls"
        values["guide"] = call_guide(use, call_format, parallel=parallel)
        _blame_tools(use, _tool_places(body) if tool_places is None else tool_places)
    elif call_format and use.offered and _asks_for_json(body):
        guided_to = "calls or an answer"
        values["guide"] = either_guide(use, call_format, values["guide"], parallel=parallel)
    is_guided = values["guide"] is not None
    thoughts = None if is_guided else thoughts_of(template)  # a guide allows none
    request = Request(
        prompt=chat_prompt(body, served),
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens=_max_tokens(body, served),
        shown_tokens=_shown_tokens(call_format, thoughts),
        **values,
    )
    if is_guided and guided_to is None:
        call_format = None  # the guide asks for a text, in which there is no call
    return Turn(request, use, call_format, thoughts, guided_to, parallel)


def _call_format(template: str, use: ToolUse) -> Format | None:
    """Return the format of the model's calls, or None if its answer can have none; may raise ApiError."""
    call_format = format_of(template)
    if use.offered and call_format is None:
        raise invalid("tools: this model's chat template does not support them", "tools")
    if call_format is not None and not use.offered and not call_format.marks_messages:
        return None
    return call_format


def _max_tokens(body: ChatBody, served: Served) -> int:
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens
    if body.max_tokens is not None:
        return body.max_tokens
    return served.backend.context_length or UNKNOWN_CONTEXT


def _tool_places(body: ChatBody) -> dict[str, str]:
    places = {}
    for number, tool in enumerate(body.tools or []):
        if isinstance(tool, Tool):
            places[tool.function.name] = f"tools[{number}].function.parameters"
    return places


def _blame_tools(use: ToolUse, places: Mapping[str, str]) -> None:
    """Have an engine's refusal of the guide name the schema of a tool, and not response_format."""
    tools = [use.named] if use.named else use.offered
    wrong = [tool for tool in tools if has_mistake(tool.function.parameters or {})]
    place = "tools"
    if wrong or len(tools) == 1:
        blamed = wrong[0] if wrong else tools[0]
        place = places.get(blamed.function.name, "tools")
    call = current()
    call.names = {**call.names, "guide": place}


def _asks_for_json(body: ChatBody) -> bool:
    """Return whether an answer that is not calls is to be JSON, as OpenAI's API allows beside tools."""
    form = body.response_format
    return form is not None and form.asks_for_json


def _shown_tokens(call_format: Format | None, thoughts: Thoughts | None) -> tuple[str, ...]:
    """Return the special tokens that the text has to have for its parser."""
    tokens = list(call_format.special_tokens) if call_format else []
    if thoughts is not None:
        tokens += thoughts.special_tokens
    return tuple(tokens)
