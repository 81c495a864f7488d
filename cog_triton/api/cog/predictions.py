"""The requests that begin or cancel predictions, those that run, and messages about them.

The front is in the process of Cog's server, the predictor in its worker, which inherits one of a pair of
sockets. Signals would not do: the worker's main thread, where Python handles them, never leaves coglet.

To the predictor: ``drain`` (take no new requests that do not pass the front), ``stop`` (fail what runs),
``cancel ID``, ``forget ID`` (that prediction has ended: a cancel of it is not for the next with this id).
From it: ``hello INPUTS`` (it listens, and takes these inputs), ``busy`` and ``idle`` (it answers requests
that did not pass the front, or none), ``ended ID``, ``texts`` (of several predictions: the id, the number
of characters before, and the text).
"""

import asyncio
import contextlib
import fcntl
import fnmatch
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import orjson
from pydantic_core import Url

from cog_triton.api.cog.private_directory import PrivateDirectory, UnsafeDirectory
from cog_triton.errors import PromptTooLong
from cog_triton.request.limits import TextLimits
from cog_triton.server.guard import hold, process_name
from cog_triton.web import Refusal
from cog_triton.web.bodies import LARGE_BYTES, BadBody, parse_json

VARIABLE = "COG_TRITON_CONTROL"
# Where coglet 0.23 makes a directory for each prediction, whatever TMPDIR is, and removes none. It follows
# links, so the directory of a prediction is made and checked here before coglet knows of the prediction.
DIRECTORY = Path("/tmp/coglet/predictions")
REMOVE_SECONDS = 5.0  # after the end
WEBHOOK_SECONDS = 3.0  # after the end, in which coglet calls a webhook, again where that fails
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}", re.ASCII)
_LARGEST = 1 << 16  # bytes of a message
_URL_CHARACTERS = 2048
_NOT_IN_URLS = re.compile(r"[\x00-\x20\x7f]")
WEBHOOK_EVENTS = ("start", "output", "logs", "completed")
# What Cog's server needs of a large body. It sends its worker the field ``context`` too: one of 8 MB fails
# there and takes a slot of predictions for good.
_PASSED_FIELDS = ("id", "input", "webhook", "webhook_events_filter")
# Of all inputs together, beyond what the prompt and the system prompt may have: a chat as JSON, a guide.
_OTHER_CHARACTERS = 2**20
Show = Callable[[int, str], None]  # takes a text, and the number of characters before it


class Passage(NamedTuple):
    """A request as Cog's server gets it, with the id of the prediction that it starts or cancels."""

    method: str
    target: str
    body: bytes = b""
    starts: str | None = None
    cancels: str | None = None
    hooked: bool = False  # a webhook is called at its end


