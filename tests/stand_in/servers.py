"""Real tritonservers with the stand-in, and the tensorrt_llm model alone in one, loaded as a test wants."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import numpy.typing as npt
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from cog_triton.client.grpc_transport import infer_request
from cog_triton.repository.fill import fill_model
from cog_triton.server.command import Launch
from cog_triton.server.installation import locate
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import read_settings
from tests.stand_in.build import backend_directory
from tests.stand_in.engine import make_engine
from tests.support import ROOT, metrics, wait_until

MODEL = "tensorrt_llm"
OUTPUTS = ("output_ids", "sequence_length")
ANY_PORTS = {"TRITON_HTTP_PORT": "0", "TRITON_GRPC_PORT": "0", "TRITON_METRICS_PORT": "0"}
TEMPLATE = (ROOT / "triton_model_repo" / MODEL / "config.pbtxt").read_text()

Array = npt.NDArray[Any]
Response = dict[str, Array]


def environment(directory: Path, **engine: Any) -> dict[str, str]:
    """Settings of a deployment with the stand-in and a new engine in ``directory``.

    Args:
        engine: of the engine, for ``make_engine``.
    """
    python_backend = locate(read_settings({})).backends / "python"
    return {
        "ENGINE": "tensorrtllm",
        "ENGINE_DIR": str(make_engine(directory / "engine", **engine)),
        "TRITONSERVER_BACKEND_DIR": str(backend_directory(directory / "stand_in", python_backend)),
        "WORLD_SIZE": str(engine.get("world_size", 1)),
    }


class Loader(logging.Handler):
    """A tritonserver that loads the tensorrt_llm model with one configuration after the other.

    Attributes:
        model: what it is called; another name each time.
    """

    def __init__(self, server: TritonServer, repository: Path) -> None:
        super().__init__(logging.DEBUG)
        self.server = server
        self.model = ""
        self._repository = repository
        self._lines: list[str] = []
        self._begun = 0
        self._engines = self._loads = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line of the server's log."""
        self._lines.append(record.getMessage())

    @property
    def log(self) -> str:
        """What the server has said since the last load began, all of it once that has ended."""
        return "\n".join(self._lines[self._begun :])

    def engine(self, **build: Any) -> str:
        """A new engine directory."""
        self._engines += 1
        return str(make_engine(self._repository.parent / f"engine{self._engines}", **build))

    def load(self, **changes: str | None) -> None:
        """Loads the model; what it was before is unloaded.

        Args:
            changes: variables of the template, and parameters that it lacks.

        Raises:
            AssertionError: it does not load; the reason is its text.
        """
        variables = {
            "triton_backend": "tensorrtllm",
            "decoupled_mode": "true",
            "exclude_input_in_output": "true",  # as the predictor has it
        }
        variables |= {key: value for key, value in changes.items() if value and in_template(key)}
        variables.setdefault("engine_dir", self.engine())
        config = filled(variables)
        for key, value in changes.items():
            if not in_template(key) and value is not None:
                config.parameters[key].string_value = value
        self.load_config(config)

    def load_config(self, config: Any) -> None:
        """Loads the model with a ModelConfig; see ``load``."""
        self._loads += 1
        before, self.model = self.model, f"{MODEL}_{self._loads}"
        config.name = self.model
        (self._repository / self.model / "1").mkdir(parents=True)
        self._begun = len(self._lines)
        text = json_format.MessageToJson(config, preserving_proto_field_name=True)
        reply = self._post(f"repository/models/{self.model}/load", {"parameters": {"config": text}})
        # The log comes by another way than the reply.
        end = "successfully loaded" if reply.is_success else "failed to load"
        wait_until(lambda: f"{end} '{self.model}'" in self.log, 10, "the end of the load")
        if before:
            # Nobody waits for it: right after a response, Triton 2.51 may not notice that it is done.
            self._post(f"repository/models/{before}/unload", {})
        assert reply.is_success, reply.json()["error"]

    def stream(self, *, request_id: str = "", **inputs: Any) -> Iterator[Response]:
        """The responses to a request.

        Raises:
            AssertionError: one of them is an error; the reason is its text.
        """
        return self.send(tensors(**inputs), request_id=request_id)

    def send(
        self,
        inputs: Mapping[str, Array],
        *,
        request_id: str = "",
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> Iterator[Response]:
        """As ``stream``, with all the inputs as tensors."""
        return stream(self.server, inputs, model=self.model, request_id=request_id, outputs=outputs)

    def count(self, kind: str) -> float:
        """One of the stand-in's own counts."""
        return self.metric("stand_in", "count", kind)

    def metric(self, family: str, label: str, kind: str) -> float:
        """A metric of the model."""
        labels = ",".join(sorted([f'{label}="{kind}"', f'model="{self.model}"', 'version="1"']))
        return metrics(self.server.endpoints.metrics)[f"{family}{{{labels}}}"]

    def _post(self, path: str, body: Any) -> httpx.Response:
        url = f"http://{self.server.endpoints.http}/v2/{path}"
        return httpx.post(url, json=body, timeout=30, trust_env=False)


def in_template(name: str) -> bool:
    """Whether the tensorrt_llm template has a variable."""
    return f"${{{name}}}" in TEMPLATE


def filled(variables: Mapping[str, object]) -> Any:
    """The ModelConfig of the filled template."""
    config = model_config_pb2.ModelConfig()
    text_format.Parse(fill_model(MODEL, TEMPLATE, variables), config)
    return config


@contextmanager
def running_loader(directory: Path) -> Iterator[Loader]:
    """A server without models."""
    repository, runtime = directory / "repository", directory / "runtime"
    repository.mkdir()
    runtime.mkdir()
    settings = read_settings({**ANY_PORTS, **environment(directory)})
    launch = Launch(options=("--model-control-mode=explicit",))
    server = TritonServer(repository, runtime, settings, launch=launch)
    loader = Loader(server, repository)
    logger = logging.getLogger("tritonserver")
    logger.addHandler(loader)
    logger.setLevel(logging.DEBUG)
    server.start()
    try:
        yield loader
    finally:
        server.stop()
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(loader)


def tensors(
    prompt: list[int], max_tokens: int, *, streaming: bool = True, **others: Array
) -> dict[str, Array]:
    """The inputs of a request with one prompt."""
    return {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": np.array([[len(prompt)]], np.int32),
        "request_output_len": np.array([[max_tokens]], np.int32),
        "streaming": np.array([[streaming]]),
        **others,
    }


def stream(
    server: TritonServer,
    inputs: Mapping[str, Array],
    *,
    model: str = MODEL,
    request_id: str = "",
    outputs: tuple[str, ...] = OUTPUTS,
) -> Iterator[Response]:
    """The responses to a request over gRPC; see ``Loader.stream``."""
    with grpc.insecure_channel(server.endpoints.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = infer_request(model, request_id, inputs, outputs)
        for message in stub.ModelStreamInfer(iter([request]), timeout=60):
            assert not message.error_message, message.error_message
            yield parse(message.infer_response)


def parse(response: service_pb2.ModelInferResponse) -> Response:
    """The outputs by name."""
    types = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32}
    contents = zip(response.outputs, response.raw_output_contents, strict=True)
    return {
        output.name: np.frombuffer(raw, types[output.datatype]).reshape(output.shape)
        for output, raw in contents
    }


def ids(responses: Iterator[Response]) -> list[list[int]]:
    """The first beam's ids in each response."""
    return [response["output_ids"][0][0].tolist() for response in responses]
