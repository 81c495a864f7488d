"""The writer of /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from cog_triton.api.openai.chats import custom_tools
from cog_triton.api.openai.chats.tool_use import function
from cog_triton.api.openai.chats.turn import Turn
from cog_triton.api.openai.protocol.choices import ChoiceWriter, Piece, PromptAndEnd
from cog_triton.api.openai.protocol.log_probs import chat_log_probs
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.served import Served
from cog_triton.api.openai.tool_calls.blocks import Block
from cog_triton.generation import Chunk
from cog_triton.request.request import Request


class ChatWriter(ChoiceWriter):
    id_prefix = "chatcmpl-"
    object_of_events = "chat.completion.chunk"
    object_of_whole = "chat.completion"

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        body = super().whole(answers)
        first_chunk = answers[0][0]
        return body | self._choices[0].about_prompt(first_chunk.prompt_log_probs)


class ChatChoice(PromptAndEnd):
    """One answer to a chat."""

    def __init__(
        self, turn: Turn, index: int, request: Request, body: ChatBody, served: Served
    ) -> None:
        super().__init__(index, request, body, served)
        self._echo = echoed(body)
        self._parser = turn.parser()
        self._is_named = bool(turn.use.named)
        self._is_plain = (
            turn.call_format is None and turn.thoughts is None and not self._returns_ids
        )
        self._custom = turn.use.custom
        self._waiting: Block | None = None  # a custom tool's call, whose text is known at its end

    def begin(self) -> dict[str, Any]:
        role = self._piece({"role": "assistant", "content": self._echo, "refusal": None})
        return {"choices": [role], **self.about_prompt()}

    def pieces(self, chunk: Chunk) -> list[Piece]:
        if self._is_plain and not chunk.log_probs and chunk.finish_reason is None:
            # Most tokens take this short way.
            return [self._piece({"content": chunk.text})] if chunk.text else []
        pieces = [self._piece(delta) for delta in self._deltas(chunk)]
        about_tokens = self._about_tokens(chunk)
        if about_tokens:  # they go with the first piece, so that no token is reported twice
            pieces = pieces or [self._piece({"content": ""})]
            pieces[0] |= about_tokens
        if chunk.finish_reason is not None:
            pieces.append(self._piece({}) | self._ended(chunk))
        return pieces

    def whole(self, chunk: Chunk) -> Piece:
        self._parser.read(chunk)
        # What was to be a call, and was cut off, is text.
        text = self._echo + self._parser.answer_text()
        calls = [self._whole_call(block) for block in self._parser.whole_calls()]
        message: Piece = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
            "annotations": [],
        }
        thoughts = self._parser.text("thoughts")
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return {
            "index": self._index,
            "message": message,
            "logprobs": None,
            **self._about_tokens(chunk),
            **self._ended(chunk),
        }

    def _deltas(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        for block, text in self._parser.read(chunk):
            if block is not self._waiting:
                yield from self._waited()
            if block.kind == "call" and block.name in self._custom:
                self._waiting = block
            else:
                yield _delta(block, text)
        if chunk.finish_reason is not None:
            yield from self._waited()

    def _waited(self) -> Iterator[dict[str, Any]]:
        """Yield the call of a custom tool, which has ended; as text where it cannot be made."""
        block = self._waiting
        self._waiting = None
        if block is None:
            return
        if block.broken:
            yield {"content": block.written}
        else:
            yield {"tool_calls": [{"index": block.index, **self._whole_call(block)}]}

    def _whole_call(self, block: Block) -> dict[str, Any]:
        """Return a call in the form of its tool."""
        if block.name in self._custom:
            custom = {"name": block.name, "input": custom_tools.text_of(block.text)}
            return {"id": block.id, "type": "custom", "custom": custom}
        return {"id": block.id, **function(name=block.name, arguments=block.text)}

    def _piece(self, delta: dict[str, Any]) -> Piece:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _about_tokens(self, chunk: Chunk) -> Piece:
        about: Piece = {}
        if self._alternatives is not None and chunk.log_probs:
            content = chat_log_probs(self._tokenizer, chunk.log_probs, self._alternatives)
            about["logprobs"] = {"content": content, "refusal": None}
        if self._returns_ids and chunk.ids:
            about["token_ids"] = chunk.ids
        return about

    def _ended(self, chunk: Chunk) -> Piece:
        ended = super()._ended(chunk)
        # OpenAI says stop for a call that was forced by its name.
        is_call = self._parser.ends_with_calls and not self._is_named
        if is_call and chunk.finish_reason == "stop":
            ended["finish_reason"] = "tool_calls"
        return ended


def echoed(body: ChatBody) -> str:
    """Return the text of the assistant's that the answer follows, if it is asked for."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ""
    content = last.content or last.refusal or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"content": text}
    if block.kind == "thoughts":
        return {"reasoning_content": text}
    call: dict[str, Any] = {"index": block.index}
    if text:
        call["function"] = {"arguments": text}
    else:
        call |= {"id": block.id, **function(name=block.name, arguments="")}
    return {"tool_calls": [call]}
