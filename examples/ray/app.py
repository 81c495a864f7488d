"""OpenAI's API as an application of Ray Serve 2.60, with a Triton for each replica. See docs/scale.md."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI
from ray import serve

from cog_triton.api.openai.app import create_app
from cog_triton.api.openai.served import Served
from cog_triton.deployment import Deployment
from cog_triton.deployment.model_files import model_name
from cog_triton.settings import read_settings

# Replicas share a machine, so each takes free ports. A replica whose Triton cannot be restarted exits, and
# Ray starts another.
SETTINGS = {f"TRITON_{name}_PORT": "0" for name in ("HTTP", "GRPC", "METRICS")}
SETTINGS["EXIT_ON_FAILURE"] = "1"


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start a Triton before the replica is ready, and let its requests end before it stops."""
    settings = read_settings({**SETTINGS, **os.environ})
    deployment = await Deployment.start(settings)
    served = Served(deployment, (model_name(settings),))
    app.mount("/", create_app(served))
    yield
    await served.drain()
    await deployment.stop()


# More than MAX_RUNNING plus MAX_WAITING, and more than DRAIN_SECONDS.
@serve.deployment(num_replicas=2, max_ongoing_requests=600, graceful_shutdown_timeout_s=40)
@serve.ingress(lambda: FastAPI(lifespan=lifespan, openapi_url=None))
class Api:
    pass


application = Api.bind()
