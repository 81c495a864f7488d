"""One of several processes of the face, by its number, as ``server.Workers`` starts them."""

import json
import os
import socket
import sys

import uvloop

from cog_triton.api.openai.served import Served
from cog_triton.api.openai.server import InProcess, run_until_signal
from cog_triton.deployment.attached import attach
from cog_triton.processes import end_with_parent
from cog_triton.request.admission import Lender
from cog_triton.server.log import log_to
from cog_triton.settings import read_settings


async def work(
    number: int, listener: int, address: str, triton_model: str, context: int | None, *models: str
) -> None:
    """Serve on a socket that was handed down, by its descriptor, until a signal comes; see ``attach``."""
    ready = os.dup(1)
    os.dup2(2, 1)  # what a library prints does not say that it is ready
    settings = read_settings()
    log_to(settings.log_level)
    end_with_parent()
    attached = await attach(settings, address, triton_model, context, announce=False)
    slots, workers = f"{os.environ['PROMETHEUS_MULTIPROC_DIR']}/slots", settings.openai_workers
    attached.admission.lender = Lender(slots, number, workers, settings.max_running)
    try:
        shared = socket.socket(fileno=listener)
        server = InProcess(Served(attached, models), shared)
        await run_until_signal(server, shared, lambda: os.write(ready, b"."))
    finally:
        await attached.stop()


if __name__ == "__main__":
    uvloop.run(work(int(sys.argv[2]), *json.loads(sys.argv[1])))
