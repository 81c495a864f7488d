"""A chat as every API here asks for it: its prompt, tools and request, and the parser of its answer."""

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cog_triton.api.openai import blocks, contents, custom_tools, fields, parsing
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.loose_schemas import has_mistake, loosened
from cog_triton.api.openai.served import Served, current
from cog_triton.errors import is_unicode, shown
from cog_triton.request.limits import UNKNOWN_TOKENS
from cog_triton.request.request import Guide, GuideKind, Request
from cog_triton.text.chat import render_chat
from cog_triton.text.conversation import call_as_json
from cog_triton.text.tokenizer import Tokenizer

# OpenAI's; a template may name others.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Of a response_format, the types that ask for JSON.
_JSON_FORMS = frozenset({"json_schema", "json", "json_object"})
# Parts of an assistant's content that are thoughts.
_THOUGHT_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
# Fields of a message that may have them.
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
THINKING_SWITCH = "enable_thinking"  # in most templates


@dataclass(frozen=True)
class ToolUse:
    """The use of tools that a chat asks for."""

    offered: list[fields.Tool]
    named: fields.Tool | None = None  # the only one that may be called
    enforced: bool = False  # the answer has to be a call
    custom: frozenset[str] = frozenset()  # the names of those that are custom tools for the client

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schemas of the tools' parameters, by the names of the tools."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.offered}


@dataclass(frozen=True)
class Turn:
    """One chat to be answered."""

    request: Request  # of the first answer
    use: ToolUse
    known: parsing.Format | None  # of the model's calls; None if the answer can have none
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


def chat_turn(
    body: fields.ChatBody, served: Served, tool_places: Mapping[str, str] | None = None
) -> Turn:
    """Return what a body asks for, or raise ApiError or UserError.

    Args:
        tool_places: where the schemas of tools are in the client's body, by the names of the tools; if it
            is None, those of a chat's body.
    """
    template = template_text(served.backend.tokenizer)
    use = tool_use(body)
    known = parsing.format_of(template)
    if use.offered and known is None:
        raise invalid("tools: this model's chat template does not support them", "tools")
    if known is not None and not use.offered and not known.marks_messages:
        known = None
    values = fields.sampling(body, served)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    if known and use.enforced:
        # A response_format is that of a text, of which there will be none.
        for name in fields.guides(body):
            raise invalid(f"tool_choice and {name} cannot be combined", "tool_choice")
        values["guide"] = call_guide(use, known, parallel=body.parallel_tool_calls is not False)
        _name_schemas(use, _tool_places(body) if tool_places is None else tool_places)
    guided_either = known is not None and bool(use.offered) and _allows_either(use, body)
    if known and guided_either:
        values["guide"] = either_guide(
            use, known, values["guide"], parallel=body.parallel_tool_calls is not False
        )
    # A guide has an answer begin with what it allows.
    is_guided = values["guide"] is not None
    thoughts = None if is_guided else blocks.thoughts_of(template)
    context = served.backend.context_length or fields.UNKNOWN_CONTEXT
    most = (body.max_completion_tokens, body.max_tokens, context)
    request = Request(
        prompt=chat_prompt(body, served),
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens=next(tokens for tokens in most if tokens is not None),
        shown_tokens=_shown_tokens(known, thoughts),
        **values,
    )
    if request.guide is not None and not use.enforced and not guided_either:
        known = None  # the guide is of a text, in which there is no call
    parallel = body.parallel_tool_calls is not False
    return Turn(request, use, known, thoughts, guided_either, parallel)


def _tool_places(body: fields.ChatBody) -> dict[str, str]:
    places = {}
    for number, tool in enumerate(body.tools or []):
        if isinstance(tool, fields.Tool):
            places[tool.function.name] = f"tools[{number}].function.parameters"
    return places


def _name_schemas(use: ToolUse, places: Mapping[str, str]) -> None:
    """Have an engine's refusal of the guide name the schema of a tool, and not response_format."""
    tools = [use.named] if use.named else use.offered
    wrong = [tool for tool in tools if has_mistake(tool.function.parameters or {})]
    blamed = wrong[:1] or tools
    place = places.get(blamed[0].function.name, "tools") if len(blamed) == 1 else "tools"
    call = current()
    call.names = {**call.names, "guide": place}


