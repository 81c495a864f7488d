"""The tensorrt_llm model with an embedded engine: tensors in, one call per sequence, tensors out."""

import gc
import logging
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from cog_triton.engines.base import create_engine
from cog_triton.engines.serving import Serving
from cog_triton.errors import InvalidParameter
from cog_triton.models import stub
from cog_triton.models.engine_metrics import EngineMetrics
from cog_triton.models.responses import Responses
from cog_triton.models.stops import StopSocket, instance_index, server_path, tell_all
from cog_triton.models.stub import Client, Inputs, ReceivedRequest, flag
from cog_triton.models.tensors import (
    STOP_WORDS_TEXT,
    generation_requests,
    placeholders,
    stop_words_in_text,
)
from cog_triton.protocol.frames import FrameAddress
from cog_triton.protocol.names import ENGINE, FRAMES, FRAMES_FOR, PREPROCESSING
from cog_triton.text.end_tokens import declared_end_ids
from cog_triton.text.stop_words import StopWordSearch
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

# The exit status of a process whose engine has died.
ENGINE_DIED = 70
# A response takes a switch of Python's lock: with the default of 5 ms, 200 responses a second in all.
SWITCH_SECONDS = 1e-4


class Peers:
    """The other instances of the model, in processes of their own. All share one engine.

    Attributes:
        parameters: parameters for the engine; empty if there are no other instances.
    """

    def __init__(self, args: Mapping[str, str], config: Mapping[str, Any]) -> None:
        self._index = instance_index(args)
        self._count = config["instance_group"][0]["count"]
        self.parameters: dict[str, str] = {}
        if self._count > 1:
            self._socket = StopSocket(ENGINE, self._index)
            self.parameters["shared"] = f"{self._index} {self._count} {server_path()}"

    def listen(self, model: Any) -> None:
        """Stop each request that another instance is asked to stop; end when another has failed."""
        while True:
            request_id = self._socket.receive()
            if not request_id:
                # An orderly end would wait for the engine of the instance that failed.
                os._exit(0)
            _stop_in(model, request_id)

    def stop(self, request_id: str) -> None:
        """Have the others stop a request."""
        self._send(request_id)

    def fail(self) -> None:
        """Have the others end."""
        self._send("")

    def _send(self, message: str) -> None:
        for index in range(self._count):
            if index != self._index:
                self._socket.send(ENGINE, index, message)


def _stop_in(model: Any, request_id: str) -> None:
    """Stop a request in a model's engine, if that is loaded."""
    # Looked up each time: a thread that held it would keep requests beyond ``finalize``. It does not exist
    # while the engine loads, nor after ``finalize``.
    serving: Serving | None = getattr(model, "_serving", None)
    if serving is None:
        return
    try:
        serving.stop(request_id)
    except Exception:
        # The next request may well be stopped.
        logger.exception("request %s could not be stopped", request_id)


