"""The form of /v1/files, the body of /v1/batches, and the lines of a batch."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cog_triton.api.openai.schemas.base import Ignored, JsonObject, Refused, RequestBody, SetBy
from cog_triton.api.openai.schemas.values import METADATA_PAIRS, at_most_pairs

SHORTEST_SECONDS = 3600
MONTH_SECONDS = 30 * 24 * 3600
BatchMetadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    at_most_pairs(METADATA_PAIRS),
]


class ExpiresAfter(JsonObject):
    """How long a file is kept."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=SHORTEST_SECONDS, le=MONTH_SECONDS)


class BatchBody(RequestBody):
    refused: ClassVar[Refused] = {}
    ignored: ClassVar[Ignored] = frozenset()
    set_by: ClassVar[SetBy] = {}

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: BatchMetadata | None = None
    output_expires_after: ExpiresAfter | None = None


class LineBody(RequestBody):
    """One line of a batch's input: a request."""

    refused: ClassVar[Refused] = {}
    ignored: ClassVar[Ignored] = frozenset()
    set_by: ClassVar[SetBy] = {}

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class FileForm(RequestBody):
    """The fields of an upload's form, besides its file."""

    refused: ClassVar[Refused] = {}
    ignored: ClassVar[Ignored] = frozenset()
    set_by: ClassVar[SetBy] = {}

    purpose: Literal["batch"]
    expires_after: ExpiresAfter = ExpiresAfter(anchor="created_at", seconds=MONTH_SECONDS)