def _allows_either(use: ToolUse, body: fields.ChatBody) -> bool:
    """Return whether the answer may be calls, or else a text of a JSON form, as OpenAI's API has it."""
    form = body.response_format
    return not use.enforced and form is not None and form.type in _JSON_FORMS


def _shown_tokens(
    known: parsing.Format | None, thoughts: blocks.Thoughts | None
) -> tuple[str, ...]:
    """Return the special tokens that the text has to have for its parser."""
    tokens = list(known.special_tokens) if known else []
    if thoughts is not None:
        tokens += thoughts.special_tokens
    return tuple(tokens)


def chat_prompt(body: fields.ChatBody | fields.TokenizeBody, served: Served) -> str:
    """Render the text that the model sees of a chat."""
    if body.continue_final_message and body.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt cannot both be true"
        raise invalid(text, "continue_final_message")
    tools = offered_functions(body)
    options = body.chat_template_kwargs or {}
    template = template_text(served.backend.tokenizer)
    if isinstance(body, fields.ChatBody):
        tools = tool_use(body).offered
        options = effort_switches(body.reasoning_effort, template) | options
    known = parsing.format_of(template)
    return render_chat(
        served.backend.tokenizer,
        _plain_messages(body, template),
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        kwargs=options,
        limits=served.backend.limits,
        write_call=known.written_call if known else call_as_json,
    )


async def token_ids(served: Served, text: str, *, special: bool) -> list[int]:
    """Return the token ids of a text, or refuse it; ``special``: with the tokens that begin a text."""
    if not is_unicode(text):
        raise invalid("the prompt must be valid Unicode, without lone surrogates")
    served.backend.limits.check("the prompt", len(text))
    tokenizer = served.backend.tokenizer
    return list((await asyncio.to_thread(tokenizer, text, add_special_tokens=special)).input_ids)


async def with_ids(request: Request, body: fields.Sampling, served: Served) -> Request:
    """Return a request with its prompt as token ids, where a body asks for these or for a part of them."""
    most = body.truncate_prompt_tokens
    if not body.return_token_ids and most is None:
        return request
    ids, beginning = list(request.prompt_ids), list[int]()
    if not ids:
        special = request.add_special_tokens is not False
        ids = await token_ids(served, request.prompt, special=special)
        beginning = await token_ids(served, "", special=special)
    if most is None:
        return replace(request, prompt_ids=tuple(ids))
    if most == -1:
        context = served.backend.context_length or UNKNOWN_TOKENS
        most = context - (request.max_tokens if request.max_tokens < context else 1)
    # The tokens that begin a text stay.
    kept = beginning[:most] if ids[: len(beginning)] == beginning else []
    rest, most = ids[len(kept) :], most - len(kept)
    if len(rest) > most:
        rest = rest[:most] if body.truncation_side == "right" else rest[len(rest) - most :]
    return replace(request, prompt="", prompt_ids=(*kept, *rest))


def effort_switches(effort: str | None, template: str) -> dict[str, Any]:
    """Return what a chat template takes for an effort of reasoning; nothing where it knows of none."""
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    for name in (THINKING_SWITCH, "thinking"):
        if re.search(rf"\b{name} is (not )?(defined|false|true)|\bif (not )?{name}\b", template):
            return {name: effort != "none"}
    return {}


def _plain_messages(
    body: fields.ChatBody | fields.TokenizeBody, template: str
) -> list[dict[str, Any]]:
    """Return the messages as templates know them, and without what a model of text cannot read."""
    plain = []
    messages = body.messages or []
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        turn = _plain(message, place, template)
        newest = number == len(messages) - 1 and message.role != "tool"
        if isinstance(turn.get("content"), list):
            turn["content"] = [
                _readable_part(part, f"{place}.content", body, newest=newest)
                for part in turn["content"]
            ]
        plain.append(turn)
    return plain


def _readable_part(part: Any, place: str, body: fields.Body, *, newest: bool) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in contents.UNREADABLE:
        return part  # the template's side refuses what it does not know
    if newest:
        raise contents.refusal(kind, place, place)
    return {"type": "text", "text": contents.left_out(kind, body)}


