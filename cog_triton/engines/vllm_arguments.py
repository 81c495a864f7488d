"""The arguments of vLLM: of its engine, for this machine, and of a request's sampling."""

from collections.abc import Mapping
from typing import Any

from cog_triton.engines import library
from cog_triton.engines.base import GenerationRequest
from cog_triton.engines.interpreter import prepare_for_vllm
from cog_triton.engines.library_arguments import Arguments, table_arguments, with_file
from cog_triton.protocol.names import KV_BLOCK_TOKENS
from cog_triton.request.guide import Guide, GuideKind

# Holds 8,192 tokens of a model of 8 B parameters.
CPU_CACHE_BYTES = 1 << 30
# Backends of structured output that can leave out white space in JSON.
_WITHOUT_WHITESPACE = ("xgrammar", "guidance")
# The arguments of StructuredOutputsParams that do not have the name of their kind of guide.
_GUIDE_ARGUMENTS = {GuideKind.JSON_SCHEMA: "json", GuideKind.GRAMMAR: "grammar"}
_MAX_SEED = 2**63


def loading_arguments(parameters: Mapping[str, str]) -> Arguments:
    """Return the arguments of ``vllm.AsyncEngineArgs`` on this machine. Readies the process for vLLM."""
    arguments = engine_arguments(parameters)
    prepare_for_vllm()
    return on_device(arguments, cpu=is_on_cpu())


def engine_arguments(parameters: Mapping[str, str]) -> Arguments:
    """Return the arguments of ``vllm.AsyncEngineArgs`` on any machine; see ``loading_arguments``."""
    arguments = {
        "disable_log_stats": True,
        # Otherwise vLLM adds the model's own defaults of sampling and of end tokens to each request.
        "generation_config": "vllm",
        **table_arguments(parameters, "vllm"),
    }
    events = arguments.get("kv_events_config")
    if events:
        events["enable_kv_cache_events"] = True
        arguments["block_size"] = KV_BLOCK_TOKENS
    guides: Arguments = arguments.get("structured_outputs_config", {})
    if guides.get("backend") in _WITHOUT_WHITESPACE:
        # Some models write white space until max_tokens.
        guides["disable_any_whitespace"] = True
    return with_file(arguments, parameters, "vllm")


def on_device(arguments: Arguments, *, cpu: bool) -> Arguments:
    """Return the arguments with those that vLLM would choose badly on a CPU or a GPU."""
    if cpu:
        return _with_dtype(_on_cpu(arguments))
    if not arguments.get("enable_lora"):
        return _with_dtype(arguments)
    if arguments.get("dtype") in ("float32", "float"):
        raise ValueError(
            "tensorrt_llm: dtype float32 cannot be combined with lora_prefetch_dir: on a GPU, vLLM "
            "supports adapters only in float16 or bfloat16"
        )
    # Even of a float32 checkpoint: vLLM halves it, as adapters demand.
    return arguments


def _on_cpu(arguments: Arguments) -> Arguments:
    """Return the arguments for a CPU, where vLLM would compile for minutes and take most of the memory."""
    defaults: Arguments = {"enforce_eager": True}
    if "gpu_memory_utilization" not in arguments:
        defaults["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    return {**defaults, **arguments}


def _with_dtype(arguments: Arguments) -> Arguments:
    """Return the arguments with the type of a float32 checkpoint, which vLLM would halve."""
    if "dtype" in arguments:
        return arguments
    config = library.model_config(arguments)
    saved = str(config.get("dtype") or config.get("torch_dtype"))
    return {**arguments, "dtype": "float32"} if saved.endswith("float32") else arguments


def engine_config(arguments: Arguments) -> Any:
    """Return vLLM's configuration for the arguments, with the defaults of ``vllm serve`` on this machine.

    vLLM has other defaults for each use: by default, a step has 2,048 tokens, and 8,192 in its API server.
    """
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    return AsyncEngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)


def client_arguments(shared: str) -> Arguments:
    """Return the arguments of an ``AsyncLLM`` that shares its engine core with others.

    The first one starts the core, which then listens to all.

    Args:
        shared: the number of this client, the number of clients, and the beginning of the sockets' paths.
    """
    from vllm.v1.engine import core_client

    number, count, path = shared.split()
    index = int(number)
    inputs = [f"ipc://{path}in{client}" for client in range(int(count))]
    outputs = [f"ipc://{path}out{client}" for client in range(int(count))]
    if index:
        return {
            "client_addresses": {"input_address": inputs[index], "output_address": outputs[index]},
            "client_count": len(inputs),
            "client_index": index,
        }
    launch = core_client.launch_core_engines

    def launch_for_all(config: Any, executor: Any, log_stats: bool, addresses: Any) -> Any:
        addresses.inputs += inputs[1:]
        addresses.outputs += outputs[1:]
        return launch(config, executor, log_stats, addresses)

    core_client.launch_core_engines = launch_for_all
    return {}


def sampling_arguments(request: GenerationRequest) -> Arguments:
    """Return the arguments of ``vllm.SamplingParams`` for a request, but for bad words and guides."""
    arguments: Arguments = {
        "temperature": 0.0,
        "detokenize": False,
        # The request names the end tokens.
        "ignore_eos": True,
        **library.sampling_arguments(request),
    }
    sampling = request.sampling
    if not sampling.greedy:
        if sampling.min_p:
            arguments["min_p"] = sampling.min_p
        if sampling.seed is not None:
            # Only for a request that has one: with seeds, vLLM samples one request after another. A seed
            # beyond an int64 would end its runner.
            arguments["seed"] = sampling.seed % _MAX_SEED
    if request.end_ids:
        arguments["stop_token_ids"] = list(request.end_ids)
    if request.logit_bias:
        arguments["logit_bias"] = dict(request.logit_bias)
    if request.allowed_ids:
        arguments["allowed_token_ids"] = list(request.allowed_ids)
    if request.return_log_probs:
        # With 0, there are only those of the chosen tokens.
        arguments["logprobs"] = request.top_log_probs
    if request.prompt_log_probs:
        arguments["prompt_logprobs"] = request.top_log_probs
    return arguments


def guide_arguments(guide: Guide) -> Arguments:
    """Return the arguments of vLLM's ``StructuredOutputsParams``."""
    if guide.kind is GuideKind.JSON:
        return {"json_object": True}
    return {_GUIDE_ARGUMENTS.get(guide.kind, guide.kind.value): guide.text}


def is_on_cpu() -> bool:
    """Return whether the installed vLLM computes on CPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
