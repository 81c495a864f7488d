"""The arguments of trtllm-build: what they take now, and what became of older ones.

The names of now are those of TensorRT-LLM 0.13 to 1.2. The older ones are those of ``trtllm-build``
before that, and of the ``build.py`` scripts that TensorRT-LLM had up to 0.7, as guides of that time
have them. The changes are in TensorRT-LLM's release notes, mostly those of 0.11 and 0.12.
"""

from __future__ import annotations

from typing import Any

SWITCH = ("enable", "disable")
_DTYPE = ("auto", "float16", "bfloat16", "float32", "int32", "disable")

PLUGINS: dict[str, tuple[str, ...] | None] = {
    "bert_attention_plugin": _DTYPE,
    "gpt_attention_plugin": _DTYPE,
    "gemm_plugin": (*_DTYPE, "fp8", "nvfp4"),
    "gemm_swiglu_plugin": ("fp8", "disable"),
    "fp8_rowwise_gemm_plugin": _DTYPE,
    "lora_plugin": _DTYPE,
    "dora_plugin": SWITCH,
    "moe_plugin": _DTYPE,
    "mamba_conv1d_plugin": _DTYPE,
    "nccl_plugin": _DTYPE,
    "low_latency_gemm_plugin": ("fp8", "disable"),
    "low_latency_gemm_swiglu_plugin": ("fp8", "disable"),
    "gemm_allreduce_plugin": ("float16", "bfloat16", "disable"),
    "context_fmha": SWITCH,
    "bert_context_fmha_fp32_acc": SWITCH,
    "remove_input_padding": SWITCH,
    "tokens_per_block": None,
    "use_paged_context_fmha": SWITCH,
    "use_fp8_context_fmha": SWITCH,
    "fuse_fp4_quant": SWITCH,
    "multiple_profiles": SWITCH,
    "paged_state": SWITCH,
    "streamingllm": SWITCH,
    "norm_quant_fusion": SWITCH,
    "reduce_fusion": SWITCH,
    "user_buffer": SWITCH,
    "use_fused_mlp": SWITCH,
    "pp_reduce_scatter": SWITCH,
}
"""What trtllm-build calls plugin configuration, and the values of each; None is a whole number."""

LIMITS = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "max_beam_width",
    "workers",
)
"""Arguments of trtllm-build that the short form has as keys of their own."""

OTHERS = (
    "auto_parallel",
    "build_config",
    "cluster_key",
    "enable_debug_output",
    "fast_build",
    "gather_all_token_logits",
    "gather_context_logits",
    "gather_generation_logits",
    "gpus_per_node",
    "input_timing_cache",
    "log_level",
    "logits_dtype",
    "lora_ckpt_source",
    "lora_dir",
    "lora_target_modules",
    "max_draft_len",
    "max_encoder_input_len",
    "max_lora_rank",
    "max_prompt_embedding_table_size",
    "model_cls_file",
    "model_cls_name",
    "model_config",
    "monitor_memory",
    "opt_num_tokens",
    "output_timing_cache",
    "profiling_verbosity",
    "speculative_decoding_mode",
    "strip_plan",
    "visualize_network",
    "weight_sparsity",
    "weight_streaming",
)
"""The arguments of trtllm-build that are neither: they are given under build_args."""

PARALLEL = ("tp_size", "pp_size", "cp_size")
"""trtllm-build took these up to 0.11, and used them for nothing: the checkpoint has them."""

RENAMED = {
    "enable_context_fmha": "context_fmha",
    "max_decoder_seq_len": "max_seq_len",
    "max_multimodal_len": "max_prompt_embedding_table_size",
    "use_bert_attention_plugin": "bert_attention_plugin",
    "use_gemm_plugin": "gemm_plugin",
    "use_gpt_attention_plugin": "gpt_attention_plugin",
    "use_lora_plugin": "lora_plugin",
}

DROPPED = {
    "attention_qk_half_accumulation": "removed in TensorRT-LLM 0.11",
    "builder_opt": "removed in TensorRT-LLM 0.14",
    "enable_xqa": "always on",
    "hidden_act": "read from the model's config.json",
    "lookup_plugin": "no longer needed",
    "multi_block_mode": "set when the engine is served, since TensorRT-LLM 0.12",
    "parallel_build": "ranks are built in parallel with workers",
    "strongly_typed": "always on",
    "use_context_fmha_for_generation": "removed in TensorRT-LLM 0.11",
    "use_custom_all_reduce": "chosen when the engine is served, since TensorRT-LLM 0.12",
    "use_inflight_batching": "every engine with a paged KV cache and packed input can do it",
    "use_layernorm_plugin": "no longer needed",
    "use_lookup_plugin": "no longer needed",
    "use_rmsnorm_plugin": "no longer needed",
}
"""Old arguments that can go, and why."""

REFUSED = {
    "context_fmha_fp32_acc": "since TensorRT-LLM 0.12 it is set when the engine is served "
    "(enable_context_fmha_fp32_acc); remove it here",
    "enable_fp8": "use quantization: fp8",
    "fp8_kv_cache": "use kv_cache_dtype: fp8, with quantization",
    "quant_ckpt_path": "use quantization, or convert_args",
    "use_smooth_quant": "use quantization: int8_sq",
}
"""Old arguments that change what the model computes, and what does that now."""

TO_CONVERT = (
    "int8_kv_cache",
    "model_version",
    "n_positions",
    "per_channel",
    "per_group",
    "per_token",
    "rotary_base",
    "use_parallel_embedding",
    "use_weight_only",
    "weight_only_precision",
)
"""Old arguments of build.py that are now ones of convert_checkpoint.py, under the same name."""

CONVERT_RENAMED = {
    "storage-type": "dtype",
    "storage_type": "dtype",
    "tensor-parallelism": "tp_size",
    "tensor_parallelism": "tp_size",
    "world_size": "tp_size",
}
"""Old arguments of hf_gpt_convert.py and its like."""

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

OLD_SCRIPTS = {
    "hf_gpt_convert.py": "convert_checkpoint.py",
    "hf_llama_convert.py": "convert_checkpoint.py",
    "hf_bloom_convert.py": "convert_checkpoint.py",
    "build.py": "trtllm-build",
}
"""Scripts that TensorRT-LLM had up to 0.7, and what does their work now."""

PATHS = {
    "convert_args": ("model_dir", "output_dir", "in-file", "in_file", "out-dir", "out_dir"),
    "quantize_args": ("model_dir", "output_dir"),
    "build_args": ("checkpoint_dir", "model_dir", "output_dir"),
}
"""What the steps hand to each other: these paths are the builder's."""


def plugin_value(name: str, value: Any) -> Any:
    """A plugin's value as trtllm-build spells it: true, false and a bare flag are words there."""
    choices = PLUGINS[name]
    if choices is None:
        return value
    if value is None or value is True:
        return "enable" if choices == SWITCH else choices[0]
    return "disable" if value is False else value


def plugin_problem(name: str, value: Any) -> str | None:
    """What is wrong with a plugin's value, or None."""
    choices = PLUGINS[name]
    if choices is None:
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if whole else f"expected a whole number above 0, got {value!r}"
    return None if value in choices else f"expected {' or '.join(choices)}, got {value!r}"
