"""What is hidden wherever a URL, a variable or a command line is shown or passed on."""

import json
import logging
from pathlib import Path

import pytest

from cog_triton.deployment.attached import address_of
from cog_triton.deployment.model_files import model_name, with_files
from cog_triton.errors import ConfigurationError
from cog_triton.redaction import (
    is_secret,
    name_of_url,
    shown_url,
    shown_value,
    shown_words,
    without_secrets,
)
from cog_triton.server.installation import Installation, environment
from cog_triton.settings import read_settings
from cog_triton.weights.hub import fetch_from_hub
from tools.benchmark.report import report_of

SIGNED = [
    pytest.param("https://host/m.tgz?X-Amz-Signature=SECRET", "m", id="amazon"),
    pytest.param("https://host/m.tar?sv=2024&sig=SECRET", "m", id="azure"),
    pytest.param("https://host/m.tar.gz?GoogleAccessId=a&Signature=SECRET", "m", id="google"),
    pytest.param("https://user:SECRET@host/m.tar.gz", "m", id="password"),
    pytest.param("https://SECRET@host/m.tar.xz", "m", id="token-as-a-user"),
    pytest.param("https://user:SEC/RET@host/a/m.tbz2", "m", id="password-with-a-slash"),
    pytest.param("https://user:SEC@RET@host/m.txz", "m", id="password-with-an-at"),
    pytest.param("https://host/m.tar#frag=SECRET", "m", id="fragment"),
    pytest.param("https://host/m.tar;token=SECRET", "m", id="parameter-of-the-path"),
    pytest.param("s3://bucket/m.tar?versionId=SECRET", "m", id="another-scheme"),
    pytest.param("HTTPS://HOST/A%20B.TAR?sig=SECRET", "A B", id="capitals-and-escapes"),
    pytest.param("https://host/?X-Amz-Signature=SECRET", "host", id="no-path"),
    pytest.param("https://host:8443?sig=SECRET", "host", id="no-path-but-a-port"),
    pytest.param("https://host/m.tar%3Fsig=SECRET", "m", id="escaped-question-mark"),
    pytest.param("http://[host/m.tar?sig=SECRET", "m", id="malformed"),
    pytest.param("https://host/models/llama-3.1-8b.v2/?sig=SECRET", "llama-3.1-8b.v2", id="dots"),
]


@pytest.mark.parametrize(("url", "name"), SIGNED)
@pytest.mark.parametrize("variable", ["COG_WEIGHTS", "MODEL"])
def test_a_models_name_has_nothing_secret_of_its_url(variable: str, url: str, name: str) -> None:
    assert model_name(read_settings({variable: url})) == name
    assert name_of_url(url) == name
    assert "SECRET" not in shown_url(url).replace("%3Fsig=SECRET", "")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/name", "org/name"),
        ("org/name@main", "org/name@main"),
        ("/models/llama-3.tar.gz", "llama-3"),
        ("/models/llama-3.1/", "llama-3.1"),
        ("./what?", "what?"),
    ],
)
def test_a_models_name_of_a_path_or_an_id_stays(model: str, name: str) -> None:
    assert model_name(read_settings({"MODEL": model})) == name


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("file://user:SECRET@host/m.tar?sig=SECRET", id="another-machines-file"),
        pytest.param("https:/host/m.tar?sig=SECRET", id="one-slash"),
        pytest.param("host.example/a/m.tar?sig=SECRET", id="no-scheme"),
        pytest.param("ftp://user:SECRET@host/m.tar", id="another-scheme"),
        pytest.param("http://user:SECRET@127.0.0.1:1/m.tar?sig=SECRET", id="unreachable"),
    ],
)
def test_an_error_about_a_models_url_has_nothing_secret_of_it(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.weights.download.BACKOFF", 0.0)
    settings = read_settings({"COG_WEIGHTS": source, "WEIGHTS_CACHE": str(tmp_path / "cache")})
    with pytest.raises(ConfigurationError) as caught:
        with_files(settings)
    assert "SECRET" not in str(caught.value)


def test_an_error_about_a_setting_hides_it() -> None:
    address = "http://user:SECRET@host/?sig=SECRET"
    with pytest.raises(ConfigurationError) as caught:
        read_settings({"KV_EVENTS_ENDPOINT": address, "ENGINE": "none", "TRITON_SECRETS": "a b"})
    assert "SECRET" not in str(caught.value).replace("TRITON_SECRETS", "")
    assert "ENGINE='none'" in str(caught.value)
    assert "TRITON_SECRETS='a b'" in str(caught.value)


def test_an_error_about_tritons_address_hides_its_password() -> None:
    with pytest.raises(ConfigurationError) as caught:
        address_of("https://user:SECRET@host:8001?token=SECRET")
    assert "SECRET" not in str(caught.value)
    assert address_of("grpc://user:SECRET@host:8001") == "host:8001"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://a:b@h/p?q=1 and s3://k@b/o#f.", "see https://h/p and s3://b/o"),
        ("no URL: a@b?c#d", "no URL: a@b?c#d"),
    ],
)
def test_urls_in_a_text(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


SECRET_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SESSION_TOKEN": "a",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/a",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=a",
    "DATABASE_URL": "postgresql://user:a@db/name",
    "DB_PASS": "a",
    "DOCKER_AUTH": "a",
    "GITHUBTOKEN": "a",
    "GIT_PASSWORD_OLD": "a",
    "HTTPS_PROXY": "user:a@proxy:3128",
    "HTTP_PROXY": "http://user:a@proxy:3128",
    "MYSQL_DSN": "user:a@tcp(db:3306)/name",
    "NEXUS_CREDENTIALS": "a",
    "OPENAI_API_KEYS": "a",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "https://user:a@collector:4318",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer a",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "api-key=a",
    "PGPASSWORD": "a",
    "PG_DSN": "host=db password=a",
    "PIP_INDEX_URL": "https://user:a@index/simple",
    "REDIS_URL": "redis://:a@cache:6379/0",
    "REGISTRY": "https://host/?access_token=a",
    "SLACK_WEBHOOK_SECRET_V2": "a",
    "SSH_PASSPHRASE": "a",
    "TOKEN": "a",
    "TOKEN_OF_SOMETHING": "a",
    "UPLOAD_TO": "https://host/o?X-Amz-Signature=a",
    "all_proxy": "socks5://user:a@proxy:1080",
    "my_secret_value": "a",
}
PUBLIC_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_ENDPOINT": "https://mirror.example:8080/hub",
    "HF_HOME": "/cache",
    "HF_TOKEN_PATH": "/cache/token",
    "HTTP_PROXY": "http://proxy:3128",
    "LC_ALL": "C.UTF-8",
    "MODEL": "org/name@main",
    "NO_PROXY": "localhost,127.0.0.1",
    "OPENAI_API_KEYS_FILE": "/etc/keys.txt",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
    "PWD": "/src",
    "PYTHONPATH": "/src",
    "SIMULATED_PREFILL_TOKENS_PER_S": "100",
    "TOKENIZER": "/models/a",
    "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY": "a",  # TensorRT-LLM's own, between its processes
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_MAX_TOKENS": "1",
    "STAND_IN_INTER_TOKEN_MS": "5",
}


