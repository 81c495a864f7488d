"""The processes of the command: one that serves, or several that share its socket and its Triton."""

from __future__ import annotations

from dataclasses import dataclass

import uvloop

from cog_triton.deployment import Deployment
from cog_triton.faces.openai.served import Backend
from cog_triton.faces.openai.serving import Address, bound, model_names, serve
from cog_triton.server.log import log_to
from cog_triton.settings import read_settings


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        models: names in requests; empty for that of MODEL.
        endpoint: of a Triton that runs; None to start one.
        triton_model: of that Triton, where it has no ensemble that returns ids.
        tokenizer: a directory or an id; None for that of the settings.
        workers: processes that answer.
    """

    host: str
    port: int
    models: tuple[str, ...] = ()
    endpoint: str | None = None
    triton_model: str = "ensemble"
    tokenizer: str | None = None
    workers: int = 1


def run(options: Options) -> int:
    """Serves until a signal comes; returns the exit status.

    Raises:
        CogTritonError: the settings are wrong, or something could not be started.
    """
    settings = read_settings()
    log_to(settings.log_level)
    if options.tokenizer:
        settings = settings.model_copy(update={"tokenizer": options.tokenizer})
    address = Address(options.host, options.port)
    names = options.models or model_names(settings)

    async def start() -> Backend:
        return await Deployment.start(settings)

    def ready() -> None:
        print(f"ready: {address.url}", flush=True)

    uvloop.run(serve(start, names, bound(address), ready))
    return 0
