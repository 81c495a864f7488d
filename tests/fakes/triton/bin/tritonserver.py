#!/usr/bin/env -S python3 -I -S
"""A stand-in for tritonserver, for tests of what starts, watches and stops it.

It starts in a few hundredths of a second, where Triton's models take seconds to import what they need. It
takes the options of ``cog_triton/server/command.py``, opens the ports, makes the shared memory, starts a
process for each model and writes the lines that Triton 2.51 writes. Over HTTP it answers requests of
``ensemble_ids`` with token ids that depend on nothing but their place. It has no gRPC: use TRANSPORT=http.

``tests/integration/test_process.py`` compares it with the real one. These variables make it misbehave:

    FAKE_TRITON_SLOW        a model that loads until the server is told to stop
    FAKE_TRITON_FAILS       MODEL: ERROR, for a model that fails to load
    FAKE_TRITON_DIES        a model whose process is killed while it loads
    FAKE_TRITON_GIVES_UP    a file: the server that finds it removes it, and waits for a process forever
    FAKE_TRITON_REFUSES     the error that is the answer to each request
    FAKE_TRITON_DEAF        1: ignore SIGTERM
    FAKE_TRITON_TOKEN_MS    the time for a token; 0 by default
"""

import base64
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

SHARED_MEMORY = Path("/dev/shm")
REGION_BYTES = 1 << 20
STUB = "triton_python_backend_stub"
# What the kernel keeps of a name.
NAME_CHARACTERS = 15
IMPORT_SECONDS = 2.0
INPUT_TOKENS = 3
# Of the demo model's tokenizer, over and over. They begin with "tsken tokenWhat".
TOKENS = range(300, 348)

stopping = threading.Event()


def main(arguments: list[str]) -> int:
    """Load the models, serve until a SIGTERM, and return the exit status."""
    options = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
    deaf = os.environ.get("FAKE_TRITON_DEAF") == "1"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: stopping.set())
    Path("/proc/self/comm").write_text("tritonserver")
    exit_seconds = int(options["exit-timeout-secs"])
    models = Models(Path(options["model-repository"]), options)
    if not models.load():
        log("I", "server.cc:305", '"Waiting for in-flight requests to complete."')
        models.unload(exit_seconds)
        say("error: creating server: Internal - failed to load all models")
        return 1
    server = Server(options)
    server.start()
    stopping.wait()
    say("Signal (15) received.")
    exit_seconds = server.drain(exit_seconds)
    log("I", "server.cc:305", '"Waiting for in-flight requests to complete."')
    models.unload(exit_seconds)
    return 0


# The log


def say(line: str) -> None:
    os.write(sys.stderr.fileno(), f"{line}\n".encode())


def log(level: str, place: str, text: str) -> None:
    now = time.time()
    when = time.strftime("%m%d %H:%M:%S", time.localtime(now))
    say(f"{level}{when}.{int(now % 1 * 1e6):06d} {os.getpid()} {place}] {text}")


# Models


