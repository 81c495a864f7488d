"""The forms of /v1/responses, OpenAI's newer API, on the same chats; store.py has its routes."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from cog_triton.api.openai import (
    contents,
    custom_tools,
    exchange,
    fields,
    response_tools,
    turns,
)
from cog_triton.api.openai.blocks import Block, Parser
from cog_triton.api.openai.errors import TABLES, ApiError, invalid
from cog_triton.api.openai.response_tools import (
    ClientTool,
    FlatNamedTool,
    HostedToolChoice,
    allowed_kind,
    choice_kind,
)
from cog_triton.errors import shown
from cog_triton.generation import Chunk
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import Tokenizer


class FlatAllowedTools(fields.Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[FlatNamedTool, Tag("named")] | Annotated[HostedToolChoice, Tag("hosted")],
                Discriminator(allowed_kind),
            ]
        ],
        Field(min_length=1),
        fields.Bounded,
    ]


class ReasoningOptions(fields.Body):
    effort: fields.Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(fields.JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(fields.Body):
    format: TextFormat | None = None


class Part(fields.Body):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(fields.Body):
    """One item of the input; its fields depend on its type, which a message need not have."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[Part], fields.Bounded] | None = None
    summary: Annotated[list[Part], fields.Bounded] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | Annotated[list[Part], fields.Bounded] | None = None


class AdditionalTools(fields.Body):
    """Tools that a client adds within the conversation; Codex sends some of its tools so."""

    type: Literal["additional_tools"]
    tools: response_tools.Tools | None = None


class ForeignItem(fields.Body):
    """An item that nothing here can read; it may have any further fields."""

    type: str


# Items of work that OpenAI's servers did, or of a form that only they can read. They are left out.
_FOREIGN_ITEMS = frozenset(
    {
        "compaction",
        "compaction_summary",
        "compaction_trigger",
        "ghost_snapshot",
        "item_reference",
        "program",
    }
)
_FOREIGN_ENDINGS = ("_call", "_call_output", "_output", "_list_tools")
_FOREIGN_BEGINNING = "mcp_"
_CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})


def _item_kind(item: Any) -> str:
    """Return which class an item of the input has."""
    kind = item.get("type") if isinstance(item, Mapping) else getattr(item, "type", None)
    if kind == "additional_tools":
        return "tools"
    if not isinstance(kind, str) or kind in _CALLS | _OUTPUTS:
        return "readable"
    is_foreign = (
        kind in _FOREIGN_ITEMS
        or kind.endswith(_FOREIGN_ENDINGS)
        or kind.startswith(_FOREIGN_BEGINNING)
    )
    return "foreign" if is_foreign else "readable"


AnyItem = Annotated[
    Annotated[InputItem, Tag("readable")]
    | Annotated[AdditionalTools, Tag("tools")]
    | Annotated[ForeignItem, Tag("foreign")],
    Discriminator(_item_kind),
]
ITEMS = TypeAdapter(list[AnyItem])


