"""The bodies of vLLM's /tokenize and /detokenize."""

from typing import Annotated, ClassVar

from cog_triton.api.openai.schemas.base import Ignored, Refused, RequestBody, SetBy
from cog_triton.api.openai.schemas.chat import Message, TemplateFields
from cog_triton.api.openai.schemas.values import AtMostMessages, TokenIds


class TokenizeBody(TemplateFields, RequestBody):
    """Has a prompt or messages."""

    refused: ClassVar[Refused] = {}
    ignored: ClassVar[Ignored] = frozenset()
    set_by: ClassVar[SetBy] = {"prompt": ["prompt", "messages"]}

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], AtMostMessages] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    refused: ClassVar[Refused] = {}
    ignored: ClassVar[Ignored] = frozenset()
    set_by: ClassVar[SetBy] = {}

    model: str = ""
    tokens: TokenIds
