"""The objects of /v1/responses, and their writer."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cog_triton.api.openai.chats import custom_tools, from_responses, response_tools
from cog_triton.api.openai.chats.response_tools import ClientTool
from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.api.openai.protocol.events import dumps, new_id, typed_event
from cog_triton.api.openai.protocol.log_probs import chat_log_probs
from cog_triton.api.openai.protocol.writer import joined
from cog_triton.api.openai.schemas.base import JsonObject
from cog_triton.api.openai.schemas.responses import (
    FlatTool,
    InputItem,
    ReasoningOptions,
    ResponsesBody,
    TextFormat,
)
from cog_triton.api.openai.tool_calls.blocks import Block, Parser
from cog_triton.generation import Chunk
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import Tokenizer

# Fields that a response has as the body has them.
_ECHOED = {"model", "instructions", "max_output_tokens", "user", "previous_response_id"}
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_"}
_CALL_PREFIX = "fc_"


def input_items(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the items of a body's input, with ids, and their contents as lists."""
    inputs: Any = body.input
    if isinstance(inputs, str):
        inputs = [InputItem(role="user", content=inputs)]
    items = []
    for item in (item.model_dump(exclude_none=True) for item in inputs):
        kind = item.get("type", "message")
        prefix = _ID_PREFIXES.get(kind, _CALL_PREFIX)
        item = {"id": new_id(prefix), "type": kind, "status": "completed", **item}
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
        "object": "response",
        "status": "in_progress",
        "service_tier": "default",
        "truncation": "disabled",
        "store": False,
        "error": None,
        "incomplete_details": None,
        "max_tool_calls": None,
        "usage": None,
        **body.model_dump(include=_ECHOED),
        "id": new_id("resp_"),
        "created_at": created,
        "background": bool(body.background),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": (body.reasoning or ReasoningOptions()).model_dump(),
        "temperature": request.temperature,
        "text": {"format": format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [_echoed_tool(tool) for tool in from_responses.all_tools(body)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": request.top_p,
        "metadata": body.metadata or {},
    }
    try:
        dumps(response)
    except TypeError as error:  # half of a surrogate pair, or a number of more than 64 bits
        raise invalid(f"the request has a value that cannot be returned: {error}") from None
    return response


def _echoed_tool(tool: JsonObject) -> dict[str, Any]:
    """Return a tool as a response has it; OpenAI's API names all fields of a function, also those unset."""
    is_function = isinstance(tool, FlatTool)
    return tool.model_dump(exclude_none=not is_function)


class ResponseWriter:
    """Fills a response, and writes each of its changes as an event."""

    def __init__(
        self,
        response: dict[str, Any],
        parser: Parser,
        tokenizer: Tokenizer,
        letters: Callable[[], str] = lambda: secrets.token_hex(12),
    ) -> None:
        """Begin to fill a response; ``letters`` draws the letters of each item's id."""
        self._response = response
        self._parser = parser
        self._tokenizer = tokenizer
        self._tools = response_tools.client_tools(response["tools"])
        self._letters = letters
        self._runs = False
        self._block: Block | None = None  # the block that is being written
        self._item: dict[str, Any] = {}  # the item that the block becomes
        self._part: dict[str, Any] = {}  # the part of the item that has its text
        self._place: dict[str, Any] = {}  # where the part is, as events say it
        self._log_probs: list[Any] = []  # tokens whose text has not come yet
        self._input_tokens = 0
        self._count = 0  # how many events there have been

    def queued(self) -> Iterator[bytes]:
        self._response["status"] = "queued"
        yield self._event("created", response=self._response)
        yield self._event("queued", response=self._response)

    def events(self, _: int, chunk: Chunk, /) -> Iterator[bytes]:
        yield from self._begin_response()
        self._input_tokens = chunk.input_tokens or self._input_tokens
        self._log_probs += chat_log_probs(self._tokenizer, chunk.log_probs)
        for block, text in self._parser.read(chunk):
            if block is not self._block:
                yield from self._end("completed")
                yield from self._begin(block)
            yield from self._add(block, text)
        if self._block and self._block.kind != "text" and not self._begins_text(chunk):
            self._log_probs = []  # thoughts and calls are reported without them
        if chunk.finish_reason is not None:
            yield from self._end_response(chunk)

    def _begins_text(self, chunk: Chunk) -> bool:
        """Return whether a chunk may hold the first tokens of the text, whose characters come later.

        A character of several tokens, and the beginning of a stop sequence, come with the last of them.
        """
        is_behind_thoughts = self._block is not None and self._block.kind == "thoughts"
        return is_behind_thoughts and self._parser.thoughts_ended and chunk.text == ""

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield from self._stop()
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {
            "incomplete_details": None,
            "usage": None,
            "status": "failed",
            "error": {"code": code, "message": error.message},
        }
        yield typed_event(
            "error",
            sequence_number=self._count,
            code=error.code,
            message=error.message,
            param=error.param,
        )
        self._count += 1
        yield self._event("failed", response=self._response)

    def cancelled(self) -> Iterator[bytes]:
        yield from self._stop()
        self._response["status"] = "cancelled"
        yield self._event("incomplete", response=self._response)  # the end that clients know

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        chunks = answers[0]
        if not any(chunk.log_probs for chunk in chunks):  # else each is with its text
            chunks = [joined(chunks)]
        for chunk in chunks:
            for _ in self.events(0, chunk):
                pass
        return self._response

    # The response

    def _begin_response(self) -> Iterator[bytes]:
        if not self._count:
            yield self._event("created", response=self._response)
        if not self._runs:
            self._runs = True
            self._response["status"] = "in_progress"
            yield self._event("in_progress", response=self._response)

    def _end_response(self, chunk: Chunk) -> Iterator[bytes]:
        status = "incomplete" if chunk.finish_reason == "length" else "completed"
        yield from self._end(status)
        self._response |= {"status": status, "usage": self._usage(chunk)}
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(status, response=self._response)

    # Its items, one for each block

    def _begin(self, block: Block) -> Iterator[bytes]:
        self._block = block
        index = len(self._response["output"])
        self._begin_item(block)
        self._place = {"item_id": self._item["id"], "output_index": index}
        yield self._event("output_item.added", output_index=index, item=self._item)
        if block.kind != "call":
            self._place["content_index"] = 0
            yield self._event("content_part.added", **self._place, part=self._part)

    def _begin_item(self, block: Block) -> None:
        match block.kind:
            case "text":
                self._item = {"type": "message", "role": "assistant", "content": []}
                self._part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                prefix = "msg_"
            case "thoughts":
                self._item = {
                    "type": "reasoning",
                    "summary": [],
                    "encrypted_content": None,
                    "content": [],
                }
                self._part = {"type": "reasoning_text", "text": ""}
                prefix = "rs_"
            case "call":
                self._begin_call(block)
                prefix = _CALL_PREFIX
        self._item = {"id": prefix + self._letters(), "status": "in_progress", **self._item}

    def _begin_call(self, block: Block) -> None:
        """Make the item of a call, by the names that the client knows."""
        tool = self._tools.get(block.name, ClientTool(block.name))
        if tool.custom:
            self._item = {"type": "custom_tool_call", "input": ""}
            self._part = {"type": "custom_tool_call_input", "text": ""}
        else:
            self._item = {"type": "function_call", "arguments": ""}
            self._part = {"type": "function_call_arguments", "text": ""}
        self._item |= {"call_id": block.id, "name": tool.name}
        if tool.namespace:
            self._item["namespace"] = tool.namespace

    def _add(self, block: Block, text: str) -> Iterator[bytes]:
        if not text:  # a call's beginning
            return
        if self._item["type"] == "custom_tool_call":
            return  # its text is known at the end of its arguments
        log_probs = {}
        if block.kind == "text":
            log_probs["logprobs"] = self._log_probs
            self._part["logprobs"] += self._log_probs
            self._log_probs = []
        kind = self._part["type"]
        yield self._event(f"{kind}.delta", **self._place, delta=text, **log_probs)

    def _end(self, status: str) -> Iterator[bytes]:
        block = self._block
        if block is None:
            return
        self._block = None
        if block.kind != "call":
            yield from self._end_text(block)
            self._item["status"] = status
        elif block.broken:
            # Its arguments have no end, so there is no event of that.
            self._fill_in_call(block, "incomplete")
        else:
            yield from self._end_call(block, status)
        index = self._place["output_index"]
        yield self._event("output_item.done", output_index=index, item=self._item)
        self._response["output"].append(self._item)

    def _end_text(self, block: Block) -> Iterator[bytes]:
        kind = self._part["type"]
        self._part["text"] = block.text
        log_probs = {"logprobs": self._part["logprobs"]} if block.kind == "text" else {}
        yield self._event(f"{kind}.done", **self._place, text=block.text, **log_probs)
        yield self._event("content_part.done", **self._place, part=self._part)
        self._item["content"] = [self._part]

    def _end_call(self, block: Block, status: str) -> Iterator[bytes]:
        self._fill_in_call(block, status)
        kind = self._part["type"]
        if self._item["type"] == "custom_tool_call":
            text = self._item["input"]
            yield self._event(f"{kind}.delta", **self._place, delta=text)
            yield self._event(f"{kind}.done", **self._place, input=text)
        else:
            name = self._item["name"]
            yield self._event(f"{kind}.done", **self._place, arguments=block.text, name=name)

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
        if self._item["type"] == "custom_tool_call":
            self._item["input"] = custom_tools.text_of(block.text)
        else:
            self._item["arguments"] = block.text
        self._item["status"] = status

    def _event(self, name: str, /, **values: Any) -> bytes:
        number = self._count
        self._count += 1
        return typed_event(f"response.{name}", sequence_number=number, **values)

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
