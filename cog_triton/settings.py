"""The settings of a deployment, read once from the environment.

A field is set by the environment variable of its name in capitals, or its alias; an empty one is unset.
settings.yaml describes them.
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


class Settings(BaseModel):
    """The settings of one deployment. Frozen: what is derived from them is a property or a function."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, alias_generator=str.upper
    )

    config_file: Path = Field(Path("config.yaml"), alias="COG_TRITON_CONFIG")
    model: str = str(Path(__file__).with_name("demo"))
    weights: str | None = Field(None, alias="COG_WEIGHTS")
    weights_checksum: str | None = Field(None, alias="WEIGHTS_SHA256")
    weights_cache: Path = Path("~/.cache/cog-triton")
    hf_token: SecretStr | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    engine: Literal["auto", "tensorrtllm", "llmapi", "vllm", "transformers", "simulated"] = "auto"
    engine_dir: Path | None = None
    world_size: int = Field(1, ge=1)
    lora_dir: Path | None = None
    kv_events_endpoint: str | None = Field(None, pattern=r"^(ipc|tcp)://.")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_sequence_length: int | None = Field(None, ge=2)
    end_ids: TokenIds = Field((), alias="END_ID")
    pad_id: int | None = Field(None, ge=0)
    generation_defaults: Literal["model", "none"] = "model"
    simulated_prefill_ms: float = Field(0.0, ge=0)
    simulated_prefill_tokens_per_s: float = Field(0.0, ge=0)
    simulated_inter_token_ms: float = Field(0.0, ge=0)
    simulated_steps: bool = True
    simulated_max_batch: int = Field(0, ge=0)
    simulated_failure_rate: float = Field(0.0, ge=0, le=1)
    simulated_failures: str = Field("error", pattern=_LIST.format("error|stall|refuse"))
    simulated_text: str | None = None
    tritonserver: Path | None = None
    backend_directory: Path | None = Field(None, alias="TRITONSERVER_BACKEND_DIR")
    host: str = Field("127.0.0.1", alias="TRITON_HOST")
    http_port: Port = Field(8000, alias="TRITON_HTTP_PORT")
    grpc_port: Port = Field(8001, alias="TRITON_GRPC_PORT")
    metrics_port: Port = Field(8002, alias="TRITON_METRICS_PORT")
    closed_apis: str = Field(
        "shared-memory,trace,logging",
        alias="TRITON_CLOSED_APIS",
        pattern=f"^none$|{_LIST.format(_TRITON_APIS)}",
    )
    passed_secrets: str = Field("", alias="TRITON_SECRETS", pattern=r"^\w*(,\w+)*$")
    start_timeout: float = Field(300.0, alias="TRITON_START_TIMEOUT", gt=0)
    stop_timeout: float = Field(10.0, alias="TRITON_STOP_TIMEOUT", gt=0)
    response_timeout: float = Field(300.0, alias="TRITON_RESPONSE_TIMEOUT", gt=0)
    hang_timeout: float = Field(120.0, alias="TRITON_HANG_TIMEOUT", ge=0)
    restarts: int = Field(10, alias="TRITON_RESTARTS", ge=0)
    restart_window: float = Field(600.0, alias="TRITON_RESTART_WINDOW", gt=0)
    exit_on_failure: bool = False
    resume_attempts: int = Field(3, ge=0)
    resume_timeout: float = Field(60.0, gt=0)
    max_running: int = Field(256, ge=1)
    max_waiting: int = Field(256, ge=0)
    queue_timeout: float = Field(60.0, gt=0)
    predictor_metrics_port: Port | None = None
    replicate_list_token: SecretStr | None = None
    openai_port: Port | None = None
    openai_host: str = "127.0.0.1"
    served_model_name: str = ""
    openai_workers: int = Field(1, ge=1)
    openai_api_keys: SecretStr | None = None
    openai_api_keys_file: Path | None = None
    open_metrics: bool = Field(False, alias="OPENAI_OPEN_METRICS")
    allowed_origins: str = Field("", alias="OPENAI_ALLOWED_ORIGINS", pattern=_ORIGINS)
    cog_allowed_origins: str = Field("", pattern=_ORIGINS)
    allowed_hosts: str = ""
    store: str = "~/.local/state/cog-triton/journal.db"
    store_max_bytes: int = Field(1 << 30, ge=1 << 20)
    store_days: float = Field(30.0, gt=0)
    store_background: int = Field(1000, ge=0)
    store_key_part: float = Field(0.5, gt=0, le=1)
    store_key_rows: int = Field(500_000, ge=1)
    otel_endpoint: str | None = Field(None, alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    log_verbose: int = Field(0, alias="TRITON_LOG_VERBOSE", ge=0)
    model_repository: Path = Field(ROOT / "triton_model_repo", alias="TRITON_MODEL_REPO")
    runtime_directory: Path | None = Field(None, alias="RUNTIME_DIR")
    transport: Literal["grpc", "http"] = "grpc"
    system_prompt: str = ""
    prompt_template: str | None = None
    chat_template: str | None = None
    stop_sequences: str = ""
    log_format: Literal["auto", "json", "text", "console"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    drain_seconds: float = Field(30.0, ge=0)
    max_request_bytes: int = Field(16 << 20, ge=1)
    max_file_bytes: int = Field(200 << 20, ge=1)
    receive_timeout: float = Field(60.0, gt=0)
    busy_timeout: float = Field(900.0, gt=0)
    chat_page: bool = True
    log_performance_metrics: bool = False

    @property
    def hub_token(self) -> str | None:
        return self.hf_token.get_secret_value() if self.hf_token else None

    @property
    def tokenizer_dir(self) -> str:
        """Directory, made absolute as Triton has another, or id; by default an engine directory's own."""
        if self.tokenizer is None and (engine := self.engine_dir) is not None:
            for directory in (engine, engine / "tokenizer", engine.parent / "tokenizer"):
                if (directory / "tokenizer_config.json").is_file():
                    return str(directory.resolve())
        return _absolute_if_directory(self.tokenizer or self.model)

    @property
    def store_file(self) -> Path | None:
        """Return the file of the journal; None where there is to be none, or no home to have it in."""
        file = os.path.expanduser(self.store)
        return None if file in ("0", "off", "false") or file.startswith("~") else Path(file)

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
    given = {name: environ[name] for name in VARIABLES if environ.get(name)}
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0])
            # Of a list, the first wrong item is enough.
            problems.setdefault(name, _problem(name, given[name], detail))
        text = "; ".join(problems.values())
        raise ConfigurationError(f"invalid settings: {text}") from None


def _problem(name: str, value: str, detail: ErrorDetails) -> str:
    """Return the whole value of a variable, and what is wrong with it or with an item of it."""
    problem = f"{name}={shown_value(name, value)!r}: "
    if len(detail["loc"]) > 1:
        item = str(detail["input"])
        problem += f"item {item!r}: " if item.strip() else "an empty item: "
    return problem + detail["msg"]
