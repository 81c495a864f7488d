"""An embedded engine beside its library, called directly, and beside ``vllm serve``.

All run the same requests on the same model, whose weights are random or made up: how fast a model runs
depends on its shape. Each token is one word of its tokenizer, so that a prompt of n words has n tokens and
every token can be shown as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from cog_triton.server.installation import PACKAGE_ROOT
from tools.benchmark.cli import exit_status, positive_int, progress, publish
from tools.benchmark.load import Length, Load
from tools.benchmark.measure import run_loads
from tools.benchmark.report import Check, Result
from tools.benchmark.servers import started
from tools.benchmark.targets import Endpoints

CONTESTANTS = {
    "transformers": {"engine": "engine", "stack": "generate"},
    "vllm": {
        "vllm": "vllm",
        "engine": "engine",
        "stack": "generate",
        "openai": "openai-text",
        "vllm-serve": "vllm-serve",
    },
}
# hidden, layers, heads, KV heads, intermediate, vocabulary, tied embeddings
SHAPES = {
    "tiny": (64, 2, 4, 2, 128, 1000, True),
    "135m": (576, 30, 9, 3, 1536, 49152, True),  # SmolLM 135M
    "8b": (4096, 32, 32, 8, 14336, 128256, False),  # Llama 3.1 8B
}
GPU_MEMORY = 0.9  # what vLLM takes of it by itself
VLLM_SEQUENCES = 256  # that it computes together at most, unless more are asked for
PAGE = 256  # tokens; what transformers reserves is a multiple of it
CONTEXT_LENGTH = 8192
END_ID, END = 0, "<end>"
# A target's share of a baseline's tokens a second.
RATES = {
    ("engine", "vllm"): 0.95,
    ("generate", "engine"): 0.95,
    ("generate", "vllm"): 0.95,
    ("openai-text", "vllm-serve"): 1.0,
}
ADDED_MS = 10.0  # to TTFT p50 at 16 streams on a GPU


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns the status of ``cli.main``, or 1 if a request failed."""
    options = parse(argv)
    if options.threads is not None:  # read when torch is imported, here and in the servers
        os.environ["OMP_NUM_THREADS"] = str(options.threads)

    def run() -> bool:
        with tempfile.TemporaryDirectory(prefix="engine-benchmark-") as directory:
            report = compare(options, Path(directory), sys.argv[1:] if argv is None else argv)
        print(json.dumps(report))
        failed = any(result["errors"] for result in report["results"])
        missed = any(not check["met"] for check in report.get("checks", ()))
        return not failed and not (options.check and missed)

    return exit_status(run)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cog-triton bench-engine", description=__doc__)
    add = parser.add_argument
    add("--engine", choices=CONTESTANTS, default="transformers", help="default: %(default)s")
    add(
        "--vllm-config",
        type=Path,
        metavar="FILE",
        help="YAML file of vLLM's arguments; with load_format: dummy no weights are written",
    )
    add("--shape", choices=SHAPES, default="135m", help="of the model")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", default="cpu", help="cpu or cuda")
    add("--streams", type=positive_int, nargs="+", default=[16], help="at once, each a load")
    add("--input-tokens", type=positive_int, default=32)
    add("--output-tokens", type=positive_int, default=64)
    add("--repeat", type=positive_int, default=3, metavar="N", help="rounds of each load")
    add(
        "--contestants",
        choices=[*CONTESTANTS["vllm"]],
        nargs="+",
        help="stack is generate() on tritonserver; default: all that the engine has",
    )
    add("--seed", type=int, default=0)
    add("--threads", type=positive_int, metavar="N", help="of each contestant on a CPU")
    add("--model-directory", type=Path, metavar="DIR", help="the model's, made if it is not there")
    add("--artifact-dir", type=Path, default=Path("artifacts/engine"), metavar="DIRECTORY")
    add("--check", action="store_true", help="exit with status 1 if a promise is missed")
    options = parser.parse_args(argv)
    options.contestants = options.contestants or list(CONTESTANTS[options.engine])
    if others := set(options.contestants) - set(CONTESTANTS[options.engine]):
        parser.error(f"the engine {options.engine} has no contestant {', '.join(sorted(others))}")
    return options