class ResponsesBody(fields.Asking):
    input: str | Annotated[list[AnyItem], fields.Bounded]
    instructions: str | None = None
    max_output_tokens: fields.OutputTokens | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: fields.Texts | None = None
    text: TextOptions | None = None
    tools: response_tools.Tools | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[
            Annotated[FlatNamedTool, Tag("named")]
            | Annotated[FlatAllowedTools, Tag("allowed")]
            | Annotated[HostedToolChoice, Tag("hosted")],
            Discriminator(choice_kind),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    metadata: fields.Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    # Beyond OpenAI's:
    stop: str | fields.Texts | None = None
    chat_template_kwargs: dict[str, Any] | None = None


LOG_PROBS = "message.output_text.logprobs"
# Values of ``include``; thoughts are not encrypted, their text comes in any case.
INCLUDED = (LOG_PROBS, "reasoning.encrypted_content")
_SAME = {"top_logprobs", "parallel_tool_calls", "user", "stop", "chat_template_kwargs"}
_ECHOED = {"model", "instructions", "max_output_tokens", "user", "previous_response_id"}
_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def chat_body(body: ResponsesBody) -> fields.ChatBody:
    """Return the chat that a body asks for, or raise ApiError."""
    included = body.include or []
    for name in included:
        if name not in INCLUDED:
            body.leave_out(f"include {name}")
    if not (messages := chat_messages(body)):
        raise invalid("input must not be empty", "input")
    chat = body.model_dump(include={*fields.Asking.model_fields, *_SAME}) | {"messages": messages}
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["logprobs"] = LOG_PROBS in included or bool(body.top_logprobs)
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    chat["tools"] = response_tools.functions(all_tools(body), body)
    chat["tool_choice"] = _tool_choice(body, offers_tools=bool(chat["tools"]))
    if body.truncation == "auto":  # a conversation that is too long is refused
        body.leave_out("truncation auto")
    if body.text and (format := body.text.format):
        if format.type == "json_schema" and format.schema_ is None:
            raise invalid("text.format must have a schema", "text")
        chat["response_format"] = {"type": format.type, "json_schema": {"schema": format.schema_}}
    return exchange.valid(fields.ChatBody, chat)


def all_tools(body: ResponsesBody) -> list[Any]:
    """Return the tools of a body, and those that its input adds."""
    tools = list(body.tools or [])
    if isinstance(body.input, list):
        for item in body.input:
            if isinstance(item, AdditionalTools):
                tools += item.tools or []
    return tools


def tool_places(body: ResponsesBody) -> dict[str, str]:
    """Return where the schemas of tools are in a body, by the names that a model knows."""
    places = {}
    for number, tool in enumerate(body.tools or []):
        if isinstance(tool, response_tools.FlatTool):
            places[tool.name] = f"tools[{number}].parameters"
        elif isinstance(tool, response_tools.NamespaceTool):
            for inner_number, inner in enumerate(tool.tools):
                if isinstance(inner, response_tools.FlatTool):
                    name = response_tools.flat_name(inner.name, tool.name)
                    places[name] = f"tools[{number}].tools[{inner_number}].parameters"
    return places


def _tool_choice(body: ResponsesBody, *, offers_tools: bool) -> Any:
    choice = body.tool_choice
    if isinstance(choice, HostedToolChoice):
        body.leave_out(f"tool_choice {choice.type}")
        return None
    if choice == "required" and all_tools(body) and not offers_tools:
        body.leave_out("tool_choice required")  # all tools were left out
        return None
    if isinstance(choice, FlatNamedTool):
        return response_tools.chosen(choice)
    if isinstance(choice, FlatAllowedTools):
        tools = []
        for tool in choice.tools:
            if isinstance(tool, HostedToolChoice):
                body.leave_out(f"tool_choice {tool.type}")
            else:
                tools.append(response_tools.chosen(tool))
        if not tools:
            return "none"  # no tool that the client runs is allowed
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode, "tools": tools},
        }
    return choice


