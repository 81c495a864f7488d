from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark_engine
import pytest
import torch
from transformers import AutoModelForCausalLM

from cog_triton.engines.transformers import load_model
from cog_triton.repository.variables import load_overrides
from cog_triton.text.tokenizer import load_tokenizer
from tools.benchmark.driver import Failed
from tools.benchmark.engine_comparison import Setup, environment, promises
from tools.benchmark.engine_drivers import load_for_batching
from tools.benchmark.http_drivers import completion
from tools.benchmark.load import Load
from tools.benchmark.measure import BenchmarkError
from tools.benchmark.processes import Usage
from tools.benchmark.random_model import END_ID, SHAPES, is_made, make_model
from tools.benchmark.report import Result, result, table
from tools.benchmark.servers import serve_command, started, why_no_serve
from tools.benchmark.turns import compared, run_loads, take_turns
from tools.benchmark.worker import Record

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    # An output layer of its own, or a random model repeats its prompt's last token.
    make_model(directory, replace(TINY, tied=False), dtype=torch.float32, device=CPU, seed=1)
    return directory


def text_of(ids: list[int]) -> str:
    """The text that the tokenizer turns into these ids."""
    return " ".join(f"w{token_id}" for token_id in ids)


def measured(
    target: str, rate: float, *, ttft: float = 0.005, streams: int = 16, cpu_s: float = 1.0
) -> Result:
    """A result of a round in which one stream had so many tokens a second."""
    record = Record(0.0, 10.0, [ttft, 10.0], [1, 1], 1, round(10 * rate), None)
    return result(target, Load(streams), [record], [Usage(target, cpu_s, 1.0, None)], [0.1])


def rounds_of(target: str, *rates: float) -> list[Result]:
    return [measured(target, rate) for rate in rates]


@pytest.mark.parametrize(
    ("shape", "parameter_count"),
    [("tiny", 138_048), ("135m", 134_515_008), ("8b", 8_030_261_248)],
)
def test_the_shapes_have_the_sizes_of_their_models(shape: str, parameter_count: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[shape].config)
    assert sum(weight.numel() for weight in model.parameters()) == parameter_count


@pytest.mark.parametrize("tied", [True, False])
def test_a_made_model_loads_completely_and_never_chooses_the_end_token(
    tied: bool, tmp_path: Path
) -> None:
    shape = replace(TINY, tied=tied)
    make_model(tmp_path, shape, dtype=torch.bfloat16, device=CPU, seed=0)
    assert is_made(tmp_path)
    loaded = load_model(str(tmp_path), CPU, "auto")
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.tie_word_embeddings == tied
    logits = loaded(torch.randint(1, shape.vocabulary, (8, 16))).logits
    assert (logits[..., END_ID] == 0).all()
    assert (logits.amax(-1) > 0).all()


