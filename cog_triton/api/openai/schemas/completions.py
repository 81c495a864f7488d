"""The body of /v1/completions, with what vLLM's users add."""

from typing import Annotated, ClassVar

from pydantic import Field

from cog_triton.api.openai.schemas.base import AnswerBody, Ignored, Refused, SetBy
from cog_triton.api.openai.schemas.sampling import IGNORED, REFUSED, Sampling
from cog_triton.api.openai.schemas.structured_output import GUIDE_FIELDS
from cog_triton.api.openai.schemas.values import TokenIds
from cog_triton.request.limits import TOP_LOG_PROBS

MAX_ANSWERS = 1024  # to all prompts of one request together
AtMostAnswers = Field(max_length=MAX_ANSWERS, fail_fast=True)


class CompletionBody(Sampling, AnswerBody):
    refused: ClassVar[Refused] = REFUSED
    ignored: ClassVar[Ignored] = IGNORED
    set_by: ClassVar[SetBy] = {"prompt": ["prompt"], "guide": GUIDE_FIELDS}

    prompt: (
        str
        | Annotated[list[str], AtMostAnswers]
        | TokenIds
        | Annotated[list[TokenIds], AtMostAnswers]
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=TOP_LOG_PROBS)

    @property
    def wanted_log_probs(self) -> int | None:
        """Alternatives of each token of the answer; None without log probabilities."""
        return self.logprobs
