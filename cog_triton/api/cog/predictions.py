"""The predictions that run: begun here, ended by the predictor and by the responses that show them."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cog_triton.api.cog.messages import VARIABLE, read_messages, send_message
from cog_triton.api.cog.passage import Inputs, Passage, Route
from cog_triton.api.cog.prediction_files import DIRECTORY, PredictionFiles
from cog_triton.web import Refusal

# After the end of a prediction, coglet may still use its directory, and call its webhook, again where that
# fails.
REMOVE_SECONDS = 5.0
WEBHOOK_SECONDS = 3.0
# Takes the number of characters before a text, and the text.
Show = Callable[[int, str], None]


@dataclass
class Running:
    """A prediction that has not ended."""

    # Tasks that relay its responses: none while it is asynchronous, several if several requests name it.
    relays: set[asyncio.Task[Any] | None] = field(default_factory=set)
    # Takes the predictor's texts, for the request that began it.
    show: Show | None = None
    in_predictor: bool = True
    # Whether the predictor has got the message ``cancel``.
    cancelled: bool = False
    has_webhook: bool = False


class Predictions:
    """The predictions that began here, by id. To be made before Cog's server starts its worker.

    A prediction has ended when the predictor has said so and no response is relayed any more.
    """

    def __init__(self, directory: Path | None = None) -> None:
        # Whether the predictor takes messages. One that does not serves as if there were no front.
        self.listening = False
        # Whether new predictions are refused.
        self.draining = False
        self.inputs = Inputs()
        # When a prediction last began, sent something or ended.
        self.progress = time.monotonic()
        self.files = PredictionFiles(directory or DIRECTORY)
        self._running: dict[str, Running] = {}
        self._webhooks_until = 0.0
        # Whether the predictor answers requests that did not pass the front.
        self._others_run = False
        self._end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(worker_end.fileno(), True)
        os.environ[VARIABLE] = str(worker_end.detach())
        self.send = partial(send_message, self._end)

    def listen(self) -> None:
        """Handle the predictor's messages, on the running event loop."""
        read_messages(self._end, self.receive)

    def receive(self, kind: str, *words: Any) -> None:
        """Handle a message of the predictor, see ``messages.py``."""
        if kind == "hello":
            self.listening = True
            self.inputs = Inputs.from_message(words[0])
        elif kind == "ended":
            self._settle(words[0])
        elif kind == "texts":
            for identifier, place, text in words:
                running = self._running.get(identifier)
                if running is not None and running.show is not None:
                    running.show(place, text)
        else:
            self._others_run = kind == "busy"

    def refuse_while_draining(self) -> None:
        if self.draining:
            raise Refusal(503, "the server is stopping and takes no new predictions", retry_after=5)

    def check(self, method: str, target: str, body: bytes) -> Passage:
        """Return a request as it may pass, or raise Refusal. It may be called in a thread."""
        route = Route.parse(method, target)
        if route.starts:
            self.refuse_while_draining()
        return route.passage(body, self.inputs)

    def begin(self, identifier: str, show: Show | None = None, *, has_webhook: bool = False) -> str:
        """Note a prediction whose response the current task relays, until ``end``.

        Return why Cog's server may not make files for it; empty if it may.
        """
        running = self._running.setdefault(identifier, Running(show=show))
        running.relays.add(asyncio.current_task())
        running.in_predictor = True
        running.has_webhook = running.has_webhook or has_webhook
        self.progress = time.monotonic()
        return self.files.make(identifier)

    def end(self, identifier: str, status: int) -> None:
        """Note that the current task relays the response no more, whose HTTP status this was."""
        self._running[identifier].relays.discard(asyncio.current_task())
        self.progress = time.monotonic()
        # After a 202, the predictor has begun it, and no response waits.
        self._settle(identifier, in_predictor=status == 202)

    def runs(self, identifier: str | None) -> bool:
        running = self._running.get(identifier or "")
        if running is None:
            return False
        # The end of an asynchronous prediction is not seen where the predictor does not listen.
        return bool(running.relays) or (self.listening and running.in_predictor)

    def cancel(self, identifier: str) -> bool:
        """Cancel a prediction, however early; return False if only Cog's server can do that."""
        if not self.listening or not self.runs(identifier):
            return False
        self._running[identifier].cancelled = True
        self.send("cancel", identifier)
        return True

    def cancel_relays(self) -> None:
        """Cancel the tasks that relay responses."""
        relays = [task for running in self._running.values() for task in running.relays]
        for task in relays:
            if task is not None:
                task.cancel()

    def left(self) -> str:
        """Return what still runs, in words; empty for nothing."""
        count = len([identifier for identifier in self._running if self.runs(identifier)])
        left = []
        if count:
            left.append("1 prediction" if count == 1 else f"{count} predictions")
        if time.monotonic() < self._webhooks_until:
            left.append("a webhook")
        if self._others_run:
            left.append("requests to another API")
        return " and ".join(left)

    def _settle(self, identifier: str, in_predictor: bool = False) -> None:
        """Forget a prediction that neither the predictor nor a response has any more."""
        running = self._running.get(identifier)
        if running is None:
            return
        running.in_predictor = running.in_predictor and in_predictor
        if running.relays or running.in_predictor:
            return
        del self._running[identifier]
        if running.has_webhook:
            self._webhooks_until = time.monotonic() + WEBHOOK_SECONDS
        if running.cancelled:
            self.send("forget", identifier)
        asyncio.get_running_loop().call_later(REMOVE_SECONDS, self._remove, identifier)

    def _remove(self, identifier: str) -> None:
        began_again = identifier in self._running
        if not began_again:
            self.files.remove_soon(identifier)
