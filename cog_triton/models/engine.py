"""The tensorrt_llm model with an embedded engine: tensors in, one call per sequence, tensors out."""

import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from cog_triton.engines.base import create_engine
from cog_triton.engines.serving import Output, Serving
from cog_triton.errors import InvalidParameter
from cog_triton.models import stub
from cog_triton.models.stub import Array, Client, Inputs, flag
from cog_triton.models.tensors import (
    STOP_WORDS_TEXT,
    frames_tensor,
    generation_requests,
    placeholders,
    response_tensors,
    stop_words_in_text,
)
from cog_triton.protocol.frames import FrameAddress
from cog_triton.protocol.names import ENGINE, FRAMES, FRAMES_FOR
from cog_triton.text.end_tokens import declared_end_ids
from cog_triton.text.stop_words import StopWordSearch
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

# Asking Triton is a round trip: per token it halves the throughput. So is the change of a metric.
CANCELLATION_CHECK_SECONDS = 1.0
METRICS_SECONDS = 0.05
ENGINE_DIED = 70  # exit status
# The sender waits a GIL switch interval per response: by default 5 ms, for 200 responses a second in all.
SWITCH_SECONDS = 1e-4


class Peers:
    """The instances of the model, processes that share an engine; each tells the others what to stop."""

    def __init__(self, args: Mapping[str, str], config: Mapping[str, Any]) -> None:
        self._index = int(args["model_instance_name"].rpartition("_")[2])
        self._count = config["instance_group"][0]["count"]
        self.parameters: dict[str, str] = {}  # for the engine, if it is shared
        if self._count > 1:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            # As the stub's shared memory, whose name ends with a UUID: what has the path goes with that.
            region = Path("/proc/self/cmdline").read_bytes().split(b"\0")[2].decode()
            self._path = f"/dev/shm/{region[:-36]}{os.getppid()}_"
            self._socket.bind(self._address(self._index))
            self.parameters["shared"] = f"{self._index} {self._count} {self._path}"

    def listen(self, model: Any) -> None:
        """Stop each request that another is told to stop; end this process when another has failed."""
        while True:
            request_id = self._socket.recv(1 << 16).decode(errors="replace")
            if not request_id:
                os._exit(0)  # an orderly end would wait for the other's engine
            _stop_in(model, request_id)

    def stop(self, request_id: str) -> None:
        for index in set(range(self._count)) - {self._index}:
            with suppress(OSError):  # it has ended
                self._socket.sendto(request_id.encode(), self._address(index))

    def _address(self, index: int) -> str:
        return f"\0{self._path}stop{index}"  # without a file


def _stop_in(model: Any, request_id: str) -> None:
    # Looked up each time: a thread that held it would keep requests beyond finalize. There is none while
    # the engine loads, and after finalize.
    serving: Serving | None = getattr(model, "_serving", None)
    if serving is None:
        return
    try:
        serving.stop(request_id)
    except Exception:  # the next request may well be stopped
        logger.exception("request %s could not be stopped", request_id)