class Models:
    """The models of a repository, each with a process unless it is an ensemble."""

    def __init__(self, repository: Path, options: dict[str, str]) -> None:
        names = sorted(directory.name for directory in repository.iterdir())
        self._files = {
            name: repository / name / "1" / "model.py"
            for name in names
            if (repository / name / "1" / "model.py").exists()
        }
        self._ensembles = [name for name in names if name not in self._files]
        self._stub = Path(options["backend-directory"]) / "python" / STUB
        self._prefix = options["backend-config"].rpartition("shm-region-prefix-name=")[2]
        # The process of each model, and a pipe whose end tells it to end.
        self._stubs: dict[str, tuple[int, int]] = {}

    def load(self) -> bool:
        """Load all models; return whether that went well."""
        for name in self._files:
            log("I", "model_lifecycle.cc:472", f'"loading: {name}:1"')
        for name in self._files:
            text = f'"TRITONBACKEND_ModelInstanceInitialize: {name}_0_0 (CPU device 0)"'
            log("I", "python_be.cc:2249", text)
            self._start_stub(name)
        self._give_up()
        if os.environ.get("FAKE_TRITON_DIES"):
            # As long as it would import. The guard has to learn the name of the model before.
            time.sleep(IMPORT_SECONDS)
            os.kill(self._stubs[os.environ["FAKE_TRITON_DIES"]][0], signal.SIGKILL)
            sleep_forever()
        failed, _, error = os.environ.get("FAKE_TRITON_FAILS", "").partition(": ")
        slow = os.environ.get("FAKE_TRITON_SLOW")
        for name in self._files:
            if name == slow:
                stopping.wait()
            if name != failed:
                log("I", "model_lifecycle.cc:839", f"\"successfully loaded '{name}'\"")
        if failed:
            self._fail(failed, error)
            return False
        for name in self._ensembles:
            log("I", "model_lifecycle.cc:472", f'"loading: {name}:1"')
        for name in self._ensembles:
            log("I", "model_lifecycle.cc:839", f"\"successfully loaded '{name}'\"")
        return True

    def _start_stub(self, name: str) -> None:
        region = f"{self._prefix}{os.urandom(16).hex()}"
        with (SHARED_MEMORY / region).open("xb") as file:
            file.truncate(REGION_BYTES)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(reader, sys.stdin.fileno())
            os.closerange(3, writer + 1)
            name_process(str(self._stub), str(self._files[name]), region, str(REGION_BYTES))
            # Until the server closes its end, or ends.
            os.read(sys.stdin.fileno(), 1)
            os._exit(0)
        os.close(reader)
        self._stubs[name] = (pid, writer)

    def _give_up(self) -> None:
        """Wait forever for a process that lives, as Triton does if one gets no processor for a second."""
        file = Path(os.environ.get("FAKE_TRITON_GIVES_UP", "/nonexistent"))
        if file.exists():
            file.unlink()
            pid, _ = self._stubs["postprocessing"]
            os.waitpid(pid, 0)
            sleep_forever()

    def _fail(self, name: str, error: str) -> None:
        """Say that a model failed to load."""
        trace = rf"{error}\n\nAt:\n  {self._files[name]}(1): initialize\n"
        text = f'"ERROR: Failed to create instance: {trace}"'
        log("E", "backend_model.cc:692", text)
        text = f"\"failed to load '{name}' version 1: Internal: {trace}\""
        log("E", "model_lifecycle.cc:642", text)
        log("I", "model_lifecycle.cc:777", f"\"failed to load '{name}'\"")
        for ensemble in self._ensembles:
            text = (
                f"\"Invalid argument: ensemble '{ensemble}' depends on '{name}' which has no loaded "
                f"version. Model '{name}' loading failed with error: version 1 is at UNAVAILABLE state: "
                f'Internal: {trace};"'
            )
            log("E", "model_repository_manager.cc:703", text)
        self._end_stub(name)

    def _end_stub(self, name: str) -> None:
        pid, writer = self._stubs.pop(name)
        os.close(writer)
        os.waitpid(pid, 0)

    def unload(self, exit_seconds: int) -> None:
        """End the models' processes."""
        found = f'"Timeout {exit_seconds}: Found'
        log("I", "server.cc:321", f'{found} 0 model versions that have in-flight inferences"')
        log("I", "server.cc:336", '"All models are stopped, unloading models"')
        log(
            "I",
            "server.cc:345",
            f'{found} {len(self._stubs)} live models and 0 in-flight non-inference requests"',
        )
        for name in list(self._stubs):
            self._end_stub(name)
            text = f"\"successfully unloaded '{name}' version 1\""
            log("I", "model_lifecycle.cc:624", text)
        text = f'{found} 0 live models and 0 in-flight non-inference requests"'
        log("I", "server.cc:345", text)


