"""POST /v1/chat/completions and /v1/completions, whose responses are lists of choices, and /tokenize."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from fastapi import APIRouter
from starlette.responses import Response

from cog_triton.api.openai import exchange
from cog_triton.api.openai.chats import custom_tools
from cog_triton.api.openai.chats.completions import prompt_requests, repeated
from cog_triton.api.openai.chats.prompt import chat_prompt
from cog_triton.api.openai.chats.token_ids import token_ids, with_ids
from cog_triton.api.openai.chats.tool_use import function
from cog_triton.api.openai.chats.turn import Turn, chat_turn
from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.completions import CompletionBody
from cog_triton.api.openai.schemas.tokens import DetokenizeBody, TokenizeBody
from cog_triton.api.openai.served import FromApp, Served
from cog_triton.api.openai.tool_calls.blocks import Block
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.request.request import Request

router = APIRouter(route_class=exchange.BodyRoute)
DETOKENIZED = (
    2**16
)  # tokens, where a context has fewer; decoding holds the lock of Python's threads
DONE = b"data: [DONE]\n\n"
Piece = dict[str, Any]  # an element of an event's ``choices``
AnyChoice: TypeAlias = "ChatChoice | TextChoice"


@router.post("/v1/chat/completions", responses=exchange.STREAMED)
async def chat_completions(body: ChatBody, served: FromApp) -> exchange.Answering:
    """Answers messages, in one body or as events."""
    turn = await exchange.off_loop(chat_turn, body, served)
    return await answering(body, served, [turn.request], partial(ChatChoice, turn))


@router.post("/v1/completions", responses=exchange.STREAMED)
async def completions(body: CompletionBody, served: FromApp) -> exchange.Answering:
    """Completes prompts, in one body or as events."""
    prompts = await exchange.off_loop(prompt_requests, body, served)
    return await answering(body, served, prompts, TextChoice)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, served: FromApp) -> Response:
    """The token ids of a prompt, or of messages as the model sees them."""
    served.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("either prompt or messages must be given", "prompt")
    text, special = body.prompt, body.add_special_tokens is not False
    if text is None:  # the template of a chat has the tokens that begin a text
        text = await exchange.off_loop(chat_prompt, body, served)
        special = bool(body.add_special_tokens)
    tokens = await token_ids(served, text, special=special)

    def answer() -> bytes:
        names = None
        if body.return_token_strs:
            most_names = max(served.backend.context_length or 0, DETOKENIZED)
            if len(tokens) > most_names:
                text = f"return_token_strs supports at most {most_names} tokens, not {len(tokens)}"
                raise invalid(text, "return_token_strs")
            names = served.backend.tokenizer.convert_ids_to_tokens(tokens)
        most = served.backend.context_length
        value = {"count": len(tokens), "max_model_len": most, "tokens": tokens}
        return exchange.dumps({**value, "token_strs": names})

    return Response(await exchange.off_loop(answer), media_type="application/json")


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, served: FromApp) -> Response:
    """The text of token ids, special ones included."""
    served.adapter(body.model)

    def answer() -> bytes:
        most = max(served.backend.context_length or 0, DETOKENIZED)
        if len(body.tokens) > most:
            raise invalid(f"tokens must have at most {most} items", "tokens")
        size = len(served.backend.tokenizer)
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
            raise invalid(f"tokens must be between 0 and {size - 1}", "tokens")
        return exchange.dumps({"prompt": served.backend.tokenizer.decode(body.tokens)})

    return Response(await exchange.off_loop(answer), media_type="application/json")


async def answering(
    body: Any, served: Served, prompts: Sequence[Request], choice: Callable[..., AnyChoice]
) -> exchange.Answering:
    """Return ``n`` answers to each prompt, whose seeds count up if one was given."""
    prompts = [await with_ids(prompt, body, served) for prompt in prompts]
    requests = await exchange.off_loop(repeated, prompts, body.n or 1, served)
    choices = [choice(number, own, body, served) for number, own in enumerate(requests)]
    return exchange.Answering(served, body, ChoiceWriter(body, int(time.time()), choices), requests)


class Choice:
    """One answer, in pieces or whole."""

    def __init__(self, index: int, request: Request, body: Any, served: Served) -> None:
        self.request, self._index, self._body = request, index, body
        self._tokenizer = served.backend.tokenizer
        self._top: int | None = body.wanted_log_probs

    def prompt(self, tokens: Sequence[TokenLogProb] = ()) -> dict[str, Any]:
        """Return fields about the prompt, with vLLM's ``prompt_logprobs``: entries by token ids."""
        ids = {"prompt_token_ids": self.request.prompt_ids} if self._body.return_token_ids else {}
        if not tokens or self._body.prompt_logprobs is None:
            return ids
        entries = [None, *map(self._entry, tokens[1:])]  # the first token follows nothing
        return {**ids, "prompt_logprobs": entries}

    def _entry(self, token: TokenLogProb) -> dict[str, dict[str, Any]]:
        """Return a token of the prompt and its alternatives; a rank is only known of the likeliest."""
        ranks = {other: rank for rank, (other, _) in enumerate(token.top, 1)}
        values = {token.id: token.log_prob, **dict(token.top[: self._body.prompt_logprobs])}
        entry = {}
        for id, value in values.items():
            text = exchange.token_text(self._tokenizer, id)
            entry[str(id)] = {"logprob": value, "rank": ranks.get(id), "decoded_token": text}
        return entry

    def _ended(self, chunk: Chunk) -> Piece:
        """Return the reason of the end, with vLLM's field for one of ``stop_token_ids``."""
        stop = {} if chunk.stop_token is None else {"stop_reason": chunk.stop_token}
        return {"finish_reason": chunk.finish_reason, **stop}