def _plain(message: fields.Message, place: str, template: str) -> dict[str, Any]:
    """Return a message as templates know it: a refusal is text."""
    role = message.role
    if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        text = f"{place}.role must be one of {', '.join(sorted(ROLES))}, not {shown(role)}"
        raise invalid(text, f"{place}.role", "invalid_value")
    if role == "tool" and not message.tool_call_id:
        where = f"{place}.tool_call_id"
        raise invalid(f"you must provide {where}", where, "missing_required_parameter")
    plain = message.model_dump(exclude_none=True, exclude={"refusal"})
    if message.refusal and not plain.get("content"):
        plain["content"] = message.refusal
    if role == "assistant":
        _gather_thoughts(plain)
        if isinstance(plain.get("tool_calls"), list):
            plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    for part in plain["content"] if isinstance(plain.get("content"), list) else ():
        if isinstance(part, dict) and part.get("type") == "refusal":
            part |= {"type": "text", "text": part.pop("refusal", None)}
    return plain


def _plain_call(call: Any) -> Any:
    """Return an earlier call as templates know it; that of a custom tool is one of a function."""
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict) or "function" in call:
        return call
    name = custom.get("name")
    text = custom.get("input")
    arguments = custom_tools.arguments_of(text if isinstance(text, str) else "")
    kept = {field: value for field, value in call.items() if field not in ("type", "custom")}
    return {**kept, **function(name=name if isinstance(name, str) else "", arguments=arguments)}


def _gather_thoughts(plain: dict[str, Any]) -> None:
    """Give an assistant's message its thoughts under one name; a template gets them under those it reads.

    Some clients return them as ``reasoning``, as vLLM and OpenRouter name them, as ``thinking``, as Ollama
    does, or as parts of the content.
    """
    thoughts = [next((plain[name] for name in _THOUGHT_FIELDS if plain.get(name)), "")]
    content = plain.get("content")
    if isinstance(content, list):
        thoughts += [_thought_text(part) for part in content if _is_thought(part)]
        plain["content"] = [part for part in content if not _is_thought(part)]
    texts = [text for text in thoughts if isinstance(text, str) and text]
    if texts:
        plain["reasoning_content"] = "\n".join(texts)


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _THOUGHT_PARTS


def _thought_text(part: dict[str, Any]) -> str:
    """Return the text of a part that is a thought; Mistral's has a list of parts in it."""
    value = part.get("thinking") or part.get("reasoning") or part.get("text")
    if isinstance(value, list):
        value = "".join(str(inner.get("text") or "") for inner in value if isinstance(inner, dict))
    return value if isinstance(value, str) else ""


def takes_tools(served: Served) -> bool:
    """Return whether the model's chat template has a place for tools."""
    return parsing.format_of(template_text(served.backend.tokenizer)) is not None


def template_text(tokenizer: Tokenizer) -> str:
    """Return the model's chat template, all of them if it has several; empty without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def joined_text(content: Any, kinds: Collection[str], place: str, param: str | None = None) -> str:
    """Return the text of a content, or refuse a part that is not of one of some kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in kinds:
            raise contents.refusal(part.type, place, param)
    return "\n".join(part.text or getattr(part, "refusal", None) or "" for part in content)


def function(**values: Any) -> dict[str, Any]:
    """Return a function as chats have it: that of a tool, of a choice, or of a call."""
    return {"type": "function", "function": values}


def tool_use(body: fields.ChatBody) -> ToolUse:
    """Return the use of tools that ``tools`` and ``tool_choice`` ask for; what cannot run is noted."""
    tools = offered_functions(body)
    custom = custom_names(body)
    choice = body.tool_choice
    if isinstance(choice, fields.HostedTool):
        if all(tool.type != choice.type for tool in body.tools or []):
            text = f"tool_choice names no tool: {shown(choice.type)}"
            raise invalid(text, "tool_choice", "invalid_value")
        body.leave_out(f"tool_choice {choice.type}")
        return ToolUse(tools, custom=custom)
    if choice is None or choice == "auto":
        return ToolUse(tools, custom=custom)
    if choice == "none":
        return ToolUse([])
    if not body.tools:
        raise invalid("tool_choice is only allowed when tools are given", "tool_choice")
    if choice == "required":
        if not tools:
            body.leave_out("tool_choice required")  # all tools were left out
        return ToolUse(tools, enforced=bool(tools), custom=custom)
    allowed = choice.allowed_tools.tools if isinstance(choice, fields.AllowedTools) else [choice]
    names = []
    for tool in allowed:
        if isinstance(tool, fields.HostedTool):
            body.leave_out(f"tool_choice {tool.type}")
        else:
            names.append(_name_of(tool))
    for name in names:
        if all(tool.function.name != name for tool in tools):
            raise invalid(f"tool_choice names an unknown tool: {name}", "tool_choice")
    chosen = [tool for tool in tools if tool.function.name in names]
    if not isinstance(choice, fields.AllowedTools):
        return ToolUse(tools, chosen[0], enforced=True, custom=custom)
    is_required = choice.allowed_tools.mode == "required" and bool(chosen)
    return ToolUse(chosen, enforced=is_required, custom=custom)


