"""Types of values that several APIs have, with their bounds."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError

from cog_triton.request.limits import LOGIT_BIASES, MESSAGES
from cog_triton.request.request import MAX_INT32

METADATA_PAIRS = 16

Temperature = Annotated[float, Field(le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
OutputTokens = Annotated[int, Field(ge=1, le=MAX_INT32)]
# OpenAI allows 64 characters; agents that Anthropic's API serves send up to 128.
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
JsonSchemaObject = dict[str, Any]
# ``fail_fast``: otherwise each wrong element of a list would make an error of its own.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIdText = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
AtMostMessages = Field(max_length=MESSAGES, fail_fast=True)


def at_most_pairs(limit: int) -> BeforeValidator:
    """Return the check of an object's length, before its pairs, each of which may have an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            lengths = {
                "field_type": "Dictionary",
                "max_length": limit,
                "actual_length": len(value),
            }
            raise PydanticKnownError("too_long", lengths)
        return value

    return BeforeValidator(check)


LogitBias = Annotated[dict[TokenIdText, Bias], at_most_pairs(LOGIT_BIASES)]
Metadata = Annotated[dict[str, str], at_most_pairs(METADATA_PAIRS)]