def chat_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the messages of a chat; items of one answer, which follow one another, are one message."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for place, item in enumerate(body.input):
        if isinstance(item, AdditionalTools):
            continue
        if isinstance(item, ForeignItem):
            body.leave_out(f"input of type {item.type}")
            continue
        newest = place == len(body.input) - 1
        message = _message(item, f"input[{place}]", body, newest=newest)
        if messages and _are_of_one_answer(messages[-1], message):
            _join(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _are_of_one_answer(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two messages are parts of one answer.

    An answer has its thoughts, its text and its calls in any order: some clients send the text behind the
    calls. Before the results of calls come, there can be nothing of another answer.
    """
    if first["role"] != "assistant" or second["role"] != "assistant":
        return False
    if first.get("tool_calls") or second.get("tool_calls"):
        return True
    return not first["content"]


def _join(answer: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a part to an answer."""
    for name in ("content", "reasoning_content"):
        if part.get(name):
            answer[name] = f"{answer[name]}\n{part[name]}" if answer.get(name) else part[name]
    if part.get("tool_calls"):
        answer["tool_calls"] = [*answer.get("tool_calls", ()), *part["tool_calls"]]


def _message(item: InputItem, place: str, body: ResponsesBody, *, newest: bool) -> dict[str, Any]:
    """Return the message that an item is."""
    kind = item.type or ("message" if item.role else "")
    if kind == "message" and item.role:
        return {"role": item.role, "content": _message_text(item, place, body, newest=newest)}
    if kind == "reasoning":
        text = turns.joined_text(item.content or item.summary, _PARTS, place, "input")
        return {"role": "assistant", "content": "", "reasoning_content": text}
    if kind in _CALLS and item.call_id and (kind == "local_shell_call" or item.name):
        return {"role": "assistant", "content": "", "tool_calls": [_call(item, kind)]}
    if kind in _OUTPUTS and item.call_id:
        text = _output_text(item, body)
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    if kind == "message" or kind in _CALLS | _OUTPUTS:
        raise invalid(f"{place} lacks a field that its type requires", "input")
    raise invalid(f"{place} of type {shown(kind)} is not supported", "input")


def _message_text(item: InputItem, place: str, body: ResponsesBody, *, newest: bool) -> str:
    """Return the text of a message; only the newest is refused for parts that have none."""
    if newest or not isinstance(item.content, list):
        return turns.joined_text(item.content, _PARTS, place, "input")
    for part in item.content:
        if part.type not in _PARTS and part.type not in contents.UNREADABLE:
            raise contents.refusal(part.type, place, "input")
    return "\n".join(_part_text(part, body) for part in item.content)


def _call(item: InputItem, kind: str) -> dict[str, Any]:
    if kind == "local_shell_call":
        name = "local_shell"
        arguments = exchange.dumps(item.action or {}).decode()
    else:
        name = response_tools.flat_name(item.name or "", item.namespace)
        arguments = item.arguments or "{}"
    if kind == "custom_tool_call":
        arguments = custom_tools.arguments_of(item.input or "")
    return {"id": item.call_id, **turns.function(name=name, arguments=arguments)}


def _output_text(item: InputItem, body: ResponsesBody) -> str:
    """Return the text of a call's output; in place of a part that has none, words that say so."""
    if not isinstance(item.output, list):
        return item.output or ""
    return "\n".join(_part_text(part, body) for part in item.output)


def _part_text(part: Part, body: ResponsesBody) -> str:
    if part.type in _PARTS:
        return part.text or part.refusal or ""
    return contents.left_out(part.type, body)


def input_items(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the items of a body's input, with ids, and their contents as lists."""
    given: Any = body.input
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    items = []
    for item in (item.model_dump(exclude_none=True) for item in given):
        kind = item.get("type", "message")
        prefix = {"message": "msg_", "reasoning": "rs_"}.get(kind, "fc_")
        item = {"id": exchange.new_id(prefix), "type": kind, "status": "completed", **item}
        if isinstance(item.get("content"), str):
            text = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": text, "text": item["content"]}]
        items.append(item)
    return items


def response_fields(body: ResponsesBody, request: Request, created: int) -> dict[str, Any]:
    """Return the fields of a response: those that change, and those that were asked for."""
    format = (body.text and body.text.format) or TextFormat(type="text")
    choice = body.tool_choice or "auto"
    response = {
        **TABLES["response"],
        **body.model_dump(include=_ECHOED),
        "id": exchange.new_id("resp_"),
        "created_at": created,
        "background": bool(body.background),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": (body.reasoning or ReasoningOptions()).model_dump(),
        "temperature": request.temperature,
        "text": {"format": format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [_echoed_tool(tool) for tool in all_tools(body)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": request.top_p,
        "metadata": body.metadata or {},
    }
    try:
        exchange.dumps(response)
    except TypeError as error:  # half of a surrogate pair, or a number of more than 64 bits
        raise invalid(f"the request has a value that cannot be returned: {error}") from None
    return response


def _echoed_tool(tool: fields.Body) -> dict[str, Any]:
    # Of a function also the fields that were left out, as OpenAI's API has them.
    is_function = isinstance(tool, response_tools.FlatTool)
    return tool.model_dump(exclude_none=not is_function)


class ResponseWriter:
    def __init__(
        self,
        response: dict[str, Any],
        parser: Parser,
        tokenizer: Tokenizer,
        letters: Callable[[], str] = lambda: secrets.token_hex(12),  # of ids
    ) -> None:
        self._response, self._parser, self._tokenizer = response, parser, tokenizer
        self._tools = response_tools.client_tools(response["tools"])
        self._letters, self._runs = letters, False
        self._block: Block | None = None  # the one that is being written
        self._item: dict[str, Any] = {}  # of the block
        self._part: dict[str, Any] = {}  # its text
        self._place: dict[str, Any] = {}  # of the text, in events
        self._log_probs: list[Any] = []  # of tokens whose text has not come yet
        self._input_tokens = self._count = 0

    def queued(self) -> Iterator[bytes]:
        self._response["status"] = "queued"
        yield self._event("created", response=self._response)
        yield self._event("queued", response=self._response)

    def events(self, _: int, chunk: Chunk, /) -> Iterator[bytes]:
        if not self._count:
            yield self._event("created", response=self._response)
        if not self._runs:
            self._runs, self._response["status"] = True, "in_progress"
            yield self._event("in_progress", response=self._response)
        self._input_tokens = chunk.input_tokens or self._input_tokens
        self._log_probs += exchange.chat_log_probs(self._tokenizer, chunk.log_probs)
        for block, text in self._parser.read(chunk):
            if block is not self._block:
                yield from self._end("completed")
                yield from self._begin(block)
            if not text:  # a call's beginning
                continue
            if self._item["type"] == "custom_tool_call":
                continue  # its text is known at the end of its arguments
            more = {}
            if block.kind == "text":
                more, self._log_probs = {"logprobs": self._log_probs}, []
                self._part["logprobs"] += more["logprobs"]
            yield self._event(f"{self._part['type']}.delta", **self._place, delta=text, **more)
        if self._block and self._block.kind != "text":
            self._log_probs = []  # those of thoughts and calls are not of the output's text
        if chunk.finish_reason is not None:
            status = "incomplete" if chunk.finish_reason == "length" else "completed"
            yield from self._end(status)
            self._response |= {"status": status, "usage": self._usage(chunk)}
            if status == "incomplete":
                self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            yield self._event(status, response=self._response)

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield from self._stop()
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {"incomplete_details": None, "usage": None, "status": "failed"}
        self._response["error"] = {"code": code, "message": error.message}
        told = {"code": error.code, "message": error.message, "param": error.param}
        yield exchange.typed_event("error", sequence_number=self._count, **told)
        self._count += 1
        yield self._event("failed", response=self._response)

    def cancelled(self) -> Iterator[bytes]:
        yield from self._stop()
        self._response["status"] = "cancelled"
        yield self._event("incomplete", response=self._response)  # the end that clients know

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        chunks = answers[0]
        if not any(chunk.log_probs for chunk in chunks):  # else each is with its text
            chunks = [exchange.joined(chunks)]
        for chunk in chunks:
            list(self.events(0, chunk))
        return self._response

    def _begin(self, block: Block) -> Iterator[bytes]:
        shape, index = TABLES["items"][block.kind], len(self._response["output"])
        self._block, self._part = block, {"type": shape["text_type"], "text": ""}
        name = shape["prefix"] + self._letters()
        self._item = {"id": name, "status": "in_progress", **shape["item"]}
        self._place = {"item_id": name, "output_index": index}
        if block.kind == "call":
            self._begin_call(block)
        yield self._event("output_item.added", output_index=index, item=self._item)
        if block.kind != "call":
            self._place["content_index"] = 0
            self._part |= {"annotations": [], "logprobs": []} if block.kind == "text" else {}
            yield self._event("content_part.added", **self._place, part=self._part)

    def _begin_call(self, block: Block) -> None:
        """Fill in the item of a call, by the names that the client knows."""
        tool = self._tools.get(block.name, ClientTool(block.name))
        self._item |= {"call_id": block.id, "name": tool.name}
        if tool.namespace:
            self._item["namespace"] = tool.namespace
        if tool.custom:
            del self._item["arguments"]
            self._item |= {"type": "custom_tool_call", "input": ""}
            self._part["type"] = "custom_tool_call_input"

    def _stop(self) -> Iterator[bytes]:
        """End the item of an answer that will not go on.

        A call gets no event of its end: some clients make the call at that event, whatever its status is.
        """
        if self._block is None or self._block.kind != "call":
            yield from self._end("incomplete")
            return
        self._fill_in_call(self._block, "incomplete")
        self._block = None
        self._response["output"].append(self._item)

    def _fill_in_call(self, block: Block, status: str) -> None:
        is_custom = self._item["type"] == "custom_tool_call"
        if is_custom:
            self._item["input"] = custom_tools.text_of(block.text)
        else:
            self._item["arguments"] = block.text
        self._item["status"] = status

    def _end(self, status: str) -> Iterator[bytes]:
        block = self._block
        if block is None:
            return
        if block.kind == "call" and block.broken:
            # Its arguments have no end, so there is no event of that.
            self._fill_in_call(block, "incomplete")
            self._block = None
            index = self._place["output_index"]
            yield self._event("output_item.done", output_index=index, item=self._item)
            self._response["output"].append(self._item)
            return
        self._block, text, done = None, block.text, f"{self._part['type']}.done"
        if self._item["type"] == "custom_tool_call":
            text = self._item["input"] = custom_tools.text_of(text)
            yield self._event(f"{self._part['type']}.delta", **self._place, delta=text)
            yield self._event(done, **self._place, input=text)
        elif block.kind == "call":
            self._item["arguments"] = text
            yield self._event(done, **self._place, arguments=text, name=self._item["name"])
        else:
            self._part["text"] = text
            more = {"logprobs": self._part["logprobs"]} if block.kind == "text" else {}
            yield self._event(done, **self._place, text=text, **more)
            yield self._event("content_part.done", **self._place, part=self._part)
            self._item["content"] = [self._part]
        self._item["status"] = status
        index = self._place["output_index"]
        yield self._event("output_item.done", output_index=index, item=self._item)
        self._response["output"].append(self._item)

    def _event(self, name: str, /, **values: Any) -> bytes:
        self._count += 1
        return exchange.typed_event(f"response.{name}", sequence_number=self._count - 1, **values)

    def _usage(self, chunk: Chunk) -> dict[str, Any]:
        """Return the engine's counts of tokens; only those of thoughts are the tokenizer's."""
        text = self._parser.text("thoughts")
        thought = len(self._tokenizer(text, add_special_tokens=False).input_ids) if text else 0
        return {
            "input_tokens": self._input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": chunk.output_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thought, chunk.output_tokens)},
            "total_tokens": self._input_tokens + chunk.output_tokens,
        }
