"""Names of models, tensors and parameters of a request."""

from collections.abc import Mapping
from types import MappingProxyType

# Models

ENGINE = "tensorrt_llm"
PREPROCESSING = "preprocessing"
# See ``cog_triton.models.context``.
CONTEXT_MODEL = "tensorrt_llm_context"
# The ensemble without its last step; see ``cog_triton.repository.derived_models``.
IDS_ENSEMBLE = "ensemble_ids"
# Parameter of CONTEXT_MODEL: host:port of the server that it runs in.
GRPC_ADDRESS = "grpc_address"
# Tokens in each block of an engine's KV cache events. vLLM for CPUs supports no fewer.
KV_BLOCK_TOKENS = 32

# Outputs of ENGINE and IDS_ENSEMBLE

# INT32.
OUTPUTS = ("output_ids", "sequence_length", "num_input_tokens", "num_output_tokens")
# FP32; see ``cog_triton.protocol.log_probs``.
LOG_PROBS = "output_log_probs"
# INT32; see ``cog_triton.protocol.frames``. TensorRT-LLM's C++ backend has none.
FRAMES = "frames"
DIMS = {
    "output_ids": [-1, -1],
    "sequence_length": [-1],
    "num_input_tokens": [1],
    "num_output_tokens": [1],
    LOG_PROBS: [-1, -1],
    FRAMES: [-1],
}

# Parameters of a request, which are not tensors. The C++ backend ignores them.

# A ``FrameAddress``: answer with FRAMES and no other output.
FRAMES_FOR = "frames_for"
# ``ids_text`` of the output that an earlier attempt has delivered. Preprocessing puts these ids behind the
# prompt's, and the embedded engines treat them as output.
CONTINUED = "continued_ids"
# ``ids_text`` of the prompt, in place of its text.
PROMPT_IDS = "prompt_ids"
# A boolean; false for a rendered chat, which has them.
ADD_SPECIAL_TOKENS = "add_special_tokens"
# A JSON object of ids and biases, which becomes an embedding_bias.
LOGIT_BIAS = "logit_bias"
# A number as text.
MIN_P = "min_p"
# An integer k: add the k likeliest tokens at each place.
TOP_LOG_PROBS = "top_logprobs"
# A boolean: with return_log_probs, the first response begins with those of the prompt's tokens.
PROMPT_LOG_PROBS = "prompt_logprobs"
# ``ids_text`` of the only tokens that may be generated.
ALLOWED_IDS = "allowed_token_ids"
# The client's span, as the W3C writes it; a header as well, for Triton.
TRACEPARENT = "traceparent"

# Values have the types that both of Triton's endpoints take.
Parameters = Mapping[str, str | int | bool]
NO_PARAMETERS: Parameters = MappingProxyType({})
