import functools
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import text_format  # type: ignore[attr-defined, unused-ignore]

from cog_triton.protocol.triton_messages import ModelConfig

PARSE = text_format.Parse


@pytest.fixture(scope="session", autouse=True)
def _each_text_parsed_once() -> Iterator[None]:
    """Parse the text of a model's configuration once: that takes milliseconds, and most are the same."""

    def parse(text: str, message: Any, **options: Any) -> Any:
        if options or not isinstance(message, ModelConfig):
            return PARSE(text, message, **options)
        message.ParseFromString(serialized(text))
        return message

    @functools.cache
    def serialized(text: str) -> bytes:
        return bytes(PARSE(text, ModelConfig()).SerializeToString())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_format, "Parse", parse)
        yield
