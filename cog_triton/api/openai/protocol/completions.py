"""The writer of /v1/completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cog_triton.api.openai.protocol.choices import ChoiceWriter, Piece, PromptAndEnd
from cog_triton.api.openai.protocol.log_probs import token_text
from cog_triton.api.openai.schemas.completions import CompletionBody
from cog_triton.api.openai.served import Served
from cog_triton.generation import Chunk, FinishReason
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.request.request import Request


class CompletionWriter(ChoiceWriter):
    id_prefix = "cmpl-"
    object_of_events = "text_completion"
    object_of_whole = "text_completion"


class TextChoice(PromptAndEnd):
    """One answer to a prompt."""

    def __init__(self, index: int, request: Request, body: CompletionBody, served: Served) -> None:
        super().__init__(index, request, body, served)
        self._echoes = bool(body.echo)
        self._wants_prompt_only = self._echoes and body.max_tokens == 0
        self._prompt = ""
        if self._echoes:
            self._prompt = request.prompt or self._tokenizer.decode(list(request.prompt_ids))
        self._offset = 0
        self._begun = False

    def begin(self) -> dict[str, Any]:
        """Return the fields of an event with the prompt, unless its tokens come with the first chunk."""
        if self._prompt and self._alternatives is None:
            return {"choices": [self._piece(self._prompt, {})]}
        return {}

    def pieces(self, chunk: Chunk) -> list[Piece]:
        is_first = not self._begun
        self._begun = True
        if self._wants_prompt_only:
            chunk = _without_text(chunk)
        echoed = chunk.prompt_log_probs if self._echoes else ()
        text = chunk.text
        tokens: Sequence[TokenLogProb] = ()
        if self._alternatives is not None:
            tokens = (*echoed, *chunk.log_probs)
            if is_first:
                text = self._prompt + text
        if not (text or tokens or chunk.finish_reason or self._returns_ids):
            return []
        log_probs = self._log_probs(tokens) if tokens else None
        if log_probs and echoed:  # the first token follows nothing
            log_probs["token_logprobs"][0] = None
            log_probs["top_logprobs"][0] = None
        piece = self._piece(text, {"logprobs": log_probs, **self._ended(chunk)})
        if self._returns_ids:
            piece["token_ids"] = chunk.ids
            if is_first:
                piece |= self.about_prompt()
        return [piece]

    def whole(self, chunk: Chunk) -> Piece:
        (piece,) = self.pieces(chunk)
        if self._alternatives is None:
            piece["text"] = self._prompt + piece["text"]
        return piece | self.about_prompt(chunk.prompt_log_probs)

    def _piece(self, text: str, more: dict[str, Any]) -> Piece:
        return {"text": text, "index": self._index, "logprobs": None, "finish_reason": None, **more}

    def _log_probs(self, tokens: Sequence[TokenLogProb]) -> dict[str, list[Any]]:
        # Special tokens that the text does not show take no characters. In an echoed prompt, that is known
        # from the prompt itself: see the end of the loop.
        hides_special = self.request.skip_special_tokens or self._prompt
        hidden = frozenset(self._tokenizer.all_special_ids) if hides_special else frozenset()
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            top: dict[str, float] = {}
            # Tokens that are parts of characters have the same text. The first value stays: the highest.
            for other, value in (*token.top[: self._alternatives], (token.id, token.log_prob)):
                top.setdefault(token_text(self._tokenizer, other), value)
            text = token_text(self._tokenizer, token.id)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(token.log_prob)
            columns["top_logprobs"].append(top)
            columns["text_offset"].append(self._offset)
            if token.id not in hidden or self._prompt.startswith(text, self._offset):
                self._offset += len(text)
        return columns


def _without_text(chunk: Chunk) -> Chunk:
    """Return a chunk of an answer of which only the prompt is wanted."""
    reason: FinishReason | None = None if chunk.finish_reason is None else "length"
    return replace(chunk, finish_reason=reason, stop_token=None, text="", ids=(), log_probs=())