def _name_of(tool: fields.NamedTool | fields.NamedCustomTool) -> str:
    return tool.function.name if isinstance(tool, fields.NamedTool) else tool.custom.name


def offered_functions(body: fields.Rendering) -> list[fields.Tool]:
    """Return the tools that a model can be offered, as functions; the others are noted."""
    functions = []
    for tool in body.tools or []:
        if isinstance(tool, fields.Tool):
            functions.append(tool)
        elif isinstance(tool, fields.CustomTool):
            functions.append(_function_of_custom(tool.custom))
        elif isinstance(body, fields.Asking):
            body.leave_out(f"tool {tool.type}")
    return functions


def _function_of_custom(custom: fields.Custom) -> fields.Tool:
    """Return the function that stands for a custom tool."""
    standing = fields.Function(
        name=custom.name,
        description=custom_tools.description(custom.description, custom.format),
        parameters=custom_tools.parameters(),
    )
    return fields.Tool(type="function", function=standing)


def custom_names(body: fields.Rendering) -> frozenset[str]:
    """Return the names of the custom tools."""
    tools = body.tools or []
    return frozenset(tool.custom.name for tool in tools if isinstance(tool, fields.CustomTool))


def call_guide(use: ToolUse, known: parsing.Format, *, parallel: bool) -> Guide:
    """Return the JSON schema of the calls: a list of them, or one call of a named tool."""
    definitions: dict[str, Any] = {}
    if use.named:
        schema = _call_schema(use.named, known.arguments, definitions)
    else:
        schema = _calls_schema(use.offered, known.arguments, definitions, parallel=parallel)
    return _schema_guide(schema, definitions)


def either_guide(use: ToolUse, known: parsing.Format, answer: Guide, *, parallel: bool) -> Guide:
    """Return the JSON schema of a list of calls, or else of the answer that a guide asks for."""
    definitions: dict[str, Any] = {}
    calls = _calls_schema(use.offered, known.arguments, definitions, parallel=parallel)
    answers = {"type": "object"}
    if answer.kind is GuideKind.JSON_SCHEMA:
        try:
            answers = json.loads(answer.text)
        except ValueError:
            return answer  # the engine says what is wrong with it
        if not isinstance(answers, dict):
            return answer
    return _schema_guide({"anyOf": [_moved(answers, "answer", definitions), calls]}, definitions)


def _schema_guide(schema: dict[str, Any], definitions: dict[str, Any]) -> Guide:
    text = json.dumps({**schema, "$defs": definitions} if definitions else schema)
    return Guide(GuideKind.JSON_SCHEMA, text)


def _calls_schema(
    tools: Sequence[fields.Tool], arguments: str, definitions: dict[str, Any], *, parallel: bool
) -> dict[str, Any]:
    calls = [_call_schema(tool, arguments, definitions) for tool in tools]
    schema = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
    }
    if not parallel:
        schema["maxItems"] = 1
    return schema


def _call_schema(tool: fields.Tool, arguments: str, definitions: dict[str, Any]) -> dict[str, Any]:
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    if not tool.function.strict:
        parameters = loosened(parameters)
    parameters = _moved(parameters, f"tool{len(definitions)}", definitions)
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(schema: dict[str, Any], name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that can be a part of another one.

    One whose parts refer to each other moves to ``definitions``, under a name.
    """

    def rebased(part: dict[str, Any]) -> dict[str, Any]:
        place = part.get("$ref")
        if isinstance(place, str) and place[:2] in ("#", "#/"):
            part["$ref"] = f"#/$defs/{name}{place[1:]}"
        return part

    moved = json.loads(json.dumps(schema), object_hook=rebased)
    if moved == schema:
        return schema
    definitions[name] = moved
    return {"$ref": f"#/$defs/{name}"}
