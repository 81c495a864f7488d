"""Names that the routes of responses, files and batches use."""

from cog_triton.api.openai.body_route import LARGE_BODY, BodyRoute, off_loop
from cog_triton.api.openai.protocol.answering import Answering
from cog_triton.api.openai.protocol.error_response import client_error
from cog_triton.api.openai.protocol.events import dumps, new_id
from cog_triton.api.openai.protocol.openapi import STREAMED
from cog_triton.api.openai.validation import body_error, validated

__all__ = [
    "LARGE_BODY",
    "STREAMED",
    "Answering",
    "BodyRoute",
    "body_error",
    "client_error",
    "dumps",
    "new_id",
    "off_loop",
    "validated",
]
