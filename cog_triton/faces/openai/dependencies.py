"""Dependencies of the routes, for FastAPI."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from cog_triton.faces.openai.served import Served


async def _served(request: Request) -> Served:
    served: Served = request.app.state.served
    return served


async def _request_id(request: Request) -> str:
    return str(request.state.request_id)


FromApp = Annotated[Served, Depends(_served)]
RequestId = Annotated[str, Depends(_request_id)]