def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    weights = []
    for number, seed in enumerate((3, 3, 4)):
        directory = tmp_path / str(number)
        make_model(directory, TINY, dtype=torch.float32, device=CPU, seed=seed)
        weights.append((directory / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_word_is_a_token_and_is_shown_at_once(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    ids = [1, 17, TINY.vocabulary - 1]
    assert tokenizer(text_of(ids))["input_ids"] == ids
    assert [tokenizer.decode([token_id]) for token_id in ids] == ["w1", "w17", "w999"]
    assert tokenizer.eos_token_id == END_ID


def test_figures_of_a_turn() -> None:
    records = [
        Record(0.0, 0.5, [0.1, 0.2, 0.5], [1, 1, 2], 1, 4, None),
        Record(0.0, 1.0, [0.3, 1.0], [2, 2], 1, 4, None),
    ]
    summary = result("engine", Load(2), records, [Usage("engine", 2.0, 1.0, None)], [0.1])
    assert summary.output_tokens_per_s == pytest.approx(8.0)
    assert summary.ttft_ms["p50"] == pytest.approx(200.0)
    assert summary.itl_ms["p50"] == pytest.approx((400 / 3 + 700 / 3) / 2)
    assert summary.cpu_s == 2.0


def test_contestants_take_turns() -> None:
    calls: list[tuple[str, int, int, bool]] = []
    said: list[str] = []

    def target(name: str, rate: float, ttft: float) -> Any:
        def measure(load: Load, turn: int, *, warm_up: bool) -> Result:
            streams = load.concurrency or 0
            calls.append((name, streams, turn, warm_up))
            return measured(name, rate, ttft=ttft, streams=streams)

        return measure

    loads = [Load(streams, rounds=3) for streams in (1, 4)]
    targets = {"engine": target("engine", 20, 0.1), "transformers": target("transformers", 10, 0.2)}
    of_loads = take_turns(targets, loads, said.append)
    there, back = ["engine", "transformers"], ["transformers", "engine"]
    assert [name for name, *_ in calls] == (there + back + there) * 2
    assert [streams for _, streams, *_ in calls] == [1] * 6 + [4] * 6
    assert [turn for *_, turn, _ in calls] == list(range(12))  # each with prompts of its own
    assert [warm for *_, warm in calls] == [True, True, False, False, False, False] * 2
    assert said[0] == "engine c=1, round 1: 20 tokens/s"
    results = [
        summary for rounds in of_loads for summary in compared(rounds, ["engine", "transformers"])
    ]
    assert [(summary.target, summary.concurrency, summary.rounds) for summary in results] == [
        ("engine", 1, 3),
        ("transformers", 1, 3),
        ("engine", 4, 3),
        ("transformers", 4, 3),
    ]
    assert results[0].ratio_to_baseline == {"transformers": pytest.approx(2.0)}
    assert results[0].cpu_ratio_to_baseline == {"transformers": pytest.approx(1.0)}
    assert results[0].ttft_p50_added_ms == {"transformers": pytest.approx(-100.0)}


def test_loads_of_one_round_are_the_same_for_targets_that_have_them_one_after_another() -> None:
    turns: list[int] = []

    def measure(load: Load, turn: int, *, warm_up: bool) -> Result:
        assert warm_up
        turns.append(turn)
        return measured("engine", 1, streams=load.concurrency or 0)

    for _ in range(2):
        take_turns({"engine": measure}, [Load(1), Load(4)], lambda _: None)
    assert turns == [0, 1, 0, 1]


def test_ratios_are_of_the_same_round() -> None:
    # The machine was three times as fast in the second round.
    rounds = {"a": rounds_of("a", 10, 30, 11), "b": rounds_of("b", 10, 30, 10)}
    summary, _ = compared(rounds, ["b"])
    assert summary.output_tokens_per_s == 11
    assert summary.ratio_to_baseline["b"] == 1.0


def test_requests_and_errors_of_all_rounds_are_told() -> None:
    short = Record(0.0, 1.0, [], [], 1, 0, "short answer")
    bad = result("a", Load(16), [short], [Usage("a", 3.0, 2.0, None)], [0.1])
    [summary] = compared({"a": [measured("a", 10), bad]}, [])
    assert (summary.requests, summary.errors) == (2, {"short answer": 1})
    assert summary.processes == [{"role": "a", "cpu_s": 2.0, "rss_mb": 2.0, "uss_mb": None}]
    assert summary.ttft_ms["p50"] is None  # one round has none
    assert "medians of 2 rounds" in table([summary])


def results_of(rates: dict[str, float]) -> list[Result]:
    rounds = {name: [measured(name, rate, ttft=1 / rate)] for name, rate in rates.items()}
    return compared(rounds, list(rates))


def test_targets() -> None:
    results = results_of({"transformers": 100, "engine": 96, "generate": 90, "serve": 80})
    assert {check.name: check.met for check in promises(results, "cuda")} == {
        "engine/transformers at 16 streams": True,
        "generate/engine at 16 streams": False,
        "generate's TTFT p50 - engine's at 16 streams": True,
        "generate/serve at 16 streams": True,
        "generate's TTFT p50 - serve's at 16 streams": True,
    }
    by_name = {check.name: check for check in promises(results, "cpu")}
    assert by_name["generate/engine at 16 streams"].measured == "0.938"
    names = [check.name for check in promises(results_of({"engine": 96, "generate": 90}), "cpu")]
    assert names == ["generate/engine at 16 streams"]


def test_targets_of_vllm() -> None:
    results = results_of({"vllm": 100, "engine": 94, "generate": 92})
    assert {check.name: check.met for check in promises(results, "cuda")} == {
        "engine/vllm at 16 streams": False,
        "generate/vllm at 16 streams": False,
        "generate/engine at 16 streams": True,
        "generate's TTFT p50 - vllm's at 16 streams": True,
        "generate's TTFT p50 - engine's at 16 streams": True,
    }
    assert {check.name: check.met for check in promises(results, "cpu")} == {
        "engine/vllm at 16 streams": False,
        "generate/vllm at 16 streams": True,
        "generate/engine at 16 streams": True,
    }


def test_vllm_gets_its_file_and_a_share_of_the_gpu(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    setup = Setup(tmp_path, tmp_path, "cuda", [1, 300], 8, 8, engine="vllm", vllm_config=file)
    assert setup.engine_parameters == {
        "max_batch_size": "300",
        "kv_cache_free_gpu_mem_fraction": "0.9",
        "vllm_config": str(file),
    }
    three = replace(setup, at_once=3)
    assert three.engine_parameters["kv_cache_free_gpu_mem_fraction"] == "0.3"
    settings = environment(setup, tmp_path / "stack.yaml")
    assert settings["ENGINE"] == "vllm"
    assert "DEVICE" not in settings
    on_cpu = Setup(tmp_path, tmp_path, "cpu", [4], 8, 8, engine="vllm")
    assert on_cpu.engine_parameters == {"max_batch_size": "256"}


def test_weights_that_vllm_makes_up_are_not_written(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("load_format: dummy\n")
    arguments = ["--engine", "vllm", "--shape", "tiny", "--dtype", "bfloat16"]
    options = benchmark_engine.parse([*arguments, "--vllm-config", str(file)])
    assert options.contestants == benchmark_engine.NAMES["vllm"]
    benchmark_engine.make(tmp_path / "model", options)
    assert is_made(tmp_path / "model")
    assert not list(tmp_path.glob("**/*.safetensors"))
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(SystemExit):
        benchmark_engine.parse([*arguments, "--contestants", "serve"])


def test_table() -> None:
    lines = table(results_of({"transformers": 100, "engine": 96})).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["transformers*", "engine*"]
    assert lines[2].split()[-2:] == ["-", "0.96"]
    assert lines[-3].split() == ["engine*", "c=16", "engine=1.042"]


def test_all_get_the_same_batching(model: Path, tmp_path: Path) -> None:
    setup = Setup(model, ROOT / "triton_model_repo", "cpu", [7], 100, 100)
    file = tmp_path / "stack.yaml"
    settings = environment(setup, file)
    assert settings["MAX_SEQUENCE_LENGTH"] == "256"
    assert (Path(settings["TRITON_MODEL_REPO"]) / "tensorrt_llm").is_dir()
    assert load_overrides(file)["tensorrt_llm"] == {"max_tokens_in_paged_kv_cache": "4096"}
    with (
        started("engine", settings, tmp_path) as engine,
        started("transformers", settings, tmp_path, use_async_batching="true") as transformers,
    ):
        assert transformers.engine == {**engine.engine, "use_async_batching": "true"}
        assert engine.engine["max_tokens_in_paged_kv_cache"] == "4096"
    loaded, context_length, batching = load_for_batching(engine.engine)
    assert (loaded.device.type, context_length) == ("cpu", 256)
    assert batching.num_blocks == 4096 // batching.page_size
    command = serve_command(engine.engine, batching, "python", 1234)
    assert command[command.index("serve") + 1] == str(model)
    assert command[command.index("--cb-num-blocks") + 1] == str(batching.num_blocks)
    assert command[command.index("--cb-block-size") + 1] == str(batching.page_size)
    assert command[command.index("--attn-implementation") + 1] == "sdpa"
    assert command[command.index("--device") + 1] == "cpu"


def test_a_target_that_cannot_be_started_is_told_of(model: Path, tmp_path: Path) -> None:
    setup = Setup(model, ROOT / "triton_model_repo", "cpu", [1], 8, 8)
    settings = environment(setup, tmp_path / "stack.yaml")

    def start(kind: str, cleanup: Any) -> Any:
        return cleanup.enter_context(started(kind, settings, tmp_path, "/nowhere/python"))

    with pytest.raises(BenchmarkError, match=r"cannot run transformers serve: .*No such file"):
        run_loads(["serve"], [], setup.loads, start, print)


def test_the_stream_of_a_completion() -> None:
    def event(text: str, **rest: Any) -> str:
        return json.dumps({"choices": [{"text": text}], **rest})

    end = event("", usage={"completion_tokens": 2})
    parts = [(1.0, event("a")), (2.0, event(" b")), (2.5, end)]
    answer = completion(parts)
    assert (answer.times, answer.tokens, answer.total) == ([1.0, 2.0], [1, 1], 2)
    with pytest.raises(Failed, match="1 texts for 2 tokens"):
        completion([parts[0], parts[2]])
    with pytest.raises(Failed, match="out of memory"):
        completion([(1.0, '{"error": "out of memory"}')])


def test_a_python_that_cannot_serve_is_told_of() -> None:
    reason = why_no_serve("/nowhere/python")
    assert reason is not None
    assert "No such file" in reason


@pytest.mark.slow
def test_the_script_compares_all_that_need_no_further_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--shape", "tiny", "--streams", "1", "4", "--output-tokens", "8", "--repeat", "2"]
    arguments += ["--serve-python", "/nowhere/python"]
    assert benchmark_engine.main(arguments) == 0
    output = capsys.readouterr()
    report = json.loads(output.out.splitlines()[-1])
    targets = ("transformers", "engine", "generate")
    assert [(entry["target"], entry["concurrency"]) for entry in report["results"]] == [
        (name, streams) for name in targets for streams in (1, 4)
    ]
    for entry in report["results"]:
        assert entry["output_tokens_per_s"] > 0
        assert entry["cpu_s"] > 0
        assert (entry["errors"], entry["output_tokens"]) == ({}, 8 * entry["concurrency"])
        assert set(entry["ratio_to_baseline"]) == {*targets} - {entry["target"]}
    assert report["options"]["shape"] == "tiny"
    assert "No such file" in report["skipped"]["serve"]
    assert {check["name"] for check in report["checks"]} == {
        f"{pair} at {streams} streams"
        for pair in ("engine/transformers", "generate/engine")
        for streams in (1, 4)
    }
    assert json.loads((tmp_path / "artifacts/engine/profile_export.json").read_text()) == report
