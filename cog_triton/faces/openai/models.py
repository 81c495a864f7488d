"""GET /v1/models and what else is said of them; /v1/embeddings, which there is not."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cog_triton.faces.openai.dependencies import FromApp
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.served import OWNER, Served

router = APIRouter()


@router.get("/v1/models")
async def models(served: FromApp) -> dict[str, Any]:
    """The names under which the model is asked for, and those of its LoRA adapters."""
    return {
        "object": "list",
        "data": [_card(served, name) for name in (*served.models, *served.adapters)],
    }


@router.get("/v1/models/{name:path}")
async def model(name: str, served: FromApp) -> dict[str, Any]:
    """One of them."""
    served.adapter(name)
    return _card(served, name)


@router.post("/v1/embeddings")
async def embeddings(_: Request) -> None:
    """Refused: a generative model in TensorRT-LLM's slot gives tokens, and no embeddings."""
    text = "embeddings are not served: the models here generate text, and engines give no vectors"
    raise ApiError(404, text, code="unknown_url")  # clients would send a 501 again


def _card(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": OWNER,
        "root": served.models[0] if name in served.models else name,
        "parent": None if name in served.models else served.models[0],
        "max_model_len": served.backend.context_length,
    }