class TextStops:
    """Creates the searches for stop words in the texts of outputs.

    They need the tokenizer, which the first request that has stop words loads.
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
            # Without torch, the tokenizer loads faster; an engine that has it needs it.
            if "torch" in sys.modules:
                trusted = self._parameters.get("trust_remote_code") == "true"
                self._tokenizer = load_tokenizer(name, trust_remote_code=trusted)
            else:
                self._tokenizer = stub.tokenizer({**self._parameters, "tokenizer_dir": name})
        except Exception as error:
            logger.warning("stop words are matched by their token ids only: %s", error)
        self.loaded = True

    def searches(self, inputs: Inputs) -> list[StopWordSearch | None]:
        """Return the search for each sequence of a batch; None for one without words."""
        return [self._search(words) for words in stop_words_in_text(inputs)]

    def _search(self, words: list[str]) -> StopWordSearch | None:
        if self._tokenizer is None or not any(words):
            return None
        return StopWordSearch(self._tokenizer, words)


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
            # Triton may report only that the other instances ended.
            reason = f"{type(error).__name__}: {error}"
            print(f"failed to load '{ENGINE}' version 1: {reason}", flush=True)
            self._peers.fail()
            raise
        # A dead engine ends the stub, and by its guard the server, which is started again.
        engine.on_death = lambda: os._exit(ENGINE_DIED)
        self._serving = Serving(engine, int(parameters.get("max_tokens_per_response", 0)))
        self._metrics = EngineMetrics(self._serving)
        # The engine's objects stay: a full collection would visit all of them, 0.2 s with torch.
        gc.collect()
        gc.freeze()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            client = Client(request)
            try:
                self._start(stub.received(request), client)
            except Exception as error:
                client.fail(ENGINE, error)

    def finalize(self) -> None:
        self._metrics.close()
        del self._metrics
        self._loading.shutdown()
        self._serving.close()
        del self._serving
        stub.forget_requests()

    def _start(self, request: ReceivedRequest, client: Client) -> None:
        if flag(request.inputs, "stop"):
            self._stop(request.request_id, client)
        elif STOP_WORDS_TEXT in request.inputs and not self._text_stops.loaded:
            self._loading.submit(self._load_and_generate, client, request)
        else:
            self._generate(client, request)

    def _load_and_generate(self, client: Client, request: ReceivedRequest) -> None:
        try:
            self._text_stops.load()
            self._generate(client, request)
        except Exception as error:
            # Nothing reads what a pool's thread raises.
            client.fail(ENGINE, error)

    def _generate(self, client: Client, request: ReceivedRequest) -> None:
        """Start the sequences of a request, or raise InvalidParameter or EngineError."""
        inputs = request.inputs
        features = self._serving.engine.features
        generations = generation_requests(inputs, request.parameters, features, self._end_ids)
        streaming = flag(inputs, "streaming")
        if not self._decoupled and (streaming or len(generations) > 1):
            what = "streaming" if streaming else "a batch of prompts"
            raise InvalidParameter(f"{what} needs decoupled_mode true in the {ENGINE} model")
        address = _frame_address(request)
        if address is not None and len(generations) > 1:
            raise InvalidParameter(f"{FRAMES_FOR} does not support a batch of prompts")
        responses = Responses(
            client,
            inputs,
            request.names,
            unfinished=len(generations),
            as_frames=address is not None,
            top=generations[0].top_log_probs,
            placeholders=self._placeholders,
        )
        # The ids of a frame are those of the output.
        prompt_in_output = address is None and self._has_prompt_in_output(inputs)
        try:
            searches = self._text_stops.searches(inputs)
            for index, (generation, search) in enumerate(zip(generations, searches, strict=True)):
                stop = self._serving.start(
                    request.request_id,
                    generation,
                    partial(responses.send, index),
                    streaming=streaming,
                    prompt_in_output=prompt_in_output,
                    address=address,
                    search=search,
                )
                responses.stops.append(stop)
        except Exception:
            # The error is the only response to the whole batch.
            responses.abandon()
            raise

    def _has_prompt_in_output(self, inputs: Inputs) -> bool:
        if "exclude_input_in_output" in inputs:
            return not flag(inputs, "exclude_input_in_output")
        return self._prompt_in_output

    def _stop(self, request_id: str, client: Client) -> None:
        """Stop a request wherever it is: in this instance, in another, or still in preprocessing."""
        if not request_id:
            raise InvalidParameter("a stop request needs the id of the request to stop")
        self._serving.stop(request_id)
        self._peers.stop(request_id)
        tell_all(PREPROCESSING, request_id)
        if self._decoupled:
            client.send(last=True)
        else:
            # Without decoupling, Triton wants a response even if it is empty.
            client.send(stub.response({}, ()), last=True)


def _frame_address(request: ReceivedRequest) -> FrameAddress | None:
    """Return where a request wants its frames to be sent; None if it wants TensorRT-LLM's tensors."""
    if FRAMES in request.names and FRAMES_FOR in request.parameters:
        return FrameAddress.parse(request.parameters[FRAMES_FOR])
    return None


def engine_end_ids(parameters: Mapping[str, str]) -> frozenset[int]:
    """Return the end tokens of the model that the configuration names, without the tokenizer's own."""
    configured = stub.end_ids(parameters)
    if configured:
        return frozenset(configured)
    directories = (parameters.get(name) for name in ("model", "tokenizer_dir"))
    found = [declared_end_ids(Path(directory)) for directory in directories if directory]
    return frozenset(chain.from_iterable(found))
