"""The settings of a deployment, read once from the environment.

A field is set by the environment variable of its name in capitals, or its alias; an empty one is unset. The
descriptions are those of ``--help`` and docs/configuration.md, which `make docs` writes.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from cog_triton import ROOT
from cog_triton.errors import ConfigurationError
from cog_triton.redaction import shown_value


def _split(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


Port = Annotated[int, Field(ge=0, le=65535)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(_split)]
_LIST = r"^({0})(,({0}))*$"
_ORIGINS = r"^[\s,]*((\*|null|[a-z][a-z0-9+.-]*://[^\s,/?#@]+/?)([\s,]+|$))*$"
# Not health and inference: without them nothing runs.
_TRITON_APIS = "shared-memory|trace|logging|model-repository|model-config|statistics|metadata"
# Values of STORE that turn it off, or on with the default file. deploy/helm has the first ones, too.
_OFF = frozenset(("0", "false", "no", "none", "off"))
_ON = frozenset(("1", "true", "yes", "on"))


class Settings(BaseModel):
    """The settings of one deployment. Frozen: what is derived from them is a property or a function."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, alias_generator=str.upper
    )

    config_file: Path = Field(
        Path("config.yaml"),
        alias="COG_TRITON_CONFIG",
        description=(
            "YAML file that sets template variables. If this is unset, config.yaml is read if "
            "it exists."
        ),
    )
    model: str = Field(
        str(Path(__file__).with_name("demo")),
        description=(
            "The model: a directory, a tar file or a GGUF file, the URL of one of these, or a "
            "Hugging Face id."
        ),
    )
    weights: str | None = Field(
        None,
        alias="COG_WEIGHTS",
        description=(
            "Overrides MODEL. It can also be an engine packed by build_engine.py. Replicate "
            "sets it for a trained model."
        ),
    )
    weights_checksum: str | None = Field(
        None,
        alias="WEIGHTS_SHA256",
        description=(
            "SHA-256 of the tar file, or of the GGUF file at a URL, verified after the download."
        ),
    )
    weights_cache: Path = Field(
        Path("~/.cache/cog-triton"),
        description="Directory where downloads are unpacked and kept.",
    )
    hf_token: SecretStr | None = Field(
        None,
        description="Hugging Face token, for gated models.",
    )
    tokenizer: str | None = Field(
        None,
        description="Tokenizer directory or Hugging Face id. Defaults to MODEL.",
    )
    trust_remote_code: bool = Field(
        False,
        description=(
            "Run Python code that comes with a model or tokenizer, with this user's "
            "permissions. Without it, models that need such code are refused."
        ),
    )
    engine: Literal["auto", "tensorrtllm", "llmapi", "vllm", "transformers", "simulated"] = Field(
        "auto",
        description=(
            "The engine: tensorrtllm (a compiled engine on TensorRT-LLM's C++ backend), "
            "llmapi (a checkpoint on TensorRT-LLM's LLM API), vllm, transformers or "
            "simulated. auto picks tensorrtllm if ENGINE_DIR has an engine and the backend is "
            "installed; otherwise llmapi or vllm, if it is installed and there is an NVIDIA GPU; "
            "otherwise transformers."
        ),
    )
    engine_dir: Path | None = Field(
        None,
        description="Directory of a TensorRT-LLM engine (rank*.engine and config.json).",
    )
    world_size: int = Field(
        1,
        ge=1,
        description=(
            "Number of GPUs that the TensorRT-LLM engine was built for; one MPI rank runs on each."
        ),
    )
    lora_dir: Path | None = Field(
        None,
        description=(
            "Directory of LoRA adapters, one subdirectory each, as saved by PEFT or, for "
            "tensorrtllm, by NVIDIA's hf_lora_convert.py. Adapters added later work without a "
            "restart. Every engine except simulated supports LoRA."
        ),
    )
    kv_events_endpoint: str | None = Field(
        None,
        pattern=r"^(ipc|tcp)://.",
        description=(
            "ZeroMQ endpoint (ipc://FILE) on which the transformers or vllm engine publishes "
            "its KV cache events, in vLLM's format. `cog-triton worker` sets it."
        ),
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Device of the transformers engine: auto, cpu, cuda or cuda:N.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description=(
            "Data type of a checkpoint's weights: auto (as saved; float32 for a GGUF file), "
            "float32, bfloat16 or float16."
        ),
    )
    max_sequence_length: int | None = Field(
        None,
        ge=2,
        description=(
            "Maximum number of tokens in a prompt and its output together. Defaults to the "
            "model's context length."
        ),
    )
    end_ids: TokenIds = Field(
        (),
        alias="END_ID",
        description=(
            "Comma-separated token ids that end a generation. They replace the model's "
            "defaults: the tokenizer's end-of-sequence token and every eos_token_id in "
            "generation_config.json and config.json."
        ),
    )
    pad_id: int | None = Field(
        None,
        ge=0,
        description="Padding token id. Defaults to the tokenizer's.",
    )
    generation_defaults: Literal["model", "none"] = Field(
        "model",
        description=(
            "Default sampling parameters of OpenAI's and Anthropic's APIs: model takes them "
            "from the model's generation_config.json, as vLLM does; none uses OpenAI's "
            "defaults."
        ),
    )
    simulated_prefill_ms: float = Field(
        0.0,
        ge=0,
        description=(
            "Simulated engine: additional milliseconds between a request's prefill and its first "
            "token."
        ),
    )
    simulated_prefill_tokens_per_s: float = Field(
        0.0,
        ge=0,
        description=(
            "Simulated engine: prompt tokens prefilled per second, one prompt at a time; 0 "
            "means no limit."
        ),
    )
    simulated_inter_token_ms: float = Field(
        0.0,
        ge=0,
        description="Simulated engine: milliseconds between two tokens of a request.",
    )
    simulated_steps: bool = Field(
        True,
        description=(
            "Simulated engine: true generates the next token of all running requests in one "
            "step, as in-flight batching does; false times each request independently."
        ),
    )
    simulated_max_batch: int = Field(
        0,
        ge=0,
        description=(
            "Simulated engine: number of requests that run at once; others wait in order. 0 "
            "means no limit."
        ),
    )
    simulated_failure_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "Simulated engine: fraction of requests that fail. The prompt, the seed and "
            "max_tokens decide which."
        ),
    )
    simulated_failures: str = Field(
        "error",
        pattern=_LIST.format("error|stall|refuse"),
        description=(
            "Simulated engine: comma-separated list of the ways in which requests fail: error "
            "(an error midway), stall (no more tokens from midway on), refuse (rejected as if "
            "the queue were full)."
        ),
    )
    simulated_text: str | None = Field(
        None,
        description=(
            "Simulated engine: text that it generates, repeated as needed. Defaults to a "
            "built-in text."
        ),
    )
    tritonserver: Path | None = Field(
        None,
        description=(
            "Path of the tritonserver binary. Defaults to the binary in NVIDIA's container or "
            "else in the nvidia-pytriton wheel."
        ),
    )
    backend_directory: Path | None = Field(
        None,
        alias="TRITONSERVER_BACKEND_DIR",
        description="Directory of Triton's backends. Defaults to those that come with the server.",
    )
    host: str = Field(
        "127.0.0.1",
        alias="TRITON_HOST",
        description="Address that Triton's endpoints bind to.",
    )
    http_port: Port = Field(
        8000,
        alias="TRITON_HTTP_PORT",
        description="Triton's HTTP port. 0 picks a free port.",
    )
    grpc_port: Port = Field(
        8001,
        alias="TRITON_GRPC_PORT",
        description="Triton's gRPC port. 0 picks a free port.",
    )
    metrics_port: Port = Field(
        8002,
        alias="TRITON_METRICS_PORT",
        description="Port of Triton's metrics. 0 picks a free port.",
    )
    closed_apis: str = Field(
        "shared-memory,trace,logging",
        alias="TRITON_CLOSED_APIS",
        pattern=f"^none$|{_LIST.format(_TRITON_APIS)}",
        description=(
            "Comma-separated parts of Triton's API to disable: shared-memory, trace, logging, "
            "model-repository, model-config, statistics, metadata. The value none disables "
            "nothing."
        ),
    )
    passed_secrets: str = Field(
        "",
        alias="TRITON_SECRETS",
        pattern=r"^\w*(,\w+)*$",
        description=(
            "Comma-separated environment variables to pass to tritonserver although they look "
            "like secrets. Variables that look like secrets are otherwise withheld. They are "
            "recognized by name (AWS_…; TOKEN, SECRET, PASS or CREDENTIAL anywhere; _KEY, "
            "_KEYS or _HEADERS at the end; and more) or by value (a URL with a password or a "
            "signature)."
        ),
    )
    start_timeout: float = Field(
        300.0,
        alias="TRITON_START_TIMEOUT",
        gt=0,
        description=(
            "Maximum number of seconds until all models are ready at the first start. A restart "
            "may take ten times as long as the longest start so far, but at least 60 seconds "
            "and at most this limit."
        ),
    )
    stop_timeout: float = Field(
        10.0,
        alias="TRITON_STOP_TIMEOUT",
        gt=0,
        description="Seconds from SIGTERM to SIGKILL when tritonserver is stopped.",
    )
    response_timeout: float = Field(
        300.0,
        alias="TRITON_RESPONSE_TIMEOUT",
        gt=0,
        description="A request fails with E2101 if it gets no response for this many seconds.",
    )
    hang_timeout: float = Field(
        120.0,
        alias="TRITON_HANG_TIMEOUT",
        ge=0,
        description=(
            "tritonserver is killed and restarted if no running request gets a response for "
            "this many seconds. Set it longer than the longest prefill; 0 disables it."
        ),
    )
    restarts: int = Field(
        10,
        alias="TRITON_RESTARTS",
        ge=0,
        description=(
            "Maximum number of tritonserver restarts within TRITON_RESTART_WINDOW. After "
            "that, it stays down. 0 never restarts it."
        ),
    )
    restart_window: float = Field(
        600.0,
        alias="TRITON_RESTART_WINDOW",
        gt=0,
        description="Seconds over which TRITON_RESTARTS counts restarts.",
    )
    exit_on_failure: bool = Field(
        False,
        description=(
            "Exit when the last permitted restart of tritonserver has failed, so that a "
            "supervisor can start a new process."
        ),
    )
    resume_attempts: int = Field(
        3,
        ge=0,
        description=(
            "Maximum number of times that a request is resumed when its stream breaks or a "
            "response is lost. It continues after the tokens already streamed. With 0, it fails "
            "at once with E2103, E2104 or E2105. Retries caused by another request or by the "
            "connection do not count."
        ),
    )
    resume_timeout: float = Field(
        60.0,
        gt=0,
        description="Maximum number of seconds that a request waits for each restart of tritonserver.",
    )
    max_running: int = Field(
        256,
        ge=1,
        description=(
            "Maximum number of requests in the engine at once; further requests wait in the queue."
        ),
    )
    max_waiting: int = Field(
        256,
        ge=0,
        description=(
            "Maximum number of requests in the queue; further requests fail with E2106, which "
            "says when to retry. An API key that uses less than its equal share of "
            "the queue may exceed this limit, so that no key can fill the queue for the "
            "others."
        ),
    )
    queue_timeout: float = Field(
        60.0,
        gt=0,
        description="Maximum number of seconds that a request waits in the queue.",
    )
    predictor_metrics_port: Port | None = Field(
        None,
        description=(
            "Port, on TRITON_HOST, of the predictor's Prometheus metrics (queue, waiting "
            "times, restarts). Off when unset."
        ),
    )
    replicate_list_token: SecretStr | None = Field(
        None,
        description=(
            "API token that Cog's port requires for `GET /v1/predictions` and `GET "
            "/v1/files`, which list the predictions and files of all clients. When unset, "
            "both are disabled."
        ),
    )
    openai_port: Port | None = Field(
        None,
        description=(
            "Port on which the Cog predictor also serves OpenAI's API, with the same Triton. "
            "Off when unset. 0 picks a free port and logs it."
        ),
    )
    openai_host: str = Field(
        "127.0.0.1",
        description="Address that the port of OpenAI's API binds to.",
    )
    served_model_name: str = Field(
        "",
        description=(
            "Comma-separated names of the model in OpenAI's API; responses use the first. "
            "Defaults to the last part of MODEL."
        ),
    )
    openai_workers: int = Field(
        1,
        ge=1,
        description=(
            "Number of processes that serve OpenAI's API. With 1, the main process serves it. "
            "Several processes share MAX_RUNNING and divide MAX_WAITING between them; a Cog "
            "predictor beside them has separate limits."
        ),
    )
    openai_api_keys: SecretStr | None = Field(
        None,
        description=(
            "API keys of OpenAI's API, separated by commas or newlines. Each is the key "
            "itself or sha256: followed by the 64 hexadecimal digits of its hash. With no "
            "keys here or in a file, anyone can use the API."
        ),
    )
    openai_api_keys_file: Path | None = Field(
        None,
        description="File of API keys with names, weights and limits. It is reloaded when it changes.",
    )
    open_metrics: bool = Field(
        False,
        alias="OPENAI_OPEN_METRICS",
        description="Serve /metrics on the port of OpenAI's API without an API key.",
    )
    allowed_origins: str = Field(
        "",
        alias="OPENAI_ALLOWED_ORIGINS",
        pattern=_ORIGINS,
        description=(
            "Comma-separated origins (https://chat.example.com) whose web pages may use "
            "OpenAI's API from a browser (CORS); * allows all. Other pages get 403 for any "
            "request that changes something."
        ),
    )
    cog_allowed_origins: str = Field(
        "",
        pattern=_ORIGINS,
        description="Like OPENAI_ALLOWED_ORIGINS, for Cog's port.",
    )
    allowed_hosts: str = Field(
        "",
        description=(
            "Comma-separated host names accepted in a request's Host header on every HTTP "
            "port of this project: api.example.com, *.example.com, or * for all. A port bound "
            "to a loopback address also accepts localhost, *.localhost and loopback "
            "addresses, and answers 403 to any other name. A port bound to another address "
            "checks names only if this is set, and always accepts IP addresses."
        ),
    )
    store: str = Field(
        "~/.local/state/cog-triton/journal.db",
        description=(
            "File where OpenAI's API stores responses, files and batches; 0 disables storage, and 1 is "
            "the default. "
            "If the file cannot be written, only the requests that need it fail, with E2107."
        ),
    )
    store_max_bytes: int = Field(
        1 << 30,
        ge=1 << 20,
        description=(
            "Maximum size of STORE in bytes. When it is 90% full, the oldest finished entries of the "
            "API key that uses the most space are deleted."
        ),
    )
    store_days: float = Field(
        30.0,
        gt=0,
        description="Number of days for which a response is kept.",
    )
    store_background: int = Field(
        1000,
        ge=0,
        description=(
            "Maximum number of background responses that wait or run; further ones get 429. "
            "With several API keys, each key is limited to half."
        ),
    )
    store_key_part: float = Field(
        0.5,
        gt=0,
        le=1,
        description=(
            "Fraction of STORE_MAX_BYTES that each API key may use if there are several. Its "
            "oldest responses are deleted to store new ones; an upload or a batch that "
            "exceeds the limit gets 413 or 429."
        ),
    )
    store_key_rows: int = Field(
        500_000,
        ge=1,
        description=(
            "Maximum number of rows (responses, files, batches, result lines) that each API "
            "key may store if there are several."
        ),
    )
    otel_endpoint: str | None = Field(
        None,
        alias="OTEL_EXPORTER_OTLP_ENDPOINT",
        description=(
            "URL to which traces of requests are sent over OTLP/HTTP, with spans for the "
            "APIs, the queue and Triton. Requires the extra otel. OpenTelemetry's other "
            "variables also apply."
        ),
    )
    log_verbose: int = Field(
        0,
        alias="TRITON_LOG_VERBOSE",
        ge=0,
        description="Value of Triton's --log-verbose option.",
    )
    model_repository: Path = Field(
        ROOT / "triton_model_repo",
        alias="TRITON_MODEL_REPO",
        description="Directory of the model repository's templates.",
    )
    runtime_directory: Path | None = Field(
        None,
        alias="RUNTIME_DIR",
        description=(
            "Directory where the filled model repository is written. Defaults to a temporary "
            "directory."
        ),
    )
    transport: Literal["grpc", "http"] = Field(
        "grpc",
        description=(
            "How the predictor reaches Triton: grpc, or http (generate_stream) where gRPC is "
            "not available. Over HTTP, Triton 2.51 can lose responses and ends of streams "
            "when the CPU is overloaded; such a request continues after a pause or fails with "
            "E2101 or E2104."
        ),
    )
    system_prompt: str = Field(
        "",
        description="Default of the input system_prompt.",
    )
    prompt_template: str | None = Field(
        None,
        description=(
            "Default of the input prompt_template. When unset, Cog's API applies the model's "
            "chat template to prompts, if it has one; {prompt} sends them unchanged."
        ),
    )
    chat_template: str | None = Field(
        None,
        description=(
            "Jinja chat template, or the name of a file that contains one, to use instead of "
            "the tokenizer's. A value that contains a brace is a template; anything else is a "
            "file name."
        ),
    )
    stop_sequences: str = Field(
        "",
        description="Default of the input stop_sequences.",
    )
    log_format: Literal["auto", "json", "text", "console"] = Field(
        "auto",
        description=(
            "Log format: json (one object per line) or text (short lines). auto means text on "
            "a terminal. Elsewhere it means json for `cog-triton serve`, and lines with a "
            "level and a logger name for `cog-triton openai` and `cog-triton worker`. console "
            "is Cog's name for text."
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description=(
            "Lowest level to log. debug includes Triton's whole log; info includes its "
            "warnings and errors, and how long each step of the start took."
        ),
    )
    drain_seconds: float = Field(
        30.0,
        ge=0,
        description="Seconds that running requests have to finish when the server is stopped.",
    )
    max_request_bytes: int = Field(
        16 << 20,
        ge=1,
        description="Maximum size of a request's body in bytes; a larger one gets 413.",
    )
    max_file_bytes: int = Field(
        200 << 20,
        ge=1,
        description="Maximum size in bytes of a file uploaded for a batch.",
    )
    receive_timeout: float = Field(
        60.0,
        gt=0,
        description=(
            "Maximum number of seconds from a request's first byte to its last; a slower one "
            "gets 408."
        ),
    )
    busy_timeout: float = Field(
        900.0,
        gt=0,
        description=(
            "/health/ready answers 503 if, for this many seconds, every slot is taken and no "
            "prediction starts, streams or ends. Set it longer than the longest request that "
            "does not stream."
        ),
    )
    chat_page: bool = Field(
        True,
        description="Serve a chat page at / on the port of OpenAI's API.",
    )
    log_performance_metrics: bool = Field(
        False,
        description="Log the performance metrics of every prediction, regardless of its inputs.",
    )

    @property
    def hub_token(self) -> str | None:
        return self.hf_token.get_secret_value() if self.hf_token else None

    @property
    def tokenizer_dir(self) -> str:
        """Directory, made absolute as Triton has another, or id; by default an engine directory's own."""
        engine = self.engine_dir
        if self.tokenizer is None and engine is not None:
            for directory in (engine, engine / "tokenizer", engine.parent / "tokenizer"):
                if (directory / "tokenizer_config.json").is_file():
                    return str(directory.resolve())
        return _absolute_if_directory(self.tokenizer or self.model)

    @property
    def store_file(self) -> Path | None:
        """Return the file of the journal; None where there is to be none, or no home to have it in."""
        store = self.store
        if store.lower() in _OFF:
            return None
        if store.lower() in _ON:
            # STORE=1 is meant as the opposite of STORE=0, not as a file called 1.
            store = str(Settings.model_fields["store"].default)
        file = os.path.expanduser(store)
        return None if file.startswith("~") else Path(file)

    @property
    def model_dir(self) -> str:
        return _absolute_if_directory(self.model)


def _absolute_if_directory(name: str) -> str:
    path = Path(name)
    return str(path.resolve()) if path.is_dir() else name


VARIABLES = tuple(str(field.alias) for field in Settings.model_fields.values())


# Variables of other software whose names are nearly those of settings.
_OF_OTHERS = frozenset(("OPENAI_API_KEY",))
_ALIKE = 0.9  # of difflib's ratio: one letter of a short name, two of a long one


def misspelt_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a warning for each variable whose name is nearly that of a setting.

    It is a warning and not an error, because the variable may belong to other software. The plural of a
    single word is not reported (``MODELS``), nor a name that differs in more than a letter or two.
    """
    environ = os.environ if environ is None else environ
    known = frozenset(VARIABLES)
    warnings = []
    for name in sorted(environ.keys() - known - _OF_OTHERS):
        meant = _misspelt(name, known)
        if meant is not None:
            warnings.append(f"the environment variable {name} has no effect; did you mean {meant}?")
    return warnings


def _misspelt(name: str, known: frozenset[str]) -> str | None:
    """Return the setting that a variable's name may have been meant for."""
    upper = name.upper().replace("-", "_")
    if name != upper and "_" in upper and upper in known:
        return upper
    plural_of_a_word = "_" not in name and name.removesuffix("S") in known
    if upper != name or plural_of_a_word:
        return None
    for setting in known:
        swapped = len(setting) == len(name) and sorted(setting) == sorted(name)
        if swapped and sum(a != b for a, b in zip(setting, name, strict=True)) == 2:
            return setting
    found = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
    return found[0] if found else None


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings, or raise ConfigurationError, which names every invalid variable."""
    environ = os.environ if environ is None else environ
    values = {name: environ[name] for name in VARIABLES if environ.get(name)}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0])
            # Of a list, the first wrong item is enough.
            problems.setdefault(name, _problem(name, values[name], detail))
        text = "; ".join(problems.values())
        raise ConfigurationError(f"invalid settings: {text}") from None


def _problem(name: str, value: str, detail: ErrorDetails) -> str:
    """Return the whole value of a variable, and what is wrong with it or with an item of it."""
    problem = f"{name}={shown_value(name, value)!r}: "
    if len(detail["loc"]) > 1:
        item = str(detail["input"])
        problem += f"item {item!r}: " if item.strip() else "an empty item: "
    return problem + detail["msg"]