class ChatChoice(Choice):
    def __init__(self, turn: Turn, index: int, request: Request, body: Any, served: Served) -> None:
        super().__init__(index, request, body, served)
        self._echo, self._parser, self._named = echoed(body), turn.parser(), bool(turn.use.named)
        self._plain = turn.known is None and turn.thoughts is None and not body.return_token_ids
        self._custom = turn.use.custom
        self._waiting: Block | None = None  # a custom tool's call, whose text is known at its end

    def begin(self) -> dict[str, Any]:
        role = self._piece({"role": "assistant", "content": self._echo, "refusal": None})
        return {"choices": [role], **self.prompt()}

    def pieces(self, chunk: Chunk) -> list[Piece]:
        if self._plain and not chunk.log_probs and chunk.finish_reason is None:  # most tokens
            return [self._piece({"content": chunk.text})] if chunk.text else []
        pieces = [self._piece(delta) for delta in self._deltas(chunk)]
        if about := self._about_tokens(chunk):  # with the first piece: no token is in two
            pieces = pieces or [self._piece({"content": ""})]
            pieces[0] |= about
        return [*pieces, self._piece({}) | self._ended(chunk)] if chunk.finish_reason else pieces

    def whole(self, chunk: Chunk) -> Piece:
        self._parser.read(chunk)
        # What was to be a call, and was cut off, is text.
        text = self._echo + self._parser.answer_text()
        calls = [self._whole_call(block) for block in self._parser.whole_calls()]
        message: Piece = {"role": "assistant", "content": None if calls and not text else text}
        message |= {"refusal": None, "annotations": []}
        if thoughts := self._parser.text("thoughts"):
            message["reasoning_content"] = thoughts
        message |= {"tool_calls": calls} if calls else {}
        about = {"logprobs": None, **self._about_tokens(chunk)}
        return {"index": self._index, "message": message, **about, **self._ended(chunk)}

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
        if self._top is not None and chunk.log_probs:
            content = exchange.chat_log_probs(self._tokenizer, chunk.log_probs, self._top)
            about["logprobs"] = {"content": content, "refusal": None}
        if self._body.return_token_ids and chunk.ids:
            about["token_ids"] = chunk.ids
        return about

    def _ended(self, chunk: Chunk) -> Piece:
        ended = super()._ended(chunk)
        # Of a call that was forced by its name, OpenAI says stop.
        called = self._parser.ends_with_calls and chunk.finish_reason == "stop" and not self._named
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


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind != "call":
        return {"content" if block.kind == "text" else "reasoning_content": text}
    call: dict[str, Any] = {"function": {"arguments": text}}
    if not text:
        call = {"id": block.id, **function(name=block.name, arguments="")}
    return {"tool_calls": [{"index": block.index, **call}]}


