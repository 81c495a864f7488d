"""An embedded engine beside its library: the settings, the loads and the promises of that comparison.

The targets run the same requests on the same model in the same batches: the library called directly, which
is the ceiling (transformers' continuous batching, which streams nothing, or vLLM's AsyncLLM); the engine of
this package without Triton; the stack, which is ``generate()`` on a tritonserver with that engine; with the
engine on transformers ``transformers serve``; and with vLLM the OpenAI face beside ``vllm serve``, both of
which stream text completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tools.benchmark.checks import Check, at_least, at_most
from tools.benchmark.load import Length, Load
from tools.benchmark.machine import server_environment
from tools.benchmark.measure import Running
from tools.benchmark.report import Result
from tools.benchmark.servers import started
from tools.benchmark.turns import Say, run_loads

# The names that the command line has, and their targets, by engine.
CONTESTANTS = {
    "transformers": {
        "transformers": "transformers",
        "engine": "engine",
        "stack": "generate",
        "serve": "serve",
    },
    "vllm": {
        "vllm": "vllm",
        "engine": "engine",
        "stack": "generate",
        "openai": "openai-text",
        "vllm-serve": "vllm-serve",
    },
}
GPU_MEMORY = 0.9  # what vLLM takes of it by itself
VLLM_SEQUENCES = 256  # that it computes together at most, unless more are asked for
# What a target's tokens a second have to be of another's.
RATES = {
    ("engine", "transformers"): 0.95,
    ("engine", "vllm"): 0.95,
    ("generate", "engine"): 0.95,
    ("generate", "serve"): 1.0,
    ("generate", "vllm"): 0.95,
    ("openai-text", "vllm-serve"): 1.0,
}
# vLLM keeps two cores busy while it waits for its own processes.
RATES_ON_CPU = {("generate", "vllm"): 0.9}
WARM_UP_TOKENS = 8
PAGE = 256  # tokens; what transformers reserves is a multiple of it


@dataclass(frozen=True)
class Setup:
    """The settings that all targets share.

    Attributes:
        model: directory of the model.
        model_repository: directory of the Triton models' templates.
        device: cpu or cuda.
        streams: how many start together; a load for each number.
        input_tokens, output_tokens: of each stream.
        rounds: how often each target has its turn.
        seed: of the prompts, which are all different.
        engine: transformers or vllm.
        vllm_config: file of further arguments of vLLM's.
        at_once: how many contestants hold a model at the same time.
        alone: for transformers called directly, see ``engine_drivers.ASYNC_BATCHING``.
    """

    model: Path
    model_repository: Path
    device: str
    streams: Sequence[int]
    input_tokens: int
    output_tokens: int
    rounds: int = 3
    seed: int = 0
    engine: str = "transformers"
    vllm_config: Path | None = None
    at_once: int = 1
    alone: Mapping[str, str] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its output together."""
        return -(-(self.input_tokens + self.output_tokens + 1) // PAGE) * PAGE

    @property
    def engine_parameters(self) -> dict[str, str]:
        """Variables of the tensorrt_llm model, besides those that settings give it."""
        if self.engine == "vllm":
            return self._vllm_parameters
        # Twice what is used: some blocks stay free, and finished prompts' are kept for a while.
        cache = 2 * (max(self.streams) + 1) * self.context
        return {"max_tokens_in_paged_kv_cache": str(cache)}

    @property
    def _vllm_parameters(self) -> dict[str, str]:
        parameters = {"max_batch_size": str(max(VLLM_SEQUENCES, *self.streams))}
        if self.device != "cpu":
            fraction = round(GPU_MEMORY / self.at_once, 2)
            parameters["kv_cache_free_gpu_mem_fraction"] = str(fraction)
        if self.vllm_config is not None:
            parameters["vllm_config"] = str(self.vllm_config)
        return parameters

    @property
    def loads(self) -> list[Load]:
        return [
            Load(
                streams,
                requests=streams,
                warmup=streams,
                warmup_tokens=min(WARM_UP_TOKENS, self.output_tokens),
                input=Length(self.input_tokens),
                output=Length(self.output_tokens),
                ignore_eos=True,
                rounds=self.rounds,
                seed=self.seed,
            )
            for streams in self.streams
        ]


def environment(setup: Setup, config: Path) -> dict[str, str]:
    """Settings of the engine and the stack, after their configuration file has been written."""
    arguments = {"args": setup.engine_parameters}
    config.write_text(yaml.safe_dump({"server": {"tensorrt_llm": arguments}}))
    return {
        "MODEL": str(setup.model),
        "TRITON_MODEL_REPO": str(setup.model_repository),
        "ENGINE": setup.engine,
        **({"DEVICE": setup.device} if setup.engine == "transformers" else {}),
        "MAX_SEQUENCE_LENGTH": str(setup.context),
        "COG_TRITON_CONFIG": str(config),
    }


def compare(
    setup: Setup,
    contestants: Sequence[str],
    directory: Path,
    serve_python: str,
    progress: Say,
) -> list[Result]:
    """Lets the contestants take turns at every load.

    Args:
        contestants: names of the engine's ``CONTESTANTS``.
        directory: an existing one for files.
        serve_python: the Python that can run ``transformers serve``.

    Raises:
        CogTritonError, BenchmarkError: one could not be started or measured.
    """
    settings = environment(setup, directory / "engine.yaml")

    def start(kind: str, cleanup: ExitStack) -> Running:
        progress(f"starting {kind} ...")
        # What runs in processes of its own needs the rest of the environment as well.
        given = {**server_environment(()), **settings} if kind == "openai" else settings
        return cleanup.enter_context(started(kind, given, directory, serve_python, **setup.alone))

    targets = [CONTESTANTS[setup.engine][name] for name in contestants]
    return run_loads(targets, targets, setup.loads, start, progress)


def promises(results: Sequence[Result], device: str) -> list[Check]:
    """Return the promises of the engine and the stack, as far as they were measured."""
    return [
        check for result in results for check in (*_rates(result, device), *_delays(result, device))
    ]


def _rates(result: Result, device: str) -> list[Check]:
    least = RATES | (RATES_ON_CPU if device == "cpu" else {})
    return [
        at_least(f"{result.target}/{baseline} {_at(result)}", ratio, bound, digits=3)
        for baseline, ratio in result.ratio_to_baseline.items()
        if (bound := least.get((result.target, baseline))) is not None
    ]


def _delays(result: Result, device: str) -> list[Check]:
    checks = []
    for baseline, added in result.ttft_p50_added_ms.items():
        name = f"{result.target}'s TTFT p50 - {baseline}'s {_at(result)}"
        if (result.target, baseline) == ("generate", "serve"):
            checks.append(at_most(name, added, 0.0, "ms"))
        elif (
            (result.target, result.concurrency) == ("generate", 16)
            and baseline in ("engine", "vllm")
            and device != "cpu"  # where it is less than a step
        ):
            checks.append(at_most(name, added, 10.0, "ms"))
    return checks


def _at(result: Result) -> str:
    return f"at {result.concurrency} streams"