def name_process(*arguments: str) -> None:
    """Let /proc show other arguments of this process: nothing is executed, which would take its time.

    Raises:
        OSError: the kernel does not allow it.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"".join(argument.encode() + b"\0" for argument in arguments)
    assert len(text) <= end - begin, "the server's own arguments are longer"
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(text.ljust(end - begin, b"\0"))
    Path("/proc/self/comm").write_text(Path(arguments[0]).name[:NAME_CHARACTERS])


def sleep_forever() -> NoReturn:
    while True:
        signal.pause()


# Ports


class Server:
    """The three ports. HTTP has the health and generate_stream; the others accept connections."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._token_seconds = float(os.environ.get("FAKE_TRITON_TOKEN_MS", "0")) / 1000
        self._connections = 0
        self._lock = threading.Lock()
        # Ids of requests that are to stop.
        self._stopped: set[str] = set()

    def start(self) -> None:
        """Listen, and say so."""
        started = {}
        for name in ("grpc", "http", "metrics"):
            address = self._options[f"{name}-address"], int(self._options[f"{name}-port"])
            started[name] = socket.create_server(address, backlog=1024)
        threading.Thread(target=self._accept, args=[started["http"]], daemon=True).start()
        for name, place, text in (
            ("grpc", "grpc_server.cc:2558", "GRPCInferenceService"),
            ("http", "http_server.cc:4713", "HTTPService"),
            ("metrics", "http_server.cc:362", "Metrics Service"),
        ):
            host, port = started[name].getsockname()
            log("I", place, f'"Started {text} at {host}:{port}"')
        self._listeners = list(started.values())

    def drain(self, exit_seconds: int) -> int:
        """Wait for the connections to end, for a bounded time; return the rest of it."""
        while self._connections and exit_seconds > 0:
            text = f'"Timeout {exit_seconds}: Found {self._connections} HTTP service connections"'
            log("I", "http_server.cc:248", text)
            time.sleep(1)
            exit_seconds -= 1
        return exit_seconds

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of a connection."""
        with self._lock:
            self._connections += 1
        try:
            with connection, connection.makefile("rb") as requests:
                while line := requests.readline():
                    length = 0
                    while (header := requests.readline().strip().lower()) != b"":
                        if header.startswith(b"content-length:"):
                            length = int(header.partition(b":")[2])
                    self._answer(
                        line.split()[1].decode(), requests.read(length), connection.sendall
                    )
        except ConnectionError:
            pass
        finally:
            with self._lock:
                self._connections -= 1

    def _answer(self, path: str, body: bytes, send: Callable[[bytes], None]) -> None:
        if not path.endswith("/generate_stream"):
            status = "200 OK" if path == "/v2/health/ready" else "404 Not Found"
            send(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
            return
        request = json.loads(body)
        request_id = request.get("id")
        if request.get("stop"):
            self._stopped.add(request_id)
            send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return
        kind = "Content-Type: text/event-stream"
        send(f"HTTP/1.1 200 OK\r\n{kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        refusal = os.environ.get("FAKE_TRITON_REFUSES")
        if refusal:
            event = f"data: {json.dumps({'error': refusal})}\n\n".encode()
            send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
            return
        continued = len(base64.b64decode(request.get("continued_ids", ""))) // 4
        has_client = True
        for place in range(continued, continued + request["max_tokens"]):
            if request_id in self._stopped:
                break
            time.sleep(self._token_seconds)
            outputs = {
                "output_ids": TOKENS[place % len(TOKENS)],
                "sequence_length": 1,
                "num_input_tokens": INPUT_TOKENS + continued,
                "num_output_tokens": place + 1,
            }
            event = f"data: {json.dumps(outputs, separators=(',', ':'))}\n\n".encode()
            try:
                if has_client:
                    send(b"%x\r\n%s\r\n" % (len(event), event))
            except ConnectionError:
                # The request runs on, and its connection is counted, as Triton may count it.
                has_client = False
        send(b"0\r\n\r\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