def compare(options: argparse.Namespace, directory: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Make the model, let the contestants take turns at every load, and publish the report."""
    # tritonserver has a working directory of its own.
    model = (options.model_directory or directory / "model").absolute()
    make_model(model, options)
    settings = environment(options, model, directory)

    def start(kind: str, cleanup: ExitStack) -> Endpoints:
        progress(f"starting {kind} ...")
        given = {**os.environ, **settings}
        return cleanup.enter_context(started(kind, given, directory))

    loads = [
        Load(
            streams,
            requests=streams,
            warmup=streams,
            warmup_tokens=min(8, options.output_tokens),
            input=Length(options.input_tokens),
            output=Length(options.output_tokens),
            ignore_eos=True,
            rounds=options.repeat,
            seed=options.seed,
        )
        for streams in options.streams
    ]
    targets = [CONTESTANTS[options.engine][name] for name in options.contestants]
    results = run_loads(targets, targets, loads, start, progress)
    about = {
        "title": f"The engine {options.engine} beside its library",
        "command": shlex.join(["cog-triton", "bench-engine", *argv]),
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    file = options.artifact_dir / "profile_export.json"
    checks = promises(results, options.device)
    return publish(about, settings, results, checks, file, options.artifact_dir)


def environment(options: argparse.Namespace, model: Path, directory: Path) -> dict[str, str]:
    """Return the settings of the engine and the stack, and write their configuration file."""
    most = max(options.streams)
    context = -(-(options.input_tokens + options.output_tokens + 1) // PAGE) * PAGE
    if options.engine == "vllm":
        arguments = {"max_batch_size": str(max(VLLM_SEQUENCES, most))}
        if options.device != "cpu":
            at_once = len(options.contestants) if options.repeat > 1 else 1
            arguments["kv_cache_free_gpu_mem_fraction"] = str(round(GPU_MEMORY / at_once, 2))
        if options.vllm_config is not None:
            arguments["vllm_config"] = str(options.vllm_config.absolute())
    else:
        # Twice what is used: some blocks stay free, and finished prompts' are kept for a while.
        arguments = {"max_tokens_in_paged_kv_cache": str(2 * (most + 1) * context)}
    config = directory / "engine.yaml"
    config.write_text(yaml.safe_dump({"server": {"tensorrt_llm": {"args": arguments}}}))
    return {
        "MODEL": str(model),
        "TRITON_MODEL_REPO": str(PACKAGE_ROOT / "triton_model_repo"),
        "ENGINE": options.engine,
        **({"DEVICE": options.device} if options.engine == "transformers" else {}),
        "MAX_SEQUENCE_LENGTH": str(context),
        "COG_TRITON_CONFIG": str(config),
    }


def promises(results: Sequence[Result], device: str) -> list[Check]:
    """Return the promises of the engine and the stack, as far as they were measured."""
    checks = []
    for one in results:
        at = f"at {one.concurrency} streams"
        for baseline, ratio in one.ratio_to_baseline.items():
            pair = (one.target, baseline)
            # vLLM keeps two cores busy while it waits for its own processes.
            bound = 0.9 if pair == ("generate", "vllm") and device == "cpu" else RATES.get(pair)
            if bound is not None:
                checks.append(Check(f"{one.target}/{baseline} {at}", ratio, bound))
        if one.target == "generate" and one.concurrency == 16 and device != "cpu":
            for baseline, added in one.ttft_p50_added_ms.items():
                name = f"generate's TTFT p50 - {baseline}'s {at}"
                checks.append(Check(name, added, ADDED_MS, "ms", least=False))
    return checks


def make_model(directory: Path, options: argparse.Namespace) -> None:
    """Write a Llama model of a shape and its tokenizer, unless they are there.

    Greedy decoding never ends early: the end token's logit is 0, and some other's is always greater.
    """
    if (directory / "tokenizer_config.json").is_file():
        return
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    progress(f"making {directory} ...")
    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied = SHAPES[options.shape]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        architectures=["LlamaForCausalLM"],
        dtype=getattr(torch, options.dtype),
    )
    if makes_weights_up(options.vllm_config):
        config.save_pretrained(directory)
    else:
        with torch.device(options.device):
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
        generator = torch.Generator(options.device).manual_seed(options.seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:  # of a normalization
                    weight.fill_(1)
                else:
                    weight.normal_(0, 0.02, generator=generator)
            for table in (model.get_input_embeddings(), model.get_output_embeddings()):
                table.weight[END_ID] = 0
        model.save_pretrained(directory)
        del model
        if options.device == "cuda":
            torch.cuda.empty_cache()
    generation = {"do_sample": False, "eos_token_id": END_ID, "pad_token_id": END_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    words = {END: END_ID} | {f"w{i}": i for i in range(1, vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    wrapped.save_pretrained(directory)


def makes_weights_up(vllm_config: Path | None) -> bool:
    """Return True if vLLM makes the weights up instead of reading them."""
    given: Mapping[str, Any] = yaml.safe_load(vllm_config.read_text()) or {} if vllm_config else {}
    return given.get("load_format") == "dummy"