class TextChoice(Choice):
    def __init__(self, index: int, request: Request, body: Any, served: Served) -> None:
        super().__init__(index, request, body, served)
        self._prompt = ""
        if body.echo:
            self._prompt = request.prompt or self._tokenizer.decode(list(request.prompt_ids))
        self._offset, self._begun = 0, False

    def begin(self) -> dict[str, Any]:
        """Return the fields of an event with the prompt, unless its tokens come with the first chunk."""
        alone = self._prompt and self._top is None
        return {"choices": [self._piece(self._prompt, {})]} if alone else {}

    def pieces(self, chunk: Chunk) -> list[Piece]:
        first, self._begun = not self._begun, True
        if self._body.echo and self._body.max_tokens == 0:  # for the prompt only
            ended = replace(chunk, finish_reason=chunk.finish_reason and "length", stop_token=None)
            chunk = replace(ended, text="", ids=(), log_probs=())
        echoed = chunk.prompt_log_probs if self._body.echo else ()
        tokens = () if self._top is None else (*echoed, *chunk.log_probs)
        text = self._prompt + chunk.text if first and self._top is not None else chunk.text
        if not (text or tokens or chunk.finish_reason or self._body.return_token_ids):
            return []
        log_probs = self._log_probs(tokens) if tokens else None
        if log_probs and echoed:  # the first token follows nothing
            log_probs["token_logprobs"][0] = log_probs["top_logprobs"][0] = None
        piece = self._piece(text, {"logprobs": log_probs, **self._ended(chunk)})
        if self._body.return_token_ids:
            piece |= {"token_ids": chunk.ids, **(self.prompt() if first else {})}
        return [piece]

    def whole(self, chunk: Chunk) -> Piece:
        (piece,) = self.pieces(chunk)
        lead = self._prompt if self._top is None else ""
        return piece | {"text": lead + piece["text"]} | self.prompt(chunk.prompt_log_probs)

    def _piece(self, text: str, more: dict[str, Any]) -> Piece:
        return {"text": text, "index": self._index, "logprobs": None, "finish_reason": None, **more}

    def _log_probs(self, tokens: Sequence[TokenLogProb]) -> dict[str, list[Any]]:
        # Special tokens that the text does not show take no characters.
        skipped = self.request.skip_special_tokens or self._prompt
        hidden = frozenset(self._tokenizer.all_special_ids) if skipped else ()
        rows = []
        for token in tokens:
            top: dict[str, float] = {}
            # Parts of characters all have one text, which stands for the likeliest.
            for other, value in (*token.top[: self._top], (token.id, token.log_prob)):
                top.setdefault(exchange.token_text(self._tokenizer, other), value)
            text = exchange.token_text(self._tokenizer, token.id)
            rows.append((text, token.log_prob, top, self._offset))
            if token.id not in hidden or self._prompt.startswith(text, self._offset):
                self._offset += len(text)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        columns = zip(*rows, strict=True)
        return {name: list(column) for name, column in zip(names, columns, strict=True)}


class ChoiceWriter:
    def __init__(
        self, body: ChatBody | CompletionBody, created: int, choices: Sequence[AnyChoice]
    ) -> None:
        self._is_chat = isinstance(body, ChatBody)
        name = exchange.new_id("chatcmpl-" if self._is_chat else "cmpl-")
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": created, "model": body.model}
        self._head |= {"system_fingerprint": None}
        self._options, self._choices, self._each = body.stream_options, choices, body.n or 1
        # Tokens of each prompt, and of each answer; to each prompt there are ``n`` answers.
        self._prompts: dict[int, int] = {}
        self._outputs: dict[int, int] = {}
        self._ended = 0

    def events(self, number: int, chunk: Chunk, /) -> Iterator[bytes]:
        choice, begins = self._choices[number], number not in self._outputs
        self._count(number, chunk)
        if begins and (begin := choice.begin()):
            yield self._event(begin, number, 0)
        for piece in choice.pieces(chunk):
            yield self._event({"choices": [piece]}, number, chunk.output_tokens)
        self._ended += chunk.finish_reason is not None
        if self._ended == len(self._choices):
            if self._options and self._options.include_usage:
                yield exchange.event({**self._head, "choices": [], "usage": self._usage()})
            yield DONE

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return exchange.event(error.body()), DONE

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        chunks = [exchange.joined(came) for came in answers]
        for number, chunk in enumerate(chunks):
            self._count(number, chunk)
        choices = [own.whole(chunk) for own, chunk in zip(self._choices, chunks, strict=True)]
        body = {**self._head, "choices": choices, "usage": self._usage()}
        if self._is_chat:
            prompt = self._choices[0].prompt(chunks[0].prompt_log_probs)
            body |= {"object": "chat.completion", **prompt}
        return body

    def _event(self, own: dict[str, Any], number: int, output: int) -> bytes:
        """Return an event; if it is to have usage, that of its own answer so far, or null."""
        value = {**self._head, **own}
        if self._options and self._options.include_usage:
            prompt = self._prompts.get(number // self._each, 0)
            value["usage"] = usage(prompt, output) if self._options.continuous_usage_stats else None
        return exchange.event(value)

    def _count(self, number: int, chunk: Chunk) -> None:
        self._outputs[number] = chunk.output_tokens
        if chunk.input_tokens is not None:
            self._prompts[number // self._each] = chunk.input_tokens

    def _usage(self) -> dict[str, int]:
        return usage(sum(self._prompts.values()), sum(self._outputs.values()))


def usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
