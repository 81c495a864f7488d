"""The embedded engine beside transformers: the settings, the loads and the promises of that comparison.

Four targets run the same requests on the same model in the same batches: transformers' continuous
batching called directly, which streams nothing and is the ceiling; this package's engine without Triton;
the stack, which is ``generate()`` on a tritonserver with that engine; and ``transformers serve``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tools.benchmark.checks import Check, at_least, at_most
from tools.benchmark.load import Length, Load
from tools.benchmark.measure import Running
from tools.benchmark.report import Result
from tools.benchmark.servers import started
from tools.benchmark.turns import Say, run_loads

# The names that the command line has, and their targets.
CONTESTANTS = {
    "transformers": "transformers",
    "engine": "engine",
    "stack": "generate",
    "serve": "serve",
}
WARM_UP_TOKENS = 8
PAGE = 256  # tokens; what transformers reserves is a multiple of it


@dataclass(frozen=True)
class Setup:
    """What all targets have in common.

    Attributes:
        model: directory of the model.
        model_repository: directory of the Triton models' templates.
        device: cpu or cuda.
        streams: how many start together; a load for each number.
        input_tokens, output_tokens: of each stream.
        rounds: how often each target has its turn.
        seed: of the prompts, which are all different.
        attention: transformers' attention implementation; None is the engine's choice.
        cuda_graph: whether the model's forward pass is captured.
        alone: for transformers called directly, see ``engine_drivers.TRANSFORMERS_ALONE``.
    """

    model: Path
    model_repository: Path
    device: str
    streams: Sequence[int]
    input_tokens: int
    output_tokens: int
    rounds: int = 3
    seed: int = 0
    attention: str | None = None
    cuda_graph: bool = False
    alone: Mapping[str, str] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its output together."""
        return -(-(self.input_tokens + self.output_tokens + 1) // PAGE) * PAGE

    @property
    def engine_parameters(self) -> dict[str, str]:
        """Variables of the tensorrt_llm model, besides those that settings give it."""
        # Twice what is used: some blocks stay free, and finished prompts' are kept for a while.
        cache = 2 * (max(self.streams) + 1) * self.context
        return {
            "max_tokens_in_paged_kv_cache": str(cache),
            **({} if self.attention is None else {"attn_implementation": self.attention}),
            **({"use_cuda_graph": "true"} if self.cuda_graph else {}),
        }

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
        "ENGINE": "transformers",
        "DEVICE": setup.device,
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
        contestants: names of ``CONTESTANTS``.
        directory: an existing one for files.
        serve_python: the Python that can run ``transformers serve``.

    Raises:
        CogTritonError, BenchmarkError: one could not be started or measured.
    """
    settings = environment(setup, directory / "engine.yaml")

    def start(kind: str, cleanup: ExitStack) -> Running:
        progress(f"starting {kind} ...")
        return cleanup.enter_context(
            started(kind, settings, directory, serve_python, **setup.alone)
        )

    targets = [CONTESTANTS[name] for name in contestants]
    return run_loads(targets, targets, setup.loads, start, progress)


def promises(results: Sequence[Result], device: str) -> list[Check]:
    """What the engine and the stack have to reach, as far as it was measured."""
    checks = []
    for result in results:
        ratios, added = result.ratio_to_baseline, result.ttft_p50_added_ms
        target, streams = result.target, result.concurrency
        at = f"at {streams} streams"
        if target == "engine" and "transformers" in ratios:
            checks.append(
                at_least(f"engine/transformers {at}", ratios["transformers"], 0.95, digits=3)
            )
        if target == "generate" and "engine" in ratios:
            checks.append(at_least(f"generate/engine {at}", ratios["engine"], 0.95, digits=3))
            if streams == 16 and device.startswith("cuda"):  # on a CPU it is less than a step
                name = f"generate's TTFT p50 - engine's {at}"
                checks.append(at_most(name, added["engine"], 10.0, "ms"))
        if target == "generate" and "serve" in ratios:
            checks.append(at_least(f"generate/serve {at}", ratios["serve"], 1.0, digits=3))
            name = f"generate's TTFT p50 - serve's {at}"
            checks.append(at_most(name, added["serve"], 0.0, "ms"))
    return checks
