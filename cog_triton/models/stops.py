"""Stops of requests, passed between the processes of one tritonserver.

A stop is a request to one instance of the model tensorrt_llm. The request to stop may run in another
instance, or may still wait in the model preprocessing. Each of these processes listens on a Unix socket
whose address has no file and contains the server's process id, so that nothing is left behind.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

# Python's uuid4 as text, which ends the name of a stub's shared memory.
_UUID_CHARACTERS = 36
_LONGEST_ID = 1 << 16


class StopSocket:
    """The socket of one instance of a model, which receives the ids of requests to stop."""

    def __init__(self, model: str, index: int) -> None:
        """Listen as an instance of a model, or raise OSError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(model, index))

    def receive(self) -> str:
        return self._socket.recv(_LONGEST_ID).decode(errors="replace")

    def send(self, model: str, index: int, request_id: str) -> bool:
        """Send an id to an instance; return whether there is one."""
        try:
            self._socket.sendto(request_id.encode(), _address(model, index))
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def tell_all(model: str, request_id: str) -> None:
    """Have all instances of a model stop a request; nothing happens if none of them listens."""
    message = request_id.encode()
    index = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        while True:
            try:
                sender.sendto(message, _address(model, index))
            except BlockingIOError:
                # Its queue is full. The client sends the stop again.
                pass
            except (OSError, IndexError):
                return
            index += 1


class StopListener:
    """Calls ``stop`` with each id that an instance of a model receives, on a thread of its own.

    Without a socket, the instance goes on, and its requests are only stopped later, by the engine.
    """

    def __init__(self, model: str, args: Mapping[str, str], stop: Callable[[str], object]) -> None:
        """Listen as the instance that ``initialize`` got its arguments for."""
        self._model = model
        self._stop = stop
        self._thread: threading.Thread | None = None
        try:
            self._index = instance_index(args)
            self._socket = StopSocket(model, self._index)
        except (OSError, LookupError, ValueError) as error:
            logger.warning("requests that wait in %s cannot be stopped: %s", model, error)
            return
        self._thread = threading.Thread(target=self._run, name="stops", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            # An empty message ends the thread.
            self._socket.send(self._model, self._index, "")
            self._thread.join()
            self._socket.close()

    def _run(self) -> None:
        while True:
            request_id = self._socket.receive()
            if not request_id:
                return
            try:
                self._stop(request_id)
            except Exception:
                logger.exception("request %s could not be stopped", request_id)


def instance_index(args: Mapping[str, str]) -> int:
    """Return the number of an instance among those of its model, from the arguments of ``initialize``."""
    return int(args["model_instance_name"].rpartition("_")[2])


@lru_cache
def server_path() -> str:
    """Return the beginning of paths in /dev/shm that belong to this tritonserver.

    It is that of the stub's shared memory, whose name ends with a UUID. The files with this beginning are
    removed with the shared memory.
    """
    # The second argument of the stub, after the path of the model.
    region = Path("/proc/self/cmdline").read_bytes().split(b"\0")[2].decode()
    return f"/dev/shm/{region[:-_UUID_CHARACTERS]}{os.getppid()}_"


def _address(model: str, index: int) -> str:
    # With a null byte in front, an address is not a file.
    return f"\0{server_path()}{model}{index}"