@pytest.mark.parametrize(("name", "value"), SECRET_VARIABLES.items())
def test_a_secret_does_not_reach_tritonserver_unless_it_is_named(name: str, value: str) -> None:
    assert is_secret(name, value)
    assert shown_value(name, value) == "***"
    installation = Installation(Path("/ts"), Path("/b"))
    assert name not in environment(installation, {name: value})
    assert environment(installation, {name: value}, [name])[name] == value


@pytest.mark.parametrize("name", ["COG_WEIGHTS", "MODEL", "TOKENIZER"])
def test_a_url_of_a_model_does_not_reach_tritonserver(name: str) -> None:
    installation = Installation(Path("/ts"), Path("/b"))
    assert name not in environment(installation, {name: "https://example.com/model.tar"})


@pytest.mark.parametrize(("name", "value"), PUBLIC_VARIABLES.items())
def test_what_is_no_secret_reaches_tritonserver(name: str, value: str) -> None:
    assert environment(Installation(Path("/ts"), Path("/b")), {name: value})[name] == value
    assert shown_value(name, value) == value


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "SECRET"],
        ["--api-key=SECRET"],
        ["--hf_token", "SECRET"],
        ["--settings", "MAX_RUNNING=4", "OPENAI_API_KEYS=SECRET"],
        ["--settings=HF_TOKEN=SECRET"],
        ["-H", "Authorization: Bearer SECRET"],
        ["--header=X-Api-Key: SECRET"],
        ["--extra", '{"api_key": "SECRET", "top_p": 1}'],
        ["--url", "https://user:SECRET@host:3000/v1?key=SECRET"],
        ["--settings", "MODEL=https://host/m.tar?sig=SECRET"],
        ["https://host/m.tar#SECRET"],
    ],
    ids=" ".join,
)
def test_a_command_line_is_shown_without_its_secrets(words: list[str]) -> None:
    shown = shown_words(["bench", *words, "--tokenizer", "/t", "--max-tokens", "8"])
    assert "SECRET" not in " ".join(shown)
    assert shown[-4:] == ["--tokenizer", "/t", "--max-tokens", "8"]


def test_a_benchmarks_report_has_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "OPENAI_API_KEYS": "SECRET",
        "HF_TOKEN": "SECRET",
        "COG_WEIGHTS": "https://host/m.tar?sig=SECRET",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:SECRET@collector",
        "MAX_RUNNING": "4",
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    monkeypatch.setattr("sys.argv", ["/x/bench.py", "--api-key", "SECRET", "--settings", *words])
    report_of("Title", settings, [], []).publish(tmp_path / "bench.json")
    for file in ("bench.json", "bench.html"):
        assert "SECRET" not in (tmp_path / file).read_text()
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["settings"]["MAX_RUNNING"] == "4"
    assert found["settings"]["COG_WEIGHTS"] == "https://host/m.tar"
    assert found["command"].startswith("bench.py --api-key ")


def test_a_signed_url_that_the_hub_redirects_to_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()  # else the hub would be asked for GGUF files
    loggers = [logging.getLogger(name) for name in ("httpx", "httpcore")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logging.DEBUG)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    fetch_from_hub("org/name", None)
    assert not any(logger.isEnabledFor(logging.INFO) for logger in loggers)
