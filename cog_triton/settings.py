"""Every setting of a deployment, read once from the environment.

A field is set by the environment variable of its name in capitals, or the one that is its alias. An
empty variable counts as unset. The text under a field is its description in docs/configuration.md.
Template variables of the Triton models are not here: they are set in the YAML file that
``COG_TRITON_CONFIG`` names (see ``cog_triton.repository.variables``).
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
    """Takes the place of MODEL, and may as well be an engine that build_engine.py packed; set by Replicate
    for a trained model."""
    weights_checksum: str | None = Field(None, alias="WEIGHTS_SHA256")
    """SHA-256 of the tar file, checked on arrival."""
    weights_cache: Path = Path("~/.cache/cog-triton")
    """Where downloads are unpacked and kept."""
    hf_token: SecretStr | None = None
    """Hugging Face token, for models that need one."""
    tokenizer: str | None = None
    """Tokenizer directory or id; `MODEL` when unset."""
    trust_remote_code: bool = False
    """Run the Python code that a model or its tokenizer brings, with all that this user may do. Without it,
    one that needs its own code is refused."""
    engine: Literal["auto", "tensorrtllm", "llmapi", "vllm", "transformers", "simulated"] = "auto"
    """What runs in the tensorrt_llm slot: tensorrtllm (an engine on TensorRT-LLM's C++ backend), llmapi
    (TensorRT-LLM's LLM API), vllm, transformers or simulated; auto takes the first of the first four that
    the machine can run, vllm only with an NVIDIA GPU."""
    engine_dir: Path | None = None
    """TensorRT-LLM engine directory, with rank*.engine and config.json."""
    world_size: int = Field(1, ge=1)
    """GPUs that the C++ backend's engine was built for, one MPI rank each."""
    lora_dir: Path | None = None
    """Directory of LoRA adapters, each in a directory of its own name, as PEFT saves it; one that appears
    while the server runs can be used at once. For all engines but simulated; tensorrtllm takes those that
    NVIDIA's hf_lora_convert.py made, too."""
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
    """Simulated engine: milliseconds until a request's first token, whatever else runs."""
    simulated_prefill_tokens_per_s: float = Field(0.0, ge=0)
    """Simulated engine: prompt tokens that it prefills a second, one prompt after another, before those
    milliseconds; 0 is no limit."""
    simulated_inter_token_ms: float = Field(0.0, ge=0)
    """Simulated engine: milliseconds between two tokens of a request."""
    simulated_max_batch: int = Field(0, ge=0)
    """Simulated engine: requests that run at once; others wait for a slot, first come, first served. 0 is
    no limit."""
    simulated_failure_rate: float = Field(0.0, ge=0, le=1)
    """Simulated engine: share of the requests that fail. Which ones depends on prompt, seed and number of
    tokens alone."""
    simulated_failures: str = Field(
        "error", pattern=r"^(error|stall|refuse)(,(error|stall|refuse))*$"
    )
    """Simulated engine: how requests fail, each in one of the ways named here with commas between: error
    (midway), stall (silence from midway on), refuse (as by a full queue)."""
    simulated_text: str | None = None
    """Simulated engine: the text whose tokens it makes, again and again; its own when unset."""
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
    """Parts of Triton's API that are closed to all, with commas between, or none: shared-memory, trace,
    logging, model-repository, model-config, statistics, metadata."""
    passed_secrets: str = Field("", alias="TRITON_SECRETS", pattern=r"^\w*(,\w+)*$")
    """Names, with commas between, of variables that tritonserver and its models get although they are kept
    from them otherwise: those that end in _TOKEN, _KEY, _KEYS, _SECRET or PASSWORD, and those that end
    in _URL or _DSN and have a password."""
    start_timeout: float = Field(300.0, alias="TRITON_START_TIMEOUT", gt=0)
    """Seconds that every model may take, together, to become ready. A start after a failure gets ten times
    what the longest start took, if that is less, but at least 60."""
    stop_timeout: float = Field(10.0, alias="TRITON_STOP_TIMEOUT", gt=0)
    """Seconds from SIGTERM to SIGKILL when tritonserver is stopped."""
    response_timeout: float = Field(300.0, alias="TRITON_RESPONSE_TIMEOUT", gt=0)
    """Seconds without any response after which a request fails with E2101."""
    hang_timeout: float = Field(120.0, alias="TRITON_HANG_TIMEOUT", ge=0)
    """Seconds for which requests run and none has a response, after which tritonserver is killed and
    started again; longer than the longest prefill. 0 is never."""
    restarts: int = Field(10, alias="TRITON_RESTARTS", ge=0)
    """How often tritonserver is started again, within TRITON_RESTART_WINDOW, before it is given up; 0 is
    never."""
    restart_window: float = Field(600.0, alias="TRITON_RESTART_WINDOW", gt=0)
    """Seconds."""
    exit_on_failure: bool = False
    """End the process when tritonserver is given up, for what starts it to start another."""
    resume_attempts: int = Field(3, ge=0)
    """How often a request goes on from what it had delivered, after tritonserver ended, a connection broke
    or a response was lost; 0 fails it with E2103, E2104 or E2105 instead."""
    resume_timeout: float = Field(60.0, gt=0)
    """Seconds that a request waits for tritonserver to be back, each time."""
    max_running: int = Field(256, ge=1)
    """Requests that are given to the engine at once; more wait for their turn."""
    max_waiting: int = Field(256, ge=0)
    """Requests that wait for their turn at once; one more fails with E2106, and a time to try again."""
    queue_timeout: float = Field(60.0, gt=0)
    """Seconds that a request waits for its turn at most."""
    predictor_metrics_port: Port | None = None
    """Where the predictor's own metrics can be read in Prometheus' format: queue, waiting times, restarts;
    nowhere when unset. It listens on the address of TRITON_HOST."""
    openai_port: Port | None = None
    """Where the predictor serves OpenAI's API beside Cog's, on the same Triton; nowhere when unset. 0 picks
    a free port, which the log names."""
    openai_host: str = "127.0.0.1"
    """Address that it listens on."""
    openai_workers: int = Field(1, ge=1)
    """Processes that answer there: 1 is the predictor itself, more are of their own, if one core is not
    enough. They share MAX_RUNNING and MAX_WAITING among them, beside the predictor's own."""
    openai_api_keys: SecretStr | None = None
    """API keys of the OpenAI face, with commas or line feeds between: each the key, or sha256: and the 64
    hexadecimal digits of its hash. With no keys, here or in a file, anybody may ask."""
    openai_api_keys_file: Path | None = None
    """File of API keys with names, weights and limits, one a line; it is read again when it changes. See
    docs/openai.md."""
    open_metrics: bool = Field(False, alias="OPENAI_OPEN_METRICS")
    """Give /metrics of the OpenAI face to those who have no API key, too."""
    allowed_origins: str = Field("", alias="OPENAI_ALLOWED_ORIGINS")
    """Origins, with commas between, whose pages a browser lets read the OpenAI face's answers (CORS); * is
    all."""
    otel_endpoint: str | None = Field(None, alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    """Where the OpenAI face sends a span of each request, by OTLP over HTTP; needs the extra otel.
    OpenTelemetry's other variables hold as well."""
    log_verbose: int = Field(0, alias="TRITON_LOG_VERBOSE", ge=0)
    """Triton's --log-verbose."""
    model_repository: Path = Field(Path("triton_model_repo"), alias="TRITON_MODEL_REPO")
    """The model repository's templates."""
    runtime_directory: Path | None = Field(None, alias="RUNTIME_DIR")
    """Where the filled model repository is made; a temporary directory when unset."""
    transport: Literal["grpc", "http"] = "grpc"
    """How predict() reaches Triton: grpc, or http (generate_stream), for where gRPC cannot be had. Over
    http, Triton 2.51 loses responses and ends of streams when it is short of the processor: such a request
    goes on after a pause, or fails with E2101 or E2104."""
    system_prompt: str = ""
    """Default of the input system_prompt."""
    prompt_template: str = "{prompt}"
    """Default of the input prompt_template."""
    chat_template: str | None = None
    """Chat template, in Jinja's language, or a file with one, in place of the tokenizer's own. What has a
    brace in it is a template, anything else a file's name."""
    stop_sequences: str = ""
    """Default of the input stop_sequences."""
    log_format: Literal["auto", "json", "text", "console"] = "auto"
    """How `make serve` logs: json, an object a line, or text, short lines for a person; auto is text on a
    terminal and json elsewhere. console is Cog's own name for its text, and the same here."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged: all that Triton says only at debug; at info its warnings and errors, and how long
    each step of the start took."""
    drain_seconds: float = Field(30.0, ge=0)
    """Seconds that running predictions get to end when the server is told to stop."""
    max_request_bytes: int = Field(16 << 20, ge=1)
    """Bytes of a request's body, over which it is answered with 413."""
    receive_timeout: float = Field(60.0, gt=0)
    """Seconds from a request's first byte to its last, after which it is answered with 408."""
    busy_timeout: float = Field(900.0, gt=0)
    """Seconds for which every slot may be taken, without a prediction that begins, streams or ends, until
    /health/ready answers 503; longer than a request may last that does not stream."""
    chat_page: bool = True
    """The OpenAI face has a page to chat with the model at /."""
    log_performance_metrics: bool = False
    """Log the performance metrics of every prediction, whatever its input says."""

    @property
    def names_config_file(self) -> bool:
        """Whether the configuration file was named; the default is read if it is there."""
        return "config_file" in self.model_fields_set

    @property
    def secrets_passed_on(self) -> frozenset[str]:
        """Names of the secrets that tritonserver gets."""
        return frozenset(filter(None, self.passed_secrets.split(",")))

    @property
    def tokenizer_dir(self) -> str:
        """Directory or id of the tokenizer; a directory is made absolute, Triton's cwd is its own.

        An engine directory that has a tokenizer brings its own.
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

    @property
    def absolute_lora_dir(self) -> str | None:
        """The directory of adapters as Triton, whose cwd is its own, can open it."""
        return None if self.lora_dir is None else str(self.lora_dir.resolve())

    @property
    def absolute_engine_dir(self) -> str | None:
        """The engine directory as Triton, whose cwd is its own, can open it."""
        return None if self.engine_dir is None else str(self.engine_dir.resolve())


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings from the environment.

    Raises:
        ConfigurationError: naming every variable whose value is not valid, and why.
    """
    environ = os.environ if environ is None else environ
    given = {name: environ[name] for name in _aliases() if environ.get(name)}
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(
            f"{e['loc'][0]}={e['input']!r}: {e['msg']}" for e in error.errors(include_url=False)
        )
        raise ConfigurationError(f"invalid settings: {problems}") from None


def describe() -> list[tuple[str, str, str, str]]:
    """One row per setting: environment variable, type, default, description."""
    return [
        (
            str(field.alias),
            _type_name(field.annotation),
            _default(field.default),
            " ".join((field.description or "").split()),
        )
        for field in Settings.model_fields.values()
    ]


def _aliases() -> list[str]:
    return [str(field.alias) for field in Settings.model_fields.values()]


def _absolute_if_directory(name: str) -> str:
    path = Path(name)
    return str(path.resolve()) if path.is_dir() else name


def _default(value: Any) -> str:
    return "" if value is None else str(value)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(get_args(annotation))
    options = [a for a in get_args(annotation) if a is not type(None)] or [annotation]
    names = {"int": "integer", "Path": "path", "float": "number", "bool": "boolean"}
    return names.get(options[0].__name__, "text")