@dataclass(frozen=True)
class Inputs:
    """The inputs of the predictor, as it describes them in its message ``hello``."""

    needed: Sequence[str] = ()  # of which a prediction has to have one
    names: Sequence[str] = ()  # all of them; empty if that is not known
    limits: TextLimits | None = None  # of the prompt; None if that is not known

    def checked(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a large request that the predictor takes, or raise Refusal.

        The predictor refuses too long texts as well, but Cog's server would parse them before, on the one
        thread that answers everybody.
        """
        if self.names:
            values = {name: value for name, value in values.items() if name in self.names}
        for name, value in values.items():
            if isinstance(value, dict | list):
                text = "must be a string, a number or a boolean"
                raise invalid(["body", "input", name], text, "type_error")
        if self.limits is not None:
            _check_lengths(values, self.limits)
        return values


def _check_lengths(values: dict[str, Any], limits: TextLimits) -> None:
    lengths = {name: len(value) for name, value in values.items() if isinstance(value, str)}
    total = sum(lengths.values())
    limit = 2 * limits.characters + _OTHER_CHARACTERS
    name = "prompt"
    try:
        limits.check("the prompt", lengths.get("prompt", 0))
        name = "system_prompt"
        limits.check("the system prompt", lengths.get("system_prompt", 0))
        name = max(lengths, key=lengths.__getitem__, default="prompt")
        if total > limit:
            raise PromptTooLong(f"the inputs have {total} characters; the limit is {limit}")
    except PromptTooLong as error:
        raise invalid(["body", "input", name], str(error), "value_error") from None


def fields_of(body: bytes) -> dict[str, Any]:
    """Parse a prediction's body; one that is not an object is left to Cog's server."""
    try:
        fields = parse_json(body or b"{}")
    except BadBody as error:
        raise Refusal(400, f"the body {error}") from None
    return fields if isinstance(fields, dict) else {}


def invalid(place: list[str], text: str, kind: str) -> Refusal:
    return Refusal(422, [{"loc": place, "msg": text, "type": kind}])


def _check_identifier(identifier: str, place: list[str]) -> None:
    if not _IDENTIFIER.fullmatch(identifier):  # it could not name a directory of its own
        rule = "must be 1 to 128 letters, digits, '_', '-' and '.', and must not start with '.'"
        raise invalid(place, rule, "value_error")


def _check_webhook(fields: dict[str, Any]) -> None:
    """Refuse a webhook that cannot be called, or a list of events that Cog's server does not know."""
    address = fields.get("webhook")
    if address is not None and not _is_http_url(address):
        raise invalid(["body", "webhook"], "must be an http or https URL", "value_error.url")
    events = fields.get("webhook_events_filter")
    if events is None:
        return
    if not isinstance(events, list) or any(event not in WEBHOOK_EVENTS for event in events):
        text = f"must be a list of {', '.join(WEBHOOK_EVENTS)}"
        raise invalid(["body", "webhook_events_filter"], text, "value_error")


def _is_http_url(address: Any) -> bool:
    """Return whether Cog's server can call an address; it would try a malformed one for minutes."""
    if not isinstance(address, str) or len(address) > _URL_CHARACTERS:
        return False
    if _NOT_IN_URLS.search(address):  # which parsers drop, each in its way
        return False
    try:
        parts = urlsplit(address)
        Url(address)  # the parser of Cog's server, which refuses more names of hosts
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def send_message(end: socket.socket, *words: Any, wait: bool = False) -> None:
    """Send a message from any thread; it is lost if the other end is closed, or full and not waited for."""
    message = orjson.dumps(words)
    if len(message) <= _LARGEST:
        with contextlib.suppress(OSError):
            end.send(message, 0 if wait else socket.MSG_DONTWAIT)


def read_messages(end: socket.socket, handle: Callable[..., object]) -> None:
    """Call ``handle`` with the words of each message, on the running event loop."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        with contextlib.suppress(OSError):
            while True:
                message = end.recv(_LARGEST, socket.MSG_DONTWAIT)
                if not message:  # the other end is closed
                    loop.remove_reader(end)
                    return
                handle(*orjson.loads(message))

    loop.add_reader(end, read)


@dataclass
class Running:
    """A prediction that has not ended."""

    # Tasks that relay responses: none while it is asynchronous, several if several requests name its id.
    relays: set[asyncio.Task[Any] | None] = field(default_factory=set)
    show: Show | None = None  # of the request that began it
    in_predictor: bool = True
    cancelled: bool = False  # the predictor has got the message
    hooked: bool = False  # a webhook is called at its end


class Predictions:
    """The predictions that began here, by id. To be made before Cog's server starts its worker.

    Each is marked with a locked file's name, by which the next server finds what a killed one left.
    """

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self.listening = False  # the predictor, to messages
        self.draining = False  # new predictions are refused
        self.inputs = Inputs()
        self.progress = time.monotonic()  # when a prediction last began, sent something or ended
        self._running: dict[str, Running] = {}
        self._webhooks_until = 0.0
        self._others_run = False  # requests that did not pass the front
        self._directory = PrivateDirectory(directory)
        self._mark = f"cog_triton_{process_name(os.getpid())}.{id(self)}.lock"
        # If there is no room, Cog's server cannot write there either, and says so.
        with contextlib.suppress(OSError, UnsafeDirectory), self._directory.opened() as opened:
            hold(_path(opened.parent) / self._mark)
        self._remover = ThreadPoolExecutor(1, "remove", os.nice, (19,))  # one may take 1 ms
        self._remover.submit(self._remove_abandoned)
        self._end, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(workers.fileno(), True)
        os.environ[VARIABLE] = str(workers.detach())
        self.send = partial(send_message, self._end)

    def listen(self) -> None:
        """Handle the predictor's messages, on the running event loop."""
        read_messages(self._end, self.receive)

    def receive(self, kind: str, *words: Any) -> None:
        if kind == "hello":
            self.listening = True
            self.inputs = _inputs_of(words[0])
        elif kind == "ended":
            self._settle(words[0])
        elif kind == "texts":
            for identifier, before, text in words:
                running = self._running.get(identifier)
                if running is not None and running.show is not None:
                    running.show(before, text)
        else:
            self._others_run = kind == "busy"

    def refuse_while_draining(self) -> None:
        if self.draining:
            raise Refusal(503, "the server is stopping and takes no new predictions", retry_after=5)

    def check(self, method: str, target: str, body: bytes) -> Passage:
        """Return a request as it may pass, or raise Refusal. It may be called in a thread.

        A prediction without an id gets one here, by which its end and its directory are known. Inputs that
        are null are left out: Cog's server refuses null for an optional input. What begins no prediction
        has no use for a body, which Cog's server may leave unread.
        """
        passage = Passage(method, target)
        path = target.partition("?")[0]
        collection, *rest = [unquote(part) for part in path.split("/")[1:]]
        if collection not in ("predictions", "trainings"):
            return passage
        predicts = collection == "predictions"
        if rest:
            _check_identifier(rest[0], ["path", "prediction_id"])
        if predicts and method == "POST" and rest[1:] == ["cancel"]:
            return passage._replace(cancels=rest[0])
        if len(rest) > 1 or method != ("PUT" if rest else "POST"):
            return passage
        self.refuse_while_draining()
        fields = fields_of(body)
        _check_webhook(fields)
        starts = rest[0] if rest else fields.get("id")
        if not isinstance(starts, str):
            starts = uuid.uuid4().hex
            query = target[len(path) :]
            method = "PUT"
            target = f"/{collection}/{starts}{query}"
        elif not rest:
            _check_identifier(starts, ["body", "id"])
        body = self._passed_body(fields, body, predicts=predicts)
        return Passage(method, target, body, starts=starts, hooked=bool(fields.get("webhook")))

    def _passed_body(self, fields: dict[str, Any], body: bytes, *, predicts: bool) -> bytes:
        """Return the body that Cog's server gets: of a large one, only what it needs."""
        is_large = len(body) >= LARGE_BYTES
        passed = fields
        if is_large:
            passed = {name: fields[name] for name in _PASSED_FIELDS if name in fields}
        if predicts:
            passed = self._with_passed_inputs(passed, is_large=is_large)
        return body if passed is fields else orjson.dumps(passed)

    def _with_passed_inputs(self, fields: dict[str, Any], *, is_large: bool) -> dict[str, Any]:
        inputs = fields.get("input")
        inputs = inputs if isinstance(inputs, dict) else {}
        left = {name: value for name, value in inputs.items() if value is not None}
        needed = self.inputs.needed
        if needed and left.keys().isdisjoint(needed):
            text = f"E1001 PromptRequired: {' or '.join(needed)} is required"
            raise invalid(["body", "input", needed[0]], text, "value_error.missing")
        if is_large:
            left = self.inputs.checked(left)
        return {**fields, "input": left} if len(left) < len(inputs) else fields

    def directory_problem(self) -> str:
        """Return why no prediction may be given a directory; empty if it may."""
        return self._directory.problem()

    def begin(self, identifier: str, show: Show | None = None, *, hooked: bool = False) -> str:
        """Note a prediction whose response the current task relays, until ``end``.

        Return why Cog's server may not make files for it; empty if it may.
        """
        running = self._running.setdefault(identifier, Running(show=show))
        running.relays.add(asyncio.current_task())
        running.in_predictor = True
        running.hooked = running.hooked or hooked
        self.progress = time.monotonic()
        try:
            self._directory.make(identifier, self._mark)
        except UnsafeDirectory as error:
            return str(error)
        except OSError:  # the disk is full: Cog's server says so
            pass
        return ""

    def end(self, identifier: str, status: int) -> None:
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
        relays = [task for running in self._running.values() for task in running.relays]
        for task in relays:
            if task is not None:
                task.cancel()

    def left(self) -> str:
        """Return what still runs, in words; empty for nothing."""
        count = sum(map(self.runs, self._running))
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
        if running.hooked:
            self._webhooks_until = time.monotonic() + WEBHOOK_SECONDS
        if running.cancelled:
            self.send("forget", identifier)
        asyncio.get_running_loop().call_later(REMOVE_SECONDS, self._remove, identifier)

    def _remove(self, identifier: str) -> None:
        if identifier not in self._running:  # nor begun again
            self._remover.submit(self._directory.remove, identifier)

    def _remove_abandoned(self) -> None:
        """Remove what servers left that have been killed: nobody holds their locks."""
        with contextlib.suppress(OSError, UnsafeDirectory), self._directory.opened() as opened:
            for name in fnmatch.filter(os.listdir(opened.parent), "cog_triton_*.lock"):
                with contextlib.suppress(OSError), _locked(name, opened.parent):
                    self._directory.remove_marked(name)
                    os.unlink(name, dir_fd=opened.parent)

    def remove_all(self) -> None:
        """Remove the directories of this server, and its lock."""
        self._directory.remove_marked(self._mark)
        with contextlib.suppress(OSError, UnsafeDirectory), self._directory.opened() as opened:
            os.unlink(self._mark, dir_fd=opened.parent)


def _inputs_of(message: dict[str, Any]) -> Inputs:
    """Return the inputs that a message ``hello`` describes."""
    limits = message["limits"]
    return Inputs(
        needed=message["needed"],
        names=message["names"],
        limits=None if limits is None else TextLimits(**limits),
    )


def _path(descriptor: int) -> Path:
    """Return a path that leads to an open directory, whatever has become of its name."""
    return Path(f"/proc/self/fd/{descriptor}")


@contextlib.contextmanager
def _locked(name: str, directory: int) -> Iterator[None]:
    """Lock a file of this user while nobody else holds it, or raise OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(name, flags, dir_fd=directory)
    try:
        if os.fstat(file).st_uid != os.geteuid():
            raise PermissionError(name)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
