"""Names of the tensors of Triton's models, and how one model's become another's."""

# Input of tensorrt_llm_bls → input of preprocessing, as in the ensemble.
BLS_TO_PREPROCESSING: dict[str, str] = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
    "seed": "SEED",
    "random_seed": "RANDOM_SEED",
    "min_tokens": "MIN_TOKENS",
    "min_length": "MIN_LENGTH",
}

# Output of preprocessing → input of tensorrt_llm, as in the ensemble.
PREPROCESSING_TO_ENGINE: dict[str, str] = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "STOP_WORDS_TEXT": "stop_words_text",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
    "OUT_SEED": "seed",
    "OUT_MIN_TOKENS": "min_tokens",
}

# Output of tensorrt_llm → input of postprocessing, as in the ensemble.
ENGINE_TO_POSTPROCESSING: dict[str, str] = {
    "output_ids": "TOKENS_BATCH",
    "sequence_length": "SEQUENCE_LENGTH",
    "context_ids": "CONTEXT_IDS",
    "is_final": "IS_FINAL",
    "cut_characters": "CUT_CHARACTERS",
}

# The other inputs of tensorrt_llm_bls go to tensorrt_llm, by their own names but for these.
BLS_TO_ENGINE: dict[str, str] = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}

# Template variables of tensorrt_llm_bls that are refused → what each would be for.
UNSUPPORTED_BLS_VARIABLES: dict[str, str] = {
    "tensorrt_llm_draft_model_name": "speculative decoding with a draft model",
    "multimodal_encoders_name": "encoding images",
}

# Inputs of tensorrt_llm that not every engine honours → the feature of an embedded engine that does, or ""
# where only TensorRT-LLM does. Ignored, each would give a wrong answer. The contract's other inputs change
# no answer, or only together with one of these: decoder_input_ids, which preprocessing always sends, is for
# models with an encoder.
UNSUPPORTED: dict[str, str] = {
    "context_phase_params": "",
    "cross_attention_mask": "",
    "draft_acceptance_threshold": "",
    "draft_input_ids": "",
    "draft_logits": "",
    "embedding_bias": "embedding_bias",
    "encoder_input_features": "",
    "guided_decoding_guide": "guided_decoding",
    "guided_decoding_guide_type": "guided_decoding",
    "lookahead_ngram_size": "",
    "lookahead_verification_set_size": "",
    "lookahead_window_size": "",
    "lora_task_id": "lora_task_id",
    "lora_weights": "",
    "mrope_position_deltas": "",
    "mrope_rotary_cos_sin": "",
    "prompt_embedding_table": "",
    "return_context_logits": "",
    "return_generation_logits": "",
    "skip_cross_attn_blocks": "",
}

# Performance metrics in the outputs of tensorrt_llm, INT32, that embedded engines do not have: they are 0.
UNKNOWN_METRICS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)

# Input of tensorrt_llm → field of SamplingParams and of Request. The top_k and the bad words of an engine
# have other bounds, or are no numbers, and are read apart.
SAMPLING_INPUTS: dict[str, str] = {
    "temperature": "temperature",
    "runtime_top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_tokens": "min_tokens",
}

# Names of inputs before TensorRT-LLM 0.20 (May 2025) → since then.
OLD_INPUTS: dict[str, str] = {"random_seed": "seed", "min_length": "min_tokens"}
