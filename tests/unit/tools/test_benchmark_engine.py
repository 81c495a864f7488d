from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark_engine
import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from cog_triton.engines.attention import TORCH_FLASH, use_attention
from cog_triton.engines.transformers import load_model
from cog_triton.repository.overrides import load_overrides
from cog_triton.text.tokenizer import load_tokenizer
from tools.benchmark.engine import (
    Load,
    Round,
    compare,
    figures,
    measure,
    prompts,
    report,
    summary,
    table,
    targets,
    token_gaps,
)
from tools.benchmark.engine_contestants import (
    Contestant,
    ContestantError,
    Prompts,
    Setup,
    Stream,
    completion_stream,
    serve_command,
    stack_environment,
    why_no_serve,
)
from tools.benchmark.engine_model import END_ID, SHAPES, make_model, parameters, text_of

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    # An output layer of its own, or a random model repeats its prompt's last token.
    make_model(directory, replace(TINY, tied=False), dtype=torch.float32, device=CPU, seed=1)
    return directory


class Paced(Contestant):
    """Makes its tokens at given times, from an invented clock."""

    def __init__(self, at: list[float], tokens: int | None = None) -> None:
        self.at, self.tokens, self.runs = at, tokens, 0
        self.prompts: list[list[int]] = []

    def run(self, prompts: Prompts, output_tokens: int) -> list[Stream]:
        self.prompts += prompts
        self.runs += 1
        made = output_tokens if self.tokens is None else self.tokens
        return [[(self.at[min(i, len(self.at) - 1)], i + 1) for i in range(made)] for _ in prompts]

    def cpu_seconds(self) -> float:
        return float(self.runs)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("shape", "parameter_count"),
    [("tiny", 138_048), ("135m", 134_515_008), ("8b", 8_030_261_248)],
)
def test_the_shapes_have_the_sizes_of_their_models(shape: str, parameter_count: int) -> None:
    sizes = parameters(SHAPES[shape].config)
    assert sum(size.numel() for size in sizes.values()) == parameter_count


@pytest.mark.parametrize("tied", [True, False])
def test_a_made_model_loads_completely_and_never_chooses_the_end_token(
    tied: bool, tmp_path: Path
) -> None:
    shape = replace(TINY, tied=tied)
    make_model(tmp_path, shape, dtype=torch.bfloat16, device=CPU, seed=0)
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
        weights.append((directory / "model-00000.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_word_is_a_token_and_is_shown_at_once(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    ids = [1, 17, TINY.vocabulary - 1]
    assert tokenizer(text_of(ids))["input_ids"] == ids
    assert [tokenizer.decode([token_id]) for token_id in ids] == ["w1", "w17", "w999"]
    assert tokenizer.eos_token_id == END_ID


def test_torch_flash_attends_as_sdpa_does(model: Path) -> None:
    random = np.random.default_rng(0)
    # One longer than a batch, so that it is prefilled in pieces beside others' tokens.
    requests = [*prompts(3, 37, TINY.vocabulary, random), *prompts(1, 100, TINY.vocabulary, random)]
    loaded = load_model(str(model), CPU, "auto")
    outputs = []
    for attention in ("sdpa", TORCH_FLASH):
        use_attention(loaded, attention)
        found = loaded.generate_batch(
            requests,
            GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=20),
            ContinuousBatchingConfig(num_blocks=64, page_size=32, max_batch_tokens=64),
        )
        outputs.append([one.generated_tokens for one in found.values()])
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs[0]}) == len(requests)
    assert max(len(set(output)) for output in outputs[0]) > 5


def test_figures_of_a_turn() -> None:
    streams = [[(0.1, 1), (0.2, 2), (0.5, 4)], [(0.3, 0), (0.3, 2), (0.4, 2), (1.0, 4)]]
    found = figures(streams, 2.0)
    assert found.tokens_per_s == pytest.approx(8.0)
    assert found.ttft_ms["p50"] == pytest.approx(200.0)
    assert found.itl_ms["p50"] == pytest.approx(150.0)
    assert found.cpu_s == 2.0


def test_tokens_that_arrive_together_share_their_wait() -> None:
    assert token_gaps([(1.0, 1), (1.4, 3), (1.5, 3), (1.7, 4)]) == pytest.approx([0.2, 0.2, 0.3])
    assert token_gaps([(1.0, 5)]) == []


def test_a_turn_with_too_few_tokens_is_refused() -> None:
    with pytest.raises(ContestantError, match="slow made 3 of 4 tokens"):
        measure("slow", Paced([0.1], tokens=3), [[1]], 4)
    with pytest.raises(ContestantError, match="slow made 0 of 4 tokens"):
        measure("slow", Paced([0.1], tokens=0), [[1]], 4)


