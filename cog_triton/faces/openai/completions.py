"""POST /v1/chat/completions and /v1/completions, whose responses are lists of choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering, NumberedChunks, event, new_id
from cog_triton.faces.openai.bodies import STREAMED, BodyRoute, off_loop
from cog_triton.faces.openai.errors import ApiError, invalid
from cog_triton.faces.openai.fields import (
    MOST_ANSWERS,
    ChatBody,
    CompletionBody,
    Sampling,
    StreamOptions,
    check_fields,
    sampling,
)
from cog_triton.faces.openai.parsing import Arguments, CallStart, Event, Reasoning, Text
from cog_triton.faces.openai.served import FromApp, RequestId, Served
from cog_triton.faces.openai.tokens import chat_log_probs, token_text, with_ids
from cog_triton.faces.openai.turns import Turn, chat_turn
from cog_triton.generation import Chunk, FinishReason
from cog_triton.request.request import MAX_SEED, Request
from cog_triton.wire import TokenLogProb

router = APIRouter(route_class=BodyRoute)
DEFAULT_MAX_TOKENS = 16
DONE = b"data: [DONE]\n\n"
Piece = dict[str, Any]
"""An element of an event's ``choices``."""


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatBody, served: FromApp, request_id: RequestId) -> Answering:
    """Answers messages, in one body or as events."""
    turn = await off_loop(chat_turn, body, served)
    request = await with_ids(turn.request, body, served)
    choices = [ChatChoice(n, served, body, request, turn) for n in range(body.choices)]
    return answering(body, served, choices, request_id)


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionBody, served: FromApp, request_id: RequestId) -> Answering:
    """Completes prompts, in one body or as events."""
    requests = await off_loop(prompt_requests, body, served)
    requests = [await with_ids(request, body, served) for request in requests]
    choices = [
        TextChoice(number, served, body, requests[number // body.choices])
        for number in range(len(requests) * body.choices)
    ]
    return answering(body, served, choices, request_id)


def prompt_requests(body: CompletionBody, served: Served) -> list[Request]:
    """Return the request for the first answer to each prompt."""
    if body.prompt == []:
        raise invalid("prompt must not be an empty list", "prompt")
    one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts: Any = [body.prompt] if one else body.prompt
    if len(prompts) * body.choices > MOST_ANSWERS:
        raise invalid(f"prompt and n must ask for at most {MOST_ANSWERS} answers", "prompt")
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    values = {
        "max_tokens": 1 if body.echo and most == 0 else most,  # engines make one token at least
        "add_special_tokens": body.add_special_tokens,
        "adapter": served.adapter(body.model),
        **served.token_ids(),
        **sampling(body),
    }
    texts = [
        {"prompt": p} if isinstance(p, str) else {"prompt": "", "prompt_ids": p} for p in prompts
    ]
    return [Request(**text, **values) for text in texts]


def answering(
    body: Sampling, served: Served, choices: Sequence[Choice], request_id: str
) -> Answering:
    headers, writer = check_fields(body), ChoiceWriter(body, served.now(), choices)
    requests = [
        replace(choice.request, seed=(choice.request.seed + n % body.choices) % (MAX_SEED + 1))
        for n, choice in enumerate(choices)
    ]
    return Answering(served, writer, requests, request_id, headers, stream=bool(body.stream))


class Choice(ABC):
    """One answer, in pieces or whole."""

    ID_PREFIX: str
    KINDS: tuple[str, str]
    """``object`` of a whole response, and of an event."""

    def __init__(self, index: int, served: Served, body: Any, request: Request) -> None:
        self.request, self._index = request, index
        self._tokenizer, self._body = served.backend.tokenizer, body
        self._top: int | None = body.wanted_log_probs

    def begin(self) -> dict[str, Any]:
        """Return the fields of an event before those of the first chunk."""
        return {}

    @abstractmethod
    def pieces(self, chunk: Chunk) -> list[Piece]: ...

    @abstractmethod
    def whole(self, chunk: Chunk) -> Piece:
        """Return the whole answer, made of one chunk with all that came."""

    def prompt(self, prompt_tokens: Sequence[TokenLogProb] = ()) -> dict[str, Any]:
        """Return fields about the prompt, with vLLM's ``prompt_logprobs``: entries by token ids.

        The first token follows nothing. A rank is only known of the likeliest.
        """
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self.request.prompt_ids
        if not prompt_tokens or (top := self._body.prompt_logprobs) is None:
            return fields
        entries: list[Any] = []
        for token in prompt_tokens:
            ranks = {other: rank for rank, (other, _) in enumerate(token.top, 1)}
            entry = {}
            for id, value in {token.id: token.log_prob, **dict(token.top[:top])}.items():
                text = token_text(self._tokenizer, id)
                entry[str(id)] = {"logprob": value, "rank": ranks.get(id), "decoded_token": text}
            entries.append(entry)
        return {**fields, "prompt_logprobs": [None, *entries[1:]]}

    def _ended(self, chunk: Chunk) -> Piece:
        """Return the reason of the end, with vLLM's field for one of ``stop_token_ids``."""
        ended: Piece = {"finish_reason": chunk.finish_reason}
        return ended if chunk.stop_token is None else {**ended, "stop_reason": chunk.stop_token}


class ChatChoice(Choice):
    ID_PREFIX, KINDS = "chatcmpl-", ("chat.completion", "chat.completion.chunk")

    def __init__(
        self, index: int, served: Served, body: ChatBody, request: Request, turn: Turn
    ) -> None:
        super().__init__(index, served, body, request)
        self._echo, self._reader, self._named = echoed(body), turn.reader(), turn.named
        self._plain = self._reader.plain and not body.return_token_ids

    def begin(self) -> dict[str, Any]:
        role = self._piece({"role": "assistant", "content": self._echo, "refusal": None})
        return {"choices": [role], **self.prompt()}

    def pieces(self, chunk: Chunk) -> list[Piece]:
        if self._plain and not chunk.log_probs and chunk.finish_reason is None:  # most tokens
            return [self._piece({"content": chunk.text})] if chunk.text else []
        deltas = [_delta(event) for event in self._reader.read(chunk)]
        about = self._about_tokens(chunk)
        if about and not deltas:
            deltas = [{"content": ""}]
        pieces = [self._piece(delta) for delta in deltas]
        if about:  # with the first piece: no token is in two
            pieces[0] |= about
        return [*pieces, self._piece({}) | self._ended(chunk)] if chunk.finish_reason else pieces

    def whole(self, chunk: Chunk) -> Piece:
        message = message_of(self._reader.read(chunk), self._echo)
        about = {"logprobs": None, **self._about_tokens(chunk)}
        return {"index": self._index, "message": message, **about, **self._ended(chunk)}

    def _piece(self, delta: dict[str, Any]) -> Piece:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _about_tokens(self, chunk: Chunk) -> Piece:
        about: Piece = {}
        if self._top is not None and chunk.log_probs:
            content = chat_log_probs(self._tokenizer, chunk.log_probs, self._top)
            about["logprobs"] = {"content": content, "refusal": None}
        if self._body.return_token_ids and chunk.ids:
            about["token_ids"] = chunk.ids
        return about

    def _ended(self, chunk: Chunk) -> Piece:
        ended = super()._ended(chunk)
        # Of a call that was forced by its name, OpenAI says stop.
        called = self._reader.called and chunk.finish_reason == "stop" and not self._named
        return {**ended, "finish_reason": "tool_calls"} if called else ended


def echoed(body: ChatBody) -> str:
    """Return the text of the assistant's that the answer follows, if it is asked for."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ""
    content = last.content or last.refusal or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, Arguments):
        call: dict[str, Any] = {"function": {"arguments": event.text}}
    else:
        function = {"name": event.name, "arguments": ""}
        call = {"id": event.id, "type": "function", "function": function}
    return {"tool_calls": [{"index": event.index, **call}]}


def message_of(parts: Iterable[Event], content: str) -> dict[str, Any]:
    """Return a message whose text begins with ``content``."""
    reasoning, calls = "", []
    for part in parts:
        if isinstance(part, Text):
            content += part.text
        elif isinstance(part, Reasoning):
            reasoning += part.text
        elif isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.id, "type": "function", "function": function})
        else:
            function["arguments"] += part.text
    shown = None if calls and not content else content
    message: Piece = {"role": "assistant", "content": shown, "refusal": None, "annotations": []}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    return message | ({"tool_calls": calls} if calls else {})


class TextChoice(Choice):
    ID_PREFIX, KINDS = "cmpl-", ("text_completion", "text_completion")

    def __init__(self, index: int, served: Served, body: CompletionBody, request: Request) -> None:
        super().__init__(index, served, body, request)
        self._prompt = ""
        if body.echo:
            self._prompt = request.prompt or self._tokenizer.decode(list(request.prompt_ids))
        self._prompt_only = bool(body.echo) and body.max_tokens == 0
        # The prompt's tokens come in the first chunk.
        self._prompt_log_probs = bool(body.echo) and self._top is not None
        self._lead = "" if self._prompt_log_probs else self._prompt
        self._offset, self._begun = len(self._lead), False

    def begin(self) -> dict[str, Any]:
        return {"choices": [self._piece(self._lead, Chunk("", 0, None))]} if self._lead else {}

    def pieces(self, chunk: Chunk) -> list[Piece]:
        first, self._begun = not self._begun, True
        tokens = chunk.prompt_log_probs if self._prompt_log_probs else ()
        if self._prompt_only:
            reason: FinishReason | None = "length" if chunk.finish_reason else None
            chunk = replace(chunk, text="", ids=(), finish_reason=reason, stop_token=None)
        elif self._top is not None:
            tokens += chunk.log_probs
        text = self._prompt + chunk.text if first and self._prompt_log_probs else chunk.text
        if not (text or tokens or chunk.finish_reason or self._body.return_token_ids):
            return []
        log_probs = self._log_probs(tokens) if tokens else None
        if log_probs and first and self._prompt_log_probs:
            # The prompt's first token follows nothing.
            log_probs["token_logprobs"][0] = log_probs["top_logprobs"][0] = None
        piece = {**self._piece(text, chunk), "logprobs": log_probs}
        if self._body.return_token_ids:
            piece |= {"token_ids": chunk.ids, **(self.prompt() if first else {})}
        return [piece]

    def whole(self, chunk: Chunk) -> Piece:
        (piece,) = self.pieces(chunk)
        return {**piece, "text": self._lead + piece["text"], **self.prompt(chunk.prompt_log_probs)}

    def _piece(self, text: str, chunk: Chunk) -> Piece:
        return {"text": text, "index": self._index, "logprobs": None, **self._ended(chunk)}

    def _log_probs(self, tokens: Iterable[TokenLogProb]) -> dict[str, list[Any]]:
        # Special tokens that the text does not show take no characters.
        skipped = self.request.skip_special_tokens or self._prompt
        hidden = frozenset(self._tokenizer.all_special_ids) if skipped else ()
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        result: dict[str, list[Any]] = {name: [] for name in names}
        for token in tokens:
            top: dict[str, float] = {}
            # Parts of characters all have one text, which stands for the likeliest.
            for other, value in (*token.top[: self._top], (token.id, token.log_prob)):
                top.setdefault(token_text(self._tokenizer, other), value)
            text = token_text(self._tokenizer, token.id)
            for name, own in zip(names, (text, token.log_prob, top, self._offset), strict=True):
                result[name].append(own)
            if token.id not in hidden or self._prompt.startswith(text, self._offset):
                self._offset += len(text)
        return result


class ChoiceWriter:
    """See ``Writer``."""

    def __init__(self, body: Sampling, created: int, choices: Sequence[Choice]) -> None:
        self._kind, kind = choices[0].KINDS
        self._head = {
            "id": new_id(choices[0].ID_PREFIX),
            "object": kind,
            "created": created,
            "model": body.model,
            "system_fingerprint": None,
        }
        options = body.stream_options or StreamOptions()
        self._has_usage, self._always = options.include_usage, options.continuous_usage_stats
        self._choices, self._each = choices, body.choices
        # Tokens of each prompt, and of each answer; to each prompt there are ``n`` answers.
        self._prompts: dict[int, int] = {}
        self._outputs: dict[int, int] = {}

    async def events(self, chunks: NumberedChunks) -> AsyncGenerator[bytes, None]:
        async for number, chunk in chunks:
            choice, data = self._choices[number], b""
            begins = number not in self._outputs
            self._count(number, chunk)
            if begins and (fields := choice.begin()):
                data = self._event(fields, self._usage(number, 0))
            for piece in choice.pieces(chunk):
                data += self._event({"choices": [piece]}, self._usage(number, chunk.output_tokens))
            if data:
                yield data
        yield (self._event({"choices": []}, self._total()) if self._has_usage else b"") + DONE

    async def body(self, chunks: NumberedChunks) -> dict[str, Any]:
        came: list[list[Chunk]] = [[] for _ in self._choices]
        async for number, chunk in chunks:
            self._count(number, chunk)
            came[number].append(chunk)
        wholes = [joined(own) for own in came]
        choices = [choice.whole(own) for choice, own in zip(self._choices, wholes, strict=True)]
        body = {**self._head, "object": self._kind, "choices": choices, "usage": self._total()}
        if isinstance(first := self._choices[0], ChatChoice):
            body |= first.prompt(wholes[0].prompt_log_probs)
        return body

    def failed(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _event(self, fields: dict[str, Any], usage: dict[str, int] | None) -> bytes:
        value = {**self._head, **fields}
        return event({**value, "usage": usage} if self._has_usage else value)

    def _count(self, number: int, chunk: Chunk) -> None:
        self._outputs[number] = chunk.output_tokens
        if chunk.input_tokens is not None:
            self._prompts[number // self._each] = chunk.input_tokens

    def _usage(self, number: int, output: int) -> dict[str, int] | None:
        """Return the counts of one answer so far, if each event has them."""
        return usage(self._prompts.get(number // self._each, 0), output) if self._always else None

    def _total(self) -> dict[str, int]:
        return usage(sum(self._prompts.values()), sum(self._outputs.values()))


def usage(prompt: int, output: int) -> dict[str, int]:
    total = prompt + output
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total}


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return one chunk with all that came."""
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        ids=tuple(id for chunk in chunks for id in chunk.ids),
        log_probs=tuple(token for chunk in chunks for token in chunk.log_probs),
        prompt_log_probs=chunks[0].prompt_log_probs,
    )
