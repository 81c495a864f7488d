import re
from pathlib import Path

import pytest

from cog_triton.deployment.template_variables import read_overrides
from cog_triton.errors import ConfigurationError
from cog_triton.settings import VARIABLES, Settings, misspelt_variables, read_settings
from tests.support import ROOT


def test_an_empty_variable_counts_as_unset_and_zero_does_not() -> None:
    assert read_settings({"TRITON_HTTP_PORT": "", "END_ID": ""}) == read_settings({})
    settings = read_settings({"TRITON_HTTP_PORT": "0", "END_ID": "0"})
    assert (settings.http_port, settings.end_ids) == (0, (0,))


@pytest.mark.parametrize("value", ["0", "off", "False", "none"])
def test_a_journal_can_be_turned_off(value: str) -> None:
    assert read_settings({"STORE": value}).store_file is None


@pytest.mark.parametrize("value", ["1", "on", "True", "yes"])
def test_a_journal_that_is_turned_on_is_the_default_file(value: str) -> None:
    assert read_settings({"STORE": value}).store_file == read_settings({}).store_file


def test_end_tokens_are_a_list_with_or_without_spaces() -> None:
    assert read_settings({"END_ID": "2"}).end_ids == (2,)
    assert read_settings({"END_ID": " 1, 106 "}).end_ids == (1, 106)


@pytest.mark.parametrize("wrong", ["1,x", "-1", "1,,2", ",", "1;2", "4294967296", "x,1,y"])
def test_a_list_that_is_wrong_is_named_once_and_whole(wrong: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_settings({"END_ID": wrong})
    assert str(caught.value).count("END_ID") == 1
    assert f"END_ID='{wrong}': " in str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    wrong = {"TRITON_HTTP_PORT": "http", "ENGINE": "magic", "DEVICE": "cuda:x", "DTYPE": "half"}
    wrong["TRITON_START_TIMEOUT"] = "0"
    with pytest.raises(ConfigurationError) as caught:
        read_settings(wrong)
    for name, value in wrong.items():
        assert f"{name}='{value}'" in str(caught.value)
    assert read_settings({"DEVICE": "cuda:3", "DTYPE": "bfloat16"}).device == "cuda:3"


def test_config_yaml_is_read_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_overrides(read_settings({})) == {}
    Path("config.yaml").write_text("server: {ensemble: {args: {triton_max_batch_size: 16}}}")
    assert read_overrides(read_settings({})) == {"ensemble": {"triton_max_batch_size": 16}}
    with pytest.raises(ConfigurationError, match=r"COG_TRITON_CONFIG=none\.yaml does not exist"):
        read_overrides(read_settings({"COG_TRITON_CONFIG": "none.yaml"}))


def test_a_directory_is_made_absolute_and_an_id_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    absolute = str(tmp_path / "model")
    assert read_settings({"MODEL": "model"}).model_dir == absolute
    assert read_settings({"MODEL": "org/model"}).model_dir == "org/model"
    assert read_settings({"MODEL": "a/b", "TOKENIZER": "model"}).tokenizer_dir == absolute


def test_every_setting_is_described_and_nothing_else_reads_the_environment() -> None:
    undescribed = [n for n, field in Settings.model_fields.items() if not field.description]
    assert undescribed == []
    reads = r"os\.(getenv|environ\.get)|(?<!del )os\.environ\[\w+\](?! =)"
    readers = [
        file.relative_to(ROOT).as_posix()
        for file in [*ROOT.glob("cog_triton/**/*.py"), *ROOT.glob("triton_model_repo/**/*.py")]
        if re.search(reads, file.read_text()) and file.parent.name != "cli"
    ]
    assert readers == ["cog_triton/api/cog/live_stream.py"]  # a descriptor's number


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MAX_RUNING", "MAX_RUNNING"),
        ("MAX_RUNNIG", "MAX_RUNNING"),
        ("MAX_WATING", "MAX_WAITING"),
        ("QUEUE_TIMOUT", "QUEUE_TIMEOUT"),
        ("TRITON_GRCP_PORT", "TRITON_GRPC_PORT"),
        ("SERVED_MODEL_NAMES", "SERVED_MODEL_NAME"),
        ("MODLE", "MODEL"),
        ("ENGIN", "ENGINE"),
        ("DEVCIE", "DEVICE"),
        ("OPENAI_API_KEY_FILE", "OPENAI_API_KEYS_FILE"),
        ("max_running", "MAX_RUNNING"),
        ("Engine_Dir", "ENGINE_DIR"),
    ],
)
def test_a_misspelt_variable_is_reported(name: str, meant: str) -> None:
    assert misspelt_variables({name: "1"}) == [
        f"the environment variable {name} has no effect; did you mean {meant}?"
    ]


OTHERS = [
    *("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "HF_HOME", "HF_HUB_OFFLINE"),
    *("MODE", "MODELS", "STORES", "SCORE", "DEVICES", "ENGINES", "ENGINE_ID", "HOST", "PORT"),
    *("TOKENIZERS_PARALLELISM", "TRITON_CACHE_DIR", "TRITON_INTERPRET", "XDG_RUNTIME_DIR"),
    *("LOCAL_WORLD_SIZE", "COG_MAX_CONCURRENCY", "COG_PREDICT_TYPE_STUB", "COG_LOG_LEVEL"),
    *("OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_HEADERS", "VLLM_ENGINE", "DYN_NAMESPACE"),
    *("model", "store", "transport", "http_proxy", "PATH", "HOME", "LANG", "SHELL"),
    *("MODEL_PORT", "STORE_SERVICE_HOST", "NVIDIA_TRITON_SERVER_VERSION", "CUDA_VERSION"),
]


def test_variables_of_others_are_left_alone() -> None:
    for name in (*VARIABLES, *OTHERS):
        assert misspelt_variables({name: "1"}) == [], name
