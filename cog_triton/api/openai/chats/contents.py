"""Parts of contents that a model of text cannot read: pictures, sounds, files.

In the newest message they are refused, so that whoever sent them learns of it. In an earlier message, or in
the result of a tool, words stand in their place: an agent sends the same messages again with each request,
and an error would end its session.
"""

from collections.abc import Collection
from typing import Any

from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.api.openai.schemas.base import AnswerBody, JsonObject
from cog_triton.errors import shown

UNREADABLE = frozenset(
    {
        "audio",
        "audio_url",
        "computer_screenshot",
        "document",
        "file",
        "image",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "input_video",
        "video",
        "video_url",
    }
)


def left_out_text(kind: str) -> str:
    """Return the words that stand for a part of a content which a model of text cannot read."""
    return f"[{shown(kind)} left out: this model reads text only]"


def refusal(kind: str | None, place: str, param: str | None) -> ApiError:
    """Return the error for a part of a type that is not supported."""
    text = f"{place}: content of type {shown(kind)} is not supported: this model reads text only"
    return invalid(text, param)


def left_out(kind: str, body: JsonObject) -> str:
    """Return the words in place of a part, and note it for the Warning header of an answer."""
    if isinstance(body, AnswerBody):
        body.leave_out(f"content of type {kind}")
    return left_out_text(kind)


def joined_text(content: Any, kinds: Collection[str], place: str, param: str | None = None) -> str:
    """Return the text of a content, or refuse a part that is not of one of some kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in kinds:
            raise refusal(part.type, place, param)
    return "\n".join(part.text or getattr(part, "refusal", None) or "" for part in content)
