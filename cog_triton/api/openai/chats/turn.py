"""One chat to be answered: its request, and what its answer may be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cog_triton.api.openai.chats.call_guides import call_guide, either_guide
from cog_triton.api.openai.chats.loose_schemas import has_mistake
from cog_triton.api.openai.chats.prompt import chat_prompt, template_text
from cog_triton.api.openai.chats.sampling import UNKNOWN_CONTEXT, sampling
from cog_triton.api.openai.chats.tool_use import ToolUse, tool_use
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.tools import Tool
from cog_triton.api.openai.served import Served, current
from cog_triton.api.openai.tool_calls import blocks
from cog_triton.api.openai.tool_calls.formats import Format, format_of
from cog_triton.request.request import Request


@dataclass(frozen=True)
class Turn:
    """One chat to be answered."""

    request: Request  # of the first answer
    use: ToolUse
    known: Format | None  # of the model's calls; None if the answer can have none
    thoughts: blocks.Thoughts | None  # with which the answer may begin
    guided_either: bool = False  # a guide allows calls in JSON, and an answer in JSON
    parallel: bool = True  # the answer may have several calls

    def parser(self, prefix: str = "call_", draw: Callable[[], str] = str) -> blocks.Parser:
        """Return the parser of one answer, whose calls have ids of a prefix, and of letters if drawn."""
        prompt = None if self.thoughts is None else self.request.prompt
        thoughts = self.thoughts or blocks.THINK
        if self.known is None:
            return blocks.Parser(prompt, thoughts=thoughts)
        known = self.known
        parser = known.parser(
            lambda: known.new_id(prefix, draw()),
            prompt,
            guided=self.use.enforced,
            guided_either=self.guided_either,
            schemas=self.use.schemas,
            thoughts=thoughts,
        )
        if not self.parallel:
            parser.most_calls = 1
        return parser


def chat_turn(body: ChatBody, served: Served, tool_places: Mapping[str, str] | None = None) -> Turn:
    """Return what a body asks for, or raise ApiError or UserError.

    Args:
        tool_places: where the schemas of tools are in the client's body, by the names of the tools; if it
            is None, those of a chat's body.
    """
    template = template_text(served.backend.tokenizer)
    use = tool_use(body)
    known = format_of(template)
    if use.offered and known is None:
        raise invalid("tools: this model's chat template does not support them", "tools")
    if known is not None and not use.offered and not known.marks_messages:
        known = None
    parallel = body.parallel_tool_calls is not False
    values = sampling(body, served)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    if known and use.enforced:
        # A response_format is that of a text, of which there will be none.
        for name in body.vllm_guides():
            raise invalid(f"tool_choice and {name} cannot be combined", "tool_choice")
        values["guide"] = call_guide(use, known, parallel=parallel)
        _blame_tools(use, _tool_places(body) if tool_places is None else tool_places)
    guided_either = known is not None and bool(use.offered) and _allows_either(use, body)
    if known and guided_either:
        values["guide"] = either_guide(use, known, values["guide"], parallel=parallel)
    # A guide has an answer begin with what it allows.
    is_guided = values["guide"] is not None
    thoughts = None if is_guided else blocks.thoughts_of(template)
    request = Request(
        prompt=chat_prompt(body, served),
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens=_max_tokens(body, served),
        shown_tokens=_shown_tokens(known, thoughts),
        **values,
    )
    if request.guide is not None and not use.enforced and not guided_either:
        known = None  # the guide is of a text, in which there is no call
    return Turn(request, use, known, thoughts, guided_either, parallel)


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
    blamed = wrong[:1] or tools
    place = places.get(blamed[0].function.name, "tools") if len(blamed) == 1 else "tools"
    call = current()
    call.names = {**call.names, "guide": place}


def _allows_either(use: ToolUse, body: ChatBody) -> bool:
    """Return whether the answer may be calls, or else a text of a JSON form, as OpenAI's API has it."""
    form = body.response_format
    return not use.enforced and form is not None and form.asks_for_json


def _shown_tokens(known: Format | None, thoughts: blocks.Thoughts | None) -> tuple[str, ...]:
    """Return the special tokens that the text has to have for its parser."""
    tokens = list(known.special_tokens) if known else []
    if thoughts is not None:
        tokens += thoughts.special_tokens
    return tuple(tokens)
