"""The end of a request's prompt, for the worker that it may move to.

Dynamo sends a request that has lost its worker to another one: the prompt and the output so far as one
list of ids, under the same id. Penalties count the output only. So a worker tells the others of each
request for which that matters, before its first token, by an endpoint of Dynamo's.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

from dynamo.runtime import Client, DistributedRuntime, Endpoint

logger = logging.getLogger(__name__)

REMEMBERED = 65_536  # requests of all workers
TELL_SECONDS = 1.0  # a worker that does not answer for so long is not waited for


class Marks:
    """The lengths of prompts, by requests' ids: this worker's, and what the others told."""

    _client: Client

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, int] = OrderedDict()
        self._endpoint: Endpoint | None = None

    async def serve(self, runtime: DistributedRuntime, path: str) -> None:
        """Listen to the other workers at ``namespace.component.endpoint`` until cancelled."""
        self._endpoint = runtime.endpoint(path)
        self._client = await self._endpoint.client()
        await self._endpoint.serve_endpoint(self._told)

    def length(self, request_id: str, most: int) -> int:
        """Return how many of a request's ids are its prompt: all, if nothing else is known."""
        return min(self._lengths.get(request_id, most), most)

    async def tell(self, request_id: str, length: int) -> None:
        """Tell the other workers; one that cannot be reached will not get the request either."""
        if self._endpoint is None or request_id in self._lengths:
            return
        self._remember(request_id, length)
        own, mark = self._endpoint.connection_id(), {"id": request_id, "length": length}
        others = [worker for worker in self._client.instance_ids() if worker != own]
        telling = [asyncio.create_task(self._send(worker, mark)) for worker in others]
        if telling:
            await asyncio.wait(telling, timeout=TELL_SECONDS)

    async def _send(self, worker: int, mark: dict[str, Any]) -> None:
        try:
            async for _ in await self._client.direct(mark, worker):
                pass
        except Exception as error:  # whatever Dynamo's transport raises
            logger.debug("worker %d has not learned of a request: %s", worker, error)

    async def _told(self, mark: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self._remember(mark["id"], mark["length"])
        yield {}

    def _remember(self, request_id: str, length: int) -> None:
        self._lengths[request_id] = length
        if len(self._lengths) > REMEMBERED:
            self._lengths.popitem(last=False)
