"""An embedded engine beside its library, called directly, and beside ``vllm serve``.

All run the same requests on the same model, whose weights are random or made up: how fast a model runs
depends on its shape. Each token is one word of its tokenizer, so that a prompt of n words has n tokens and
every token can be shown as soon as it is there.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from cog_triton.errors import ConfigurationError
from tools.benchmark import targets as ways
from tools.benchmark.engines_command import Options
from tools.benchmark.load import loads_of
from tools.benchmark.measuring import Result, run_loads
from tools.benchmark.processes import free_port
from tools.benchmark.report import Check, Report, report_of
from tools.benchmark.servers import no_server, process, started
from tools.benchmark.targets import MODEL, Endpoints, Inputs, Parts, Target, fast_tokenizer
from tools.command_line import begin, progress
from tools.server_sent_events import Part

GPU_MEMORY = 0.9  # what vLLM takes of it by itself
VLLM_SEQUENCES = 256  # that it computes together at most, unless more are asked for
START_SECONDS = 300.0
PAGE = 256  # tokens; what transformers reserves is a multiple of it
CONTEXT_LENGTH = 65536
END_ID, END = 0, "<end>"
# The least share of a baseline's tokens a second that a target must have, by target and baseline.
RATES = {
    ("engine", "vllm"): 0.95,
    ("generate", "engine"): 0.95,
    ("generate", "vllm"): 0.95,
    ("openai-text", "vllm-serve"): 1.0,
}
SHAPES = Path(__file__).with_name("shapes.yaml")
ADDED_MS = 10.0  # to TTFT p50 at 16 streams on a GPU


class OpenAiText(ways.OpenAiSse):
    """POST /v1/completions: the model has no chat template."""

    name, path = "openai-text", "/v1/completions"

    def prompt(self, text: str) -> dict[str, Any]:
        return {"prompt": text}


class VllmServe(OpenAiText):
    name = server = "vllm-serve"


class Vllm(Target):
    """vLLM's AsyncLLM with the engine's arguments, in the load generator's process."""

    name = "vllm"

    def connect(self) -> Any:
        from cog_triton.engines.vllm_arguments import loading_arguments

        arguments = loading_arguments(self.endpoints.engine)
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        self._sampling = partial(SamplingParams, **greedy, output_kind=RequestOutputKind.DELTA)
        usage = UsageContext.OPENAI_API_SERVER  # as the engine in Triton is configured
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=usage)

    async def ask(self, inputs: Inputs, request_id: str) -> Parts:
        ids = fast_tokenizer(self.endpoints.tokenizer).encode(inputs["prompt"]).ids
        sampling, count = self._sampling(max_tokens=inputs["max_tokens"]), 0
        asked = self.client.generate({"prompt_token_ids": ids}, sampling, request_id=request_id)
        async for output in asked:
            ids = output.outputs[0].token_ids
            count += len(ids)
            yield Part(tokens=count, ids=ids)

    async def close(self) -> None:
        self.client.shutdown()  # not in a thread: its task on this loop would see the engine end
        del self.client  # else it is shut down once more, when the interpreter is half gone


CONTESTANTS: dict[str, type[Target]] = {
    "vllm": Vllm,
    "engine": ways.RawEngine,
    "stack": ways.Generate,
    "openai": OpenAiText,
    "vllm-serve": VllmServe,
}


@contextmanager
def vllm_serve(environment: Mapping[str, str], log: Path) -> Iterator[Endpoints]:
    from cog_triton.engines.vllm_arguments import loading_arguments

    with no_server(environment) as endpoints:
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = vllm_command(loading_arguments(endpoints.engine), port)
        given = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with process(command, given, log, f"{url}/health", START_SECONDS) as pid:
            yield replace(endpoints, url=url, pids=(pid,))


def vllm_command(arguments: Mapping[str, Any], port: int) -> list[str]:
    """Return the command line of ``vllm serve`` for arguments of vLLM's AsyncEngineArgs."""
    # vLLM's frontend in Rust does not take all options, so only those are used that it takes. What is left
    # out is not needed: each request says how it is sampled.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    if os.environ.get("VLLM_USE_RUST_FRONTEND"):  # which the module does not read
        command[2:] = ["vllm.entrypoints.cli.main", "serve"]
    command += [arguments["model"], "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", MODEL, "--disable-uvicorn-access-log"]
    for name in sorted(arguments.keys() - {"model", "generation_config", "skip_tokenizer_init"}):
        option = name.replace("_", "-")
        value = arguments[name]
        if isinstance(value, bool):  # its --config would drop what is false
            command.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            command += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    return command


