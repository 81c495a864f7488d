"""GET /v1/models: the names of the model, and those of its LoRA adapters."""

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from cog_triton.api.openai.call import current
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.models import ModelsQuery
from cog_triton.api.openai.served import FromApp, Served
from cog_triton.deployment.announcement import is_demo_model
from cog_triton.errors import shown

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request, served: FromApp) -> dict[str, Any]:
    """The names of the model, and those of its LoRA adapters; in Anthropic's form for its clients."""
    if current().anthropic:
        return _anthropic_page(served, ModelsQuery.read(request.query_params))
    return {"object": "list", "data": [_card(served, name) for name in served.names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, served: FromApp) -> dict[str, Any]:
    """One of them."""
    served.adapter(name)
    return _anthropic_card(served, name) if current().anthropic else _card(served, name)


def _card(served: Served, name: str) -> dict[str, Any]:
    is_adapter = name not in served.models
    card = {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "cog-triton",
        "root": name if is_adapter else served.models[0],
        "parent": served.models[0] if is_adapter else None,
        "max_model_len": served.backend.context_length,
    }
    if is_demo_model(Path(served.settings.tokenizer_dir)):
        card["toy"] = True  # the chat page says so
    return card


def _anthropic_page(served: Served, query: ModelsQuery) -> dict[str, Any]:
    """Return the models that a query asks for, in Anthropic's form, or raise ApiError."""
    names = served.names
    first = 0
    end = len(names)
    if query.after_id is not None:
        first = _place(query.after_id, names, "after_id") + 1
    if query.before_id is not None:
        end = _place(query.before_id, names, "before_id")
    between = names[first:end]
    goes_back = query.before_id is not None and query.after_id is None
    page = between[-query.limit :] if goes_back else between[: query.limit]
    return {
        "data": [_anthropic_card(served, name) for name in page],
        "has_more": len(page) < len(between),
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _place(cursor: str, names: Sequence[str], param: str) -> int:
    if cursor not in names:
        raise invalid(f"{param}: the model {shown(cursor)} does not exist", param)
    return names.index(cursor)


def _anthropic_card(served: Served, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(served.created, timezone.utc)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