class TextStops:
    """Makes the searches for stop words in the texts of outputs.

    They take the tokenizer, which the first request that has stop words loads.
    """

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._parameters = parameters
        self._tokenizer: Tokenizer | None = None
        self.loaded = False

    def load(self) -> None:
        """Load the tokenizer, or log that words are found by their token ids alone."""
        if self.loaded:
            return
        name = self._parameters.get("tokenizer_dir") or self._parameters.get("model", "")
        try:
            if "torch" in sys.modules:  # an engine runs on it
                trusted = self._parameters.get("trust_remote_code") == "true"
                self._tokenizer = load_tokenizer(name, trust_remote_code=trusted)
            else:
                self._tokenizer = stub.tokenizer({**self._parameters, "tokenizer_dir": name})
        except Exception as error:
            logger.warning("stop words are matched by their token ids only: %s", error)
        self.loaded = True

    def searches(self, inputs: Inputs) -> list[StopWordSearch | None]:
        """Return the search for each sequence of a batch; None for one without words."""
        tokenizer = self._tokenizer
        return [
            None if tokenizer is None or not any(words) else StopWordSearch(tokenizer, words)
            for words in stop_words_in_text(inputs)
        ]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config, parameters = stub.begin(args)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        self._placeholders = placeholders(config)
        self._end_ids = engine_end_ids(parameters)
        self._text_stops = TextStops(parameters)
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._prompt_in_output = parameters.get("exclude_input_in_output") == "false"
        self._peers = Peers(args, config)
        if self._peers.parameters:
            threading.Thread(target=self._peers.listen, args=[self], daemon=True).start()
        try:
            engine = create_engine({**parameters, **self._peers.parameters})
        except Exception as error:
            # Triton may say of this one only that the others ended.
            reason = f"{type(error).__name__}: {error}"
            print(f"failed to load '{ENGINE}' version 1: {reason}", flush=True)
            self._peers.stop("")
            raise
        # A dead engine ends the stub, and by its guard the server, which is started again.
        engine.on_death = lambda: os._exit(ENGINE_DIED)
        self._serving = Serving(engine, int(parameters.get("max_tokens_per_response", 0)))
        self._closed = threading.Event()
        self._metrics = threading.Thread(target=self._report, name="engine-metrics", daemon=True)
        self._metrics.start()
        # What the engine brought stays: a full collection would go through all of it, 0.2 s with torch.
        gc.collect()
        gc.freeze()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            client = Client(request)
            try:
                self._start(request, client)
            except Exception as error:
                client.fail(ENGINE, error)

    def finalize(self) -> None:
        self._closed.set()
        self._metrics.join()
        self._loading.shutdown()
        self._serving.close()
        del self._serving
        stub.forget_requests()

    def _start(self, request: Any, client: Client) -> None:
        inputs, names, request_id, parameters = stub.received(request)
        if flag(inputs, "stop"):
            self._stop(request_id, client)
            return
        if STOP_WORDS_TEXT in inputs and not self._text_stops.loaded:
            load = partial(self._load_and_generate, client, inputs, names, request_id, parameters)
            self._loading.submit(load)
        else:
            self._generate(client, inputs, names, request_id, parameters)

    def _load_and_generate(self, client: Client, *request: Any) -> None:
        try:
            self._text_stops.load()
            self._generate(client, *request)
        except Exception as error:
            client.fail(ENGINE, error)

    def _generate(
        self,
        client: Client,
        inputs: dict[str, Array],
        names: frozenset[str],
        request_id: str,
        parameters: dict[str, Any],
    ) -> None:
        features = self._serving.engine.features
        generations = generation_requests(inputs, parameters, features, self._end_ids)
        streaming = flag(inputs, "streaming")
        if not self._decoupled and (streaming or len(generations) > 1):
            what = "streaming" if streaming else "a batch of prompts"
            raise InvalidParameter(f"{what} needs decoupled_mode true in the {ENGINE} model")
        prompt_in_output = self._prompt_in_output
        if "exclude_input_in_output" in inputs:
            prompt_in_output = not flag(inputs, "exclude_input_in_output")
        address = None
        if FRAMES in names and FRAMES_FOR in parameters:
            address = FrameAddress.parse(parameters[FRAMES_FOR])
            if len(generations) > 1:
                raise InvalidParameter(f"{FRAMES_FOR} does not support a batch of prompts")
            prompt_in_output = False  # a frame's ids are the output's
        responses = Responses(
            client,
            inputs,
            names,
            unfinished=len(generations),
            as_frames=address is not None,
            top=generations[0].top_log_probs,
            placeholders=self._placeholders,
        )
        try:
            searches = self._text_stops.searches(inputs)
            for index, (generation, search) in enumerate(zip(generations, searches, strict=True)):
                send = partial(responses.send, index)
                stop = self._serving.start(
                    request_id,
                    generation,
                    send,
                    streaming=streaming,
                    prompt_in_output=prompt_in_output,
                    address=address,
                    search=search,
                )
                responses.stops.append(stop)
        except Exception:
            responses.abandoned = True  # the error is the only response to the whole batch
            responses.stop()
            raise

    def _stop(self, request_id: str, client: Client) -> None:
        if not request_id:
            raise InvalidParameter("a stop request needs the id of the request to stop")
        self._serving.stop(request_id)
        self._peers.stop(request_id)
        # Without decoupling, Triton wants a response even where there is nothing to say.
        client.send(*([] if self._decoupled else [stub.response({}, ())]), last=True)

    def _report(self) -> None:
        # On Triton's metrics endpoint. All of it is dropped as this returns, while the stub still has its
        # shared memory: a metric that it drops later ends it by a segfault.
        family, name = stub.pb_utils.MetricFamily, "cog_triton_engine_"
        tokens = family(f"{name}tokens", "Tokens generated and tokens sent", family.COUNTER)
        requests = family(f"{name}requests", "Finished requests, by outcome", family.COUNTER)
        active = family(f"{name}active_requests", "Running and waiting requests", family.GAUGE)
        metrics = {"active": active.Metric(labels={})}
        for kind in ("generated", "served"):
            metrics[kind] = tokens.Metric(labels={"kind": kind})
        for outcome in ("finished", "stopped", "failed"):
            metrics[outcome] = requests.Metric(labels={"outcome": outcome})
        before = dict.fromkeys(metrics, 0)
        while not self._closed.wait(METRICS_SECONDS):
            # What is active first: where it is 0, the counts are complete.
            now = {"active": len(self._serving.engine.running), **self._serving.counters}
            for name, metric in metrics.items():
                try:
                    if now[name] != before[name]:
                        metric.increment(now[name] - before[name])
                        before[name] = now[name]
                except Exception:  # the difference is in the next report
                    logger.exception("the metric %s could not be reported", name)