def main(options: Options) -> int:
    """Return 1 if a request failed, or with ``check`` if a goal was missed."""
    begin()
    known = CONTESTANTS.keys() if options.engine == "vllm" else {"engine", "stack"}
    options.contestants = options.contestants or [name for name in CONTESTANTS if name in known]
    if others := set(options.contestants) - known:
        raise ConfigurationError(f"the engine {options.engine} has no {', '.join(sorted(others))}")
    with tempfile.TemporaryDirectory(prefix="engine-benchmark-") as directory:
        report = compare(options, Path(directory))
    found = report.publish(options.artifact_dir / "benchmark.json")
    print(json.dumps(found))
    failed = any(result["errors"] for result in found["results"])
    return int(failed or (options.check and not report.met))


def compare(options: Options, directory: Path) -> Report:
    """Make the model and let the contestants take turns at every load."""
    # tritonserver has a working directory of its own.
    model = (options.model_directory or directory / "model").absolute()
    make_model(model, options)
    settings = environment(options, model, directory)

    def start(kind: str) -> AbstractContextManager[Endpoints]:
        given = {**os.environ, **settings}
        if kind == "vllm-serve":
            return vllm_serve(given, directory / "vllm-serve.log")
        return started(kind, given, directory)

    loads = [
        replace(load, requests=load.concurrency, warmup=load.concurrency)
        for load in loads_of(options, options.streams)
    ]
    targets = [CONTESTANTS[name] for name in options.contestants]
    results = run_loads(targets, targets, loads, start)
    title = f"The engine {options.engine} beside its library"
    return report_of(title, settings, results, goals(results, options.device))


def environment(options: Options, model: Path, directory: Path) -> dict[str, str]:
    """Return the settings of the engine and the stack, and write their configuration file."""
    most = max(options.streams)
    tokens = options.input_tokens + options.output_tokens + 1
    context = math.ceil(tokens / PAGE) * PAGE
    if options.engine == "vllm":
        arguments = {"max_batch_size": str(max(VLLM_SEQUENCES, most))}
        if options.device != "cpu":
            share = round(GPU_MEMORY / len(options.contestants), 2)
            arguments["kv_cache_free_gpu_mem_fraction"] = str(share)
        if options.vllm_config is not None:
            arguments["vllm_config"] = str(options.vllm_config.absolute())
    else:
        # Twice what is used: some blocks stay free, and finished prompts' are kept for a while.
        arguments = {"max_tokens_in_paged_kv_cache": str(2 * (most + 1) * context)}
    config = directory / "engine.yaml"
    config.write_text(yaml.safe_dump({"server": {"tensorrt_llm": {"args": arguments}}}))
    return {
        "MODEL": str(model),
        "ENGINE": options.engine,
        **({"DEVICE": options.device} if options.engine == "transformers" else {}),
        "MAX_SEQUENCE_LENGTH": str(context),
        "COG_TRITON_CONFIG": str(config),
    }


def goals(results: Sequence[Result], device: str) -> list[Check]:
    """Return the goals for the engine and the stack that were measured."""
    checks = []
    for one in results:
        at = f"at {one.concurrency} streams"
        for baseline, ratios in one.ratios.items():
            pair = (one.target, baseline)
            # vLLM keeps two cores busy while it waits for its own processes.
            bound = 0.9 if pair == ("generate", "vllm") and device == "cpu" else RATES.get(pair)
            if bound is not None:
                checks.append(Check(f"{one.target}/{baseline} {at}", ratios["tokens_per_s"], bound))
            if one.target == "generate" and one.concurrency == 16 and device != "cpu":
                name, added = f"generate's TTFT p50 - {baseline}'s {at}", ratios["ttft_added_ms"]
                checks.append(Check(name, added, ADDED_MS, "ms", least=False))
    return checks


def make_model(directory: Path, options: Options) -> None:
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
    ends = {"bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": END_ID}
    config = LlamaConfig(
        **yaml.safe_load(SHAPES.read_text(encoding="utf-8"))[options.shape],
        **ends,
        max_position_embeddings=CONTEXT_LENGTH,
        architectures=["LlamaForCausalLM"],
        dtype=getattr(torch, options.dtype),
    )
    made_up = (options.vllm_config and yaml.safe_load(options.vllm_config.read_text())) or {}
    if made_up.get("load_format") == "dummy":  # vLLM makes the weights up
        config.save_pretrained(directory)
    else:
        torch.manual_seed(options.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).requires_grad_(False)
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[END_ID] = 0
        model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, **ends}))
    words = {END: END_ID} | {f"w{i}": i for i in range(1, config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    wrapped.save_pretrained(directory)
