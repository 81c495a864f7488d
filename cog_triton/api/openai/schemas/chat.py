"""The body of /v1/chat/completions, with what vLLM's users add."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from cog_triton.api.openai.schemas.base import (
    AnswerBody,
    Ignored,
    JsonObject,
    Refused,
    SetBy,
)
from cog_triton.api.openai.schemas.sampling import IGNORED, REFUSED, Sampling
from cog_triton.api.openai.schemas.structured_output import GUIDE_FIELDS
from cog_triton.api.openai.schemas.tools import AnyTool, ToolChoice
from cog_triton.api.openai.schemas.values import AtMostMessages, Effort, OutputTokens
from cog_triton.request.limits import TOP_LOG_PROBS


class Message(JsonObject):
    """A message of a chat; further fields are up to the chat template."""

    role: str = Field(min_length=1)
    content: Any = None
    refusal: str | None = None
    tool_call_id: str | None = None


class TemplateFields(JsonObject):
    """The fields of a chat that its template reads, besides the messages."""

    tools: Annotated[list[AnyTool], AtMostMessages] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatBody(TemplateFields, Sampling, AnswerBody):
    refused: ClassVar[Refused] = REFUSED
    ignored: ClassVar[Ignored] = IGNORED
    set_by: ClassVar[SetBy] = {
        "prompt": ["messages"],
        "max_tokens": ["max_completion_tokens", "max_tokens"],
        "guide": GUIDE_FIELDS,
    }

    messages: Annotated[list[Message], Field(min_length=1), AtMostMessages]
    max_completion_tokens: OutputTokens | None = None
    reasoning_effort: Effort | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOG_PROBS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None

    @property
    def wanted_log_probs(self) -> int | None:
        """Alternatives of each token of the answer; None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
