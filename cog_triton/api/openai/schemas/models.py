"""The query of /v1/models in Anthropic's form."""

from collections.abc import Mapping
from dataclasses import dataclass

from cog_triton.api.openai.paging import page_limit

MAX_MODELS = 1000  # in a page


@dataclass(frozen=True)
class ModelsQuery:
    """Which models a client asks for: those between two, or so many of them."""

    limit: int
    after_id: str | None
    before_id: str | None

    @classmethod
    def read(cls, query: Mapping[str, str]) -> "ModelsQuery":
        """Return a query, or raise ApiError."""
        return cls(
            limit=page_limit(query, MAX_MODELS, MAX_MODELS),
            after_id=query.get("after_id"),
            before_id=query.get("before_id"),
        )