def test_contestants_take_turns_with_prompts_of_their_own() -> None:
    a, b = Paced([0.1, 0.2]), Paced([0.2, 0.4])
    said: list[str] = []
    load = Load(streams=[1, 4], input_tokens=16, output_tokens=2, rounds=3)
    results = compare({"engine": a, "transformers": b}, load, 1000, said.append)
    order = [line.split()[4] for line in said]
    there, back = ["engine", "transformers"], ["transformers", "engine"]
    assert order == (there + back + there) * 2
    every = [tuple(prompt) for prompt in a.prompts + b.prompts]
    assert len(set(every)) == len(every) == 2 * (1 + 4) * (3 + 1)  # and a warm-up
    assert [(result.contestant, result.streams) for result in results] == [
        ("engine", 1),
        ("transformers", 1),
        ("engine", 4),
        ("transformers", 4),
    ]
    assert results[0].ratios == {"transformers": pytest.approx(2.0)}
    assert results[0].cpu_ratios == {"transformers": pytest.approx(1.0)}
    assert results[0].ttft_p50_added_ms == {"transformers": pytest.approx(-100.0)}


def test_ratios_are_of_the_same_round() -> None:
    def rounds(*rates: float) -> list[Round]:
        times = {"p50": 1.0, "p90": 1.0, "p99": 1.0}
        return [Round(rate, times, times, 1.0) for rate in rates]

    # The machine was three times as fast in the second round.
    found = summary("a", 1, {"a": rounds(10, 30, 11), "b": rounds(10, 30, 10)})
    assert found.tokens_per_s == 11
    assert found.ratios["b"] == 1.0


def results_of(rates: dict[str, float]) -> list[Any]:
    times = {"p50": 5.0, "p90": 6.0, "p99": 7.0}
    rounds = {
        name: [Round(rate, {**times, "p50": 1000 / rate}, times, 1.0)]
        for name, rate in rates.items()
    }
    return [summary(name, 16, rounds) for name in rates]


def test_targets() -> None:
    results = results_of({"transformers": 100, "engine": 96, "stack": 90, "serve": 80})
    assert {target.name: target.met for target in targets(results, "cuda")} == {
        "engine/transformers": True,
        "stack/engine": False,
        "stack TTFT - engine's, ms": True,
        "stack/serve": True,
        "stack TTFT - serve's, ms": True,
    }
    names = [target.name for target in targets(results_of({"engine": 96, "stack": 90}), "cpu")]
    assert names == ["stack/engine"]


def test_table_and_report() -> None:
    results = results_of({"transformers": 100, "engine": 96})
    lines = table(results).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["transformers", "engine"]
    assert lines[2].split()[-2:] == ["0.960", "-"]
    found = json.loads(json.dumps(report(results, device="cpu", shape="tiny")))
    assert found["shape"] == "tiny"
    assert found["results"][1]["ratios"] == {"transformers": 0.96}
    assert found["targets"] == [
        {"name": "engine/transformers", "streams": 16, "value": 0.96, "met": True}
    ]


def test_the_stack_gets_the_batching_of_the_others(model: Path, tmp_path: Path) -> None:
    setup = Setup(model, ROOT / "triton_model_repo", "cpu", context=256, cache_tokens=4096)
    file = tmp_path / "stack.yaml"
    environment = stack_environment(setup, file)
    assert environment["MAX_SEQUENCE_LENGTH"] == "256"
    assert (Path(environment["TRITON_MODEL_REPO"]) / "tensorrt_llm").is_dir()
    assert load_overrides(file)["tensorrt_llm"] == {"max_tokens_in_paged_kv_cache": "4096"}
    command = serve_command(setup, "python", 1234)
    assert command[command.index("--cb-num-blocks") + 1] == str(setup.batching.num_blocks)
    assert command[command.index("--cb-block-size") + 1] == str(setup.batching.page_size)


def test_the_stream_of_a_completion() -> None:
    def event(text: str, **rest: Any) -> str:
        return json.dumps({"choices": [{"text": text}], **rest})

    end = event("", usage={"completion_tokens": 2})
    parts = [(1.0, event("a")), (2.0, event(" b")), (2.5, end)]
    assert completion_stream(parts) == [(1.0, 1), (2.0, 2)]
    with pytest.raises(ContestantError, match="1 texts for 2 tokens"):
        completion_stream([parts[0], parts[2]])
    with pytest.raises(ContestantError, match="out of memory"):
        completion_stream([(1.0, '{"error": "out of memory"}')])


def test_a_python_that_cannot_serve_is_told_of() -> None:
    reason = why_no_serve("/nowhere/python")
    assert reason is not None
    assert "No such file" in reason


def test_the_script_compares_all_that_need_no_further_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--shape", "tiny", "--streams", "1", "4", "--output-tokens", "8", "--repeat", "1"]
    arguments += ["--serve-python", "/nowhere/python"]
    assert benchmark_engine.main(arguments) == 0
    output = capsys.readouterr()
    found = json.loads(output.out.splitlines()[-1])
    assert [(one["contestant"], one["streams"]) for one in found["results"]] == [
        (name, streams) for streams in (1, 4) for name in ("transformers", "engine", "stack")
    ]
    assert all(one["tokens_per_s"] > 0 and one["cpu_s"] > 0 for one in found["results"])
    assert "No such file" in found["skipped"]["serve"]
