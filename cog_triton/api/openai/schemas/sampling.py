"""The fields that chats and completions share."""

from typing import Annotated, Literal

from pydantic import Field

from cog_triton.api.openai.schemas.base import AnswerBody, Ignored, JsonObject, Refused
from cog_triton.api.openai.schemas.structured_output import GuidedFields
from cog_triton.api.openai.schemas.values import LogitBias, Penalty, Texts, TokenIds
from cog_triton.request.limits import TOP_LOG_PROBS
from cog_triton.request.request import Request

# What neither chats nor completions can do here.
REFUSED: Refused = {
    "audio": [],
    "best_of": [1],
    "chat_template": [],
    "documents": [[]],
    "function_call": ["none"],
    "functions": [[]],
    "include_reasoning": [True],
    "logits_processors": [[]],
    "logprob_token_ids": [],
    "modalities": [["text"]],
    "prompt_embeds": [],
    "repetition_detection": [],
    "return_tokens_as_token_ids": [False],
    "spaces_between_special_tokens": [True],
    "suffix": [""],
    "thinking_token_budget": [-1],
    "use_beam_search": [False],
    "vllm_xargs": [{}],
    "watermarking": [False],
    "web_search_options": [],
}
IGNORED: Ignored = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prediction",  # may make an answer faster, and changes none
    }
)


class StreamOptions(JsonObject):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(GuidedFields):
    """The fields that chats and completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = Field(None, ge=1, le=128)
    stop: str | Texts | None = None
    logit_bias: LogitBias | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    user: str | None = None
    # Beyond OpenAI's:
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=TOP_LOG_PROBS)
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(2**63), lt=2**63)


# Fields of these names go to a ``Request`` as they are; one that is absent has the default there.
SAME_IN_REQUEST = (
    (AnswerBody.model_fields.keys() | Sampling.model_fields.keys())
    & Request.__dataclass_fields__.keys()
) - {"max_tokens", "add_special_tokens", "seed", "logit_bias"}
