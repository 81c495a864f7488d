"""Tiny random models of real architectures, built from their configurations."""

from pathlib import Path
from typing import Any

from tests.late import torch, transformers

VOCABULARY = 320
# What most configurations have; those of an architecture are merged over it.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_ALL_HEADS = {"num_key_value_heads": 4}
_HEADS = {"head_dim": 16}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_LATENT_ATTENTION = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_SLIDING = {
    **_HEADS,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
_LINEAR = {
    **_HEADS,
    **_EXPERTS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0 + place for place in range(8)],
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    },
}
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "max_position_embeddings": 64,
}

# By architecture (transformers' model_type, and a variant behind a colon): what its configuration needs
# besides the common values.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "biogpt": _ALL_HEADS,
    "bitnet": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 16, "n_positions": 512},
    "cohere": {},
    "cohere2": _SLIDING,
    "deepseek_v2": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "doge": {},
    "dots1": {**_EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    "ernie4_5": _HEADS,
    "exaone4": _SLIDING,
    "falcon": {"num_kv_heads": 2},
    "falcon:new_decoder": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "falcon_mamba": {"state_size": 16},
    "flex_olmo": _EXPERTS,
    "gemma": _HEADS,
    "gemma2": {**_SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.2},
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        **_SLIDING,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "glm": {**_HEADS, "num_key_value_heads": 2},
    "glm4": {**_HEADS, "num_key_value_heads": 2},
    "glm4_moe": {**_HEADS, **_EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    "glm4_moe_lite": _LATENT_ATTENTION,
    "gpt2": {**_ALL_HEADS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gpt_bigcode": {
        "num_key_value_heads": 1,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    },
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": _ALL_HEADS,
    "gpt_oss": {**_SLIDING, **_EXPERTS},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 16, "n_positions": 512},
    "granite": {},
    "granitemoe": _EXPERTS,
    "granitemoehybrid": {**_MAMBA, **_EXPERTS, "layer_types": ["mamba", "attention"]},
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "jais2": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, **_EXPERTS},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "llama": {},
    "llama:dynamic": DYNAMIC,
    "llama4_text": {
        **_HEADS,
        **_EXPERTS,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 64,
        "floor_scale": 8,
        "no_rope_layers": [1, 0],
    },
    "mamba": {"state_size": 16},
    "mamba2": {
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "expand": 2,
        "num_attention_heads": 8,
    },
    "minicpm3": {**_LATENT_ATTENTION},
    "minimax": {**_HEADS, **_EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
    "ministral": {**_SLIDING},
    "ministral3": _HEADS,
    "mistral": {"sliding_window": 24},
    "mixtral": _EXPERTS,
    "modernbert-decoder": {**_ALL_HEADS, "global_attn_every_n_layers": 2, "local_attention": 24},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 512},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _SLIDING,
    "olmoe": _EXPERTS,
    "opt": {**_ALL_HEADS, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": _ALL_HEADS,
    "phi": {},
    "phi3": {},
    "phi3:longrope": LONGROPE,
    "phimoe": _EXPERTS,
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": _HEADS,
    "qwen3_5_text": _LINEAR,
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "qwen3_next": {**_LINEAR, "shared_expert_intermediate_size": 32},
    "recurrent_gemma": {"lru_width": 64, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 64, "context_length": 512},
    "seed_oss": _HEADS,
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {"sliding_window": 24},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "bart": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
    },
    "vaultgemma": {**_SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
    "zamba2": {**_MAMBA, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1},
}
ENCODER_DECODERS = ("t5", "bart")


def tiny_config(name: str, **changes: Any) -> Any:
    """Return the configuration of an architecture, with changes."""
    architecture = name.partition(":")[0]
    values = {**_COMMON, **ARCHITECTURES[name], **changes}
    if architecture in ENCODER_DECODERS:
        values["num_key_value_heads"] = None
        for shared in ("num_attention_heads", "num_key_value_heads", "hidden_size"):
            values.pop(shared)
    return transformers.AutoConfig.for_model(architecture, **values)


def save_tiny_model(name: str, directory: Path, seed: int = 11, **changes: Any) -> Path:
    """Save a random model of an architecture; weights so large that its answers are not one token."""
    config = tiny_config(name, **changes)
    kind = (
        transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(seed)
    model = kind.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "norm" not in weight and "conv" not in weight:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.18)
    model.save_pretrained(directory)
    return directory