def engine_end_ids(parameters: Mapping[str, str]) -> frozenset[int]:
    """Return the end tokens of the model that the configuration names, the tokenizer's apart."""
    configured = stub.end_ids(parameters)
    if configured:
        return frozenset(configured)
    directories = (parameters.get(name) for name in ("model", "tokenizer_dir"))
    found = [declared_end_ids(Path(directory)) for directory in directories if directory]
    return frozenset(chain.from_iterable(found))


@dataclass(eq=False)
class Responses:
    """The responses of one request, which may be a batch of several sequences."""

    client: Client
    inputs: dict[str, Array]
    names: frozenset[str]
    unfinished: int  # sequences
    as_frames: bool = False
    top: int = 0  # alternatives to each log probability, in TensorRT-LLM's tensors
    placeholders: dict[str, Array] = field(default_factory=dict)
    stops: list[Callable[[], object]] = field(default_factory=list)
    abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    checked: float = field(default_factory=time.monotonic)

    def stop(self) -> None:
        for stop in self.stops:
            stop()

    def _tensors(self, index: int, output: Output, others: Sequence[Output]) -> dict[str, Array]:
        if self.as_frames:
            return frames_tensor([output, *others])
        tensors = response_tensors(index, output, inputs=self.inputs, top=self.top)
        return {**tensors, **self.placeholders}

    def send(self, index: int, output: Output, *others: Output) -> None:
        """Send an output of the sequence at a place in the batch, and those of other requests."""
        if self.abandoned:
            return
        if output.error is not None:
            response = stub.failure(ENGINE, output.error)
        else:
            response = stub.response(self._tensors(index, output, others), self.names)
        with self.lock:  # the last response must not overtake another sequence's
            unfinished = self.unfinished - output.finished
            if not unfinished:
                # Each of ``stops`` leads back here: what Triton gave would stay until that is collected.
                self.inputs = {}
            self.client.send(response, last=not unfinished)
            self.unfinished = unfinished  # unless that failed: then an error follows
        # For clients of this model itself: Triton hands no cancellation down from an ensemble.
        now = time.monotonic()
        if now - self.checked > CANCELLATION_CHECK_SECONDS:
            self.checked = now
            if self.client.gone():
                self.stop()
