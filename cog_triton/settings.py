"""The settings of a deployment, read once from the environment.

A field is set by the environment variable of its name in capitals, or of its alias. An empty variable
counts as unset. The text under a field is its description in docs/configuration.md. Template variables of
the Triton models are in the YAML file of ``COG_TRITON_CONFIG`` (see ``cog_triton.repository.variables``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from cog_triton.errors import ConfigurationError

Port = Annotated[int, Field(ge=0, le=65535)]
# Not health and inference: without them nothing runs.
_TRITON_APIS = "shared-memory|trace|logging|model-repository|model-config|statistics|metadata"


class Settings(BaseModel):
    """The settings of one deployment. Frozen: what is derived from them is a property or a function."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        alias_generator=str.upper,
        use_attribute_docstrings=True,
    )

    config_file: Path = Field(Path("config.yaml"), alias="COG_TRITON_CONFIG")
    """YAML file that overrides template variables; it may be absent unless it is named."""
    model: str = str(Path(__file__).with_name("demo"))
    """The model: a directory, a tar file, a URL of one or a Hugging Face id."""
    weights: str | None = Field(None, alias="COG_WEIGHTS")
    """In place of MODEL; may be an engine that build_engine.py packed. Replicate sets it for a trained
    model."""
    weights_checksum: str | None = Field(None, alias="WEIGHTS_SHA256")
    """SHA-256 of the tar file, checked on arrival."""
    weights_cache: Path = Path("~/.cache/cog-triton")
    """Where downloads are unpacked and kept."""
    hf_token: SecretStr | None = None
    """Hugging Face token, for models that need one."""
    tokenizer: str | None = None
    """Tokenizer directory or id; `MODEL` when unset."""
    trust_remote_code: bool = False
    """Run a model's or a tokenizer's own Python code, as this user; without it, those that need it fail."""
    engine: Literal["auto", "tensorrtllm", "llmapi", "vllm", "transformers", "simulated"] = "auto"
    """What runs in the tensorrt_llm slot: tensorrtllm (an engine on TensorRT-LLM's C++ backend), llmapi
    (TensorRT-LLM's LLM API), vllm, transformers or simulated; auto takes the first of the first four that
    the machine can run, vllm only with an NVIDIA GPU."""
    engine_dir: Path | None = None
    """TensorRT-LLM engine directory, with rank*.engine and config.json."""
    world_size: int = Field(1, ge=1)
    """GPUs that the C++ backend's engine was built for, one MPI rank each."""
    lora_dir: Path | None = None
    """Directory of LoRA adapters, each in a directory of its own name, as PEFT saves it, or for tensorrtllm
    as NVIDIA's hf_lora_convert.py does; new ones can be used at once. For all engines but simulated."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the transformers engine: auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of a checkpoint's weights: auto (as saved), float32, bfloat16 or float16."""
    max_sequence_length: int | None = Field(None, ge=2)
    """Upper bound on prompt plus output tokens; the model's context length when unset."""
    end_id: int | None = Field(None, ge=0)
    """Token id that ends a generation; the tokenizer's end of sequence when unset."""
    pad_id: int | None = Field(None, ge=0)
    """Padding token id; the tokenizer's when unset."""
    simulated_prefill_ms: float = Field(0.0, ge=0)
    """Simulated engine: milliseconds until a request's first token, after its prefill."""
    simulated_prefill_tokens_per_s: float = Field(0.0, ge=0)
    """Simulated engine: prompt tokens prefilled per second, one prompt after another; 0 is no limit."""
    simulated_inter_token_ms: float = Field(0.0, ge=0)
    """Simulated engine: milliseconds between two tokens of a request."""
    simulated_max_batch: int = Field(0, ge=0)
    """Simulated engine: requests that run at once; others wait in order. 0 is no limit."""
    simulated_failure_rate: float = Field(0.0, ge=0, le=1)
    """Simulated engine: share of the requests that fail, chosen by prompt, seed and number of tokens."""
    simulated_failures: str = Field(
        "error", pattern=r"^(error|stall|refuse)(,(error|stall|refuse))*$"
    )
    """Simulated engine: ways in which requests fail, separated by commas: error (midway), stall (silence
    from midway on), refuse (as by a full queue)."""
    simulated_text: str | None = None
    """Simulated engine: the text whose tokens it repeats; its own when unset."""
    tritonserver: Path | None = None
    """The tritonserver binary; else NVIDIA's container's, else the wheel's."""
    backend_directory: Path | None = Field(None, alias="TRITONSERVER_BACKEND_DIR")
    """Triton backends; else those that come with the server found."""
    host: str = Field("127.0.0.1", alias="TRITON_HOST")
    """Address that Triton's endpoints bind to."""
    http_port: Port = Field(8000, alias="TRITON_HTTP_PORT")
    """0 picks a free port."""
    grpc_port: Port = Field(8001, alias="TRITON_GRPC_PORT")
    """0 picks a free port."""
    metrics_port: Port = Field(8002, alias="TRITON_METRICS_PORT")
    """0 picks a free port."""
    closed_apis: str = Field(
        "shared-memory,trace,logging",
        alias="TRITON_CLOSED_APIS",
        pattern=rf"^(none|({_TRITON_APIS})(,({_TRITON_APIS}))*)$",
    )
    """Parts of Triton's API that are closed, separated by commas, or none: shared-memory, trace, logging,
    model-repository, model-config, statistics, metadata."""
    passed_secrets: str = Field("", alias="TRITON_SECRETS", pattern=r"^\w*(,\w+)*$")
    """Variables, separated by commas, that tritonserver gets although they are secrets by their name
    (_TOKEN, _KEY, _KEYS, _SECRET, PASSWORD at its end) or their value (_URL, _DSN with a password)."""
    start_timeout: float = Field(300.0, alias="TRITON_START_TIMEOUT", gt=0)
    """Seconds until every model must be ready. A restart gets ten times the longest start so far, if that
    is less, but at least 60."""
    stop_timeout: float = Field(10.0, alias="TRITON_STOP_TIMEOUT", gt=0)
    """Seconds from SIGTERM to SIGKILL when tritonserver is stopped."""
    response_timeout: float = Field(300.0, alias="TRITON_RESPONSE_TIMEOUT", gt=0)
    """Seconds without any response after which a request fails with E2101."""
    hang_timeout: float = Field(120.0, alias="TRITON_HANG_TIMEOUT", ge=0)
    """Seconds without any response, while requests run, after which tritonserver is killed and started
    again; longer than the longest prefill. 0 is never."""
    restarts: int = Field(10, alias="TRITON_RESTARTS", ge=0)
    """Restarts of tritonserver within TRITON_RESTART_WINDOW, after which it is given up; 0 is none."""
    restart_window: float = Field(600.0, alias="TRITON_RESTART_WINDOW", gt=0)
    """Seconds."""
    exit_on_failure: bool = False
    """End the process when tritonserver is given up, for what starts it to start another."""
    resume_attempts: int = Field(3, ge=0)
    """Retries of a request, after the tokens already streamed, when tritonserver ended, a connection broke
    or a response was lost; 0 fails it with E2103, E2104 or E2105 instead."""
    resume_timeout: float = Field(60.0, gt=0)
    """Seconds that a request waits for tritonserver to be back, each time."""
    max_running: int = Field(256, ge=1)
    """Requests that run in the engine at once; more wait for a slot."""
    max_waiting: int = Field(256, ge=0)
    """Requests that wait for a slot at once; one more fails with E2106, and a time to try again."""
    queue_timeout: float = Field(60.0, gt=0)
    """Seconds that a request waits for a slot at most."""
    predictor_metrics_port: Port | None = None
    """Port, on TRITON_HOST, of the predictor's own metrics in Prometheus' format: queue, waiting times,
    restarts; none when unset."""
    openai_port: Port | None = None
    """Port of OpenAI's API in the predictor, on the same Triton; none when unset. 0 picks a free port,
    which the log names."""
    openai_host: str = "127.0.0.1"
    """Address that it listens on."""
    openai_workers: int = Field(1, ge=1)
    """Processes of that API, if one core is not enough; 1 is the predictor itself. More share MAX_RUNNING
    and MAX_WAITING among them, and the predictor has as many of its own."""
    openai_api_keys: SecretStr | None = None
    """API keys of the OpenAI face, separated by commas or line feeds: each the key, or sha256: and the 64
    hexadecimal digits of its hash. With no keys, here or in a file, anybody may ask."""
    openai_api_keys_file: Path | None = None
    """File of API keys with names, weights and limits; read again when it changes. See docs/openai.md."""
    open_metrics: bool = Field(False, alias="OPENAI_OPEN_METRICS")
    """Serve /metrics of the OpenAI face without an API key."""
    allowed_origins: str = Field("", alias="OPENAI_ALLOWED_ORIGINS")
    """Origins, separated by commas, whose pages may read the OpenAI face's responses (CORS); * is all."""
    otel_endpoint: str | None = Field(None, alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    """Where the OpenAI face sends a span of each request, by OTLP over HTTP; needs the extra otel.
    OpenTelemetry's other variables apply as well."""
    log_verbose: int = Field(0, alias="TRITON_LOG_VERBOSE", ge=0)
    """Triton's --log-verbose."""
    model_repository: Path = Field(Path("triton_model_repo"), alias="TRITON_MODEL_REPO")
    """The model repository's templates."""
    runtime_directory: Path | None = Field(None, alias="RUNTIME_DIR")
    """Where the filled model repository is made; a temporary directory when unset."""
    transport: Literal["grpc", "http"] = "grpc"
    """How predict() reaches Triton: grpc, or http (generate_stream), where gRPC cannot be had. Over http,
    Triton 2.51 loses responses and ends of streams on a busy processor: such a request continues after a
    pause, or fails with E2101 or E2104."""
    system_prompt: str = ""
    """Default of the input system_prompt."""
    prompt_template: str = "{prompt}"
    """Default of the input prompt_template."""
    chat_template: str | None = None
    """Jinja chat template, or a file with one, in place of the tokenizer's own; text with a brace in it is
    a template, any other a file's name."""
    stop_sequences: str = ""
    """Default of the input stop_sequences."""
    log_format: Literal["auto", "json", "text", "console"] = "auto"
    """Log format of `make serve`: json (an object a line), or text (short lines); auto is text on a
    terminal and json elsewhere. console is Cog's name for text."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged: Triton's whole log at debug; at info its warnings and errors, and the
    time of each step of the start."""
    drain_seconds: float = Field(30.0, ge=0)
    """Seconds that running predictions get to end when the server is stopped."""
    max_request_bytes: int = Field(16 << 20, ge=1)
    """Most bytes of a request's body; a larger one gets 413."""
    receive_timeout: float = Field(60.0, gt=0)
    """Most seconds from a request's first byte to its last; a slower one gets 408."""
    busy_timeout: float = Field(900.0, gt=0)
    """Seconds for which every slot may be taken, without a prediction that begins, streams or ends, until
    /health/ready answers 503; longer than a request may last that does not stream."""
    chat_page: bool = True
    """The OpenAI face has a page to chat with the model at /."""
    log_performance_metrics: bool = False
    """Log the performance metrics of every prediction, whatever its input says."""

    @property
    def secrets_passed_on(self) -> frozenset[str]:
        """Names of the secrets that tritonserver gets."""
        return frozenset(filter(None, self.passed_secrets.split(",")))

    @property
    def tokenizer_dir(self) -> str:
        """Directory or id of the tokenizer, by default an engine directory's own.

        A directory is made absolute: Triton has another working directory.
        """
        if self.tokenizer is None and self.engine_dir is not None:
            beside = self.engine_dir.parent / "tokenizer"
            for directory in (self.engine_dir, self.engine_dir / "tokenizer", beside):
                if (directory / "tokenizer_config.json").is_file():
                    return str(directory.resolve())
        return _absolute_if_directory(self.tokenizer or self.model)

    @property
    def model_dir(self) -> str:
        """Directory or id of the model; a directory is made absolute."""
        return _absolute_if_directory(self.model)


def _absolute_if_directory(name: str) -> str:
    path = Path(name)
    return str(path.resolve()) if path.is_dir() else name


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from the environment.

    Raises:
        ConfigurationError: naming every variable whose value is not valid, and why.
    """
    environ = os.environ if environ is None else environ
    names = [str(field.alias) for field in Settings.model_fields.values()]
    try:
        return Settings.model_validate({name: environ[name] for name in names if environ.get(name)})
    except ValidationError as error:
        problems = "; ".join(
            f"{e['loc'][0]}={e['input']!r}: {e['msg']}" for e in error.errors(include_url=False)
        )
        raise ConfigurationError(f"invalid settings: {problems}") from None


def describe() -> list[tuple[str, str, str, str]]:
    """Return a row per setting: environment variable, type, default, description."""
    return [
        (
            str(field.alias),
            _type_name(field.annotation),
            "" if field.default is None else str(field.default),
            " ".join((field.description or "").split()),
        )
        for field in Settings.model_fields.values()
    ]


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(get_args(annotation))
    options = [a for a in get_args(annotation) if a is not type(None)] or [annotation]
    names = {"int": "integer", "Path": "path", "float": "number", "bool": "boolean"}
    return names.get(options[0].__name__, "text")
