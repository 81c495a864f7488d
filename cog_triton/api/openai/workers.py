"""One of several processes of the API server, as ``supervisor.Workers`` starts them."""

import os
import socket
import sys

import uvloop

from cog_triton.api.openai.served import Served
from cog_triton.api.openai.server import InProcess, run_until_signal
from cog_triton.api.openai.supervisor import READY, WorkerConfig
from cog_triton.deployment.attached import attach
from cog_triton.processes import end_with_parent
from cog_triton.request.admission import Lender
from cog_triton.server.log import log_to
from cog_triton.settings import read_settings


async def work(config: WorkerConfig) -> None:
    """Serve until a signal comes; write to the standard output what ``supervisor.Workers`` reads there."""
    output = os.dup(1)
    os.dup2(2, 1)  # so that a library's output is not taken for this one's
    environment_settings = read_settings()
    settings = config.applied_to(environment_settings)
    log_to(settings.log_level)
    end_with_parent()
    deployment = await attach(
        settings,
        config.address,
        config.triton_model,
        config.context_length,
        announce=False,
        on_given_up=lambda model: os.write(output, f"{model}\n".encode()),
    )
    deployment.admission.lender = Lender(
        file=str(config.metrics_directory / "slots"),
        number=config.number,
        processes=settings.openai_workers,
        slots=settings.max_running,
    )
    try:
        listener = socket.socket(fileno=config.listener)
        server = InProcess(Served(deployment, config.models), listener)
        await run_until_signal(server, listener, lambda: os.write(output, READY))
    finally:
        await deployment.stop()


if __name__ == "__main__":
    uvloop.run(work(WorkerConfig.model_validate_json(sys.argv[1])))
