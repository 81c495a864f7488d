"""Names of models, tensors and parameters of a request."""

from collections.abc import Mapping
from types import MappingProxyType

# Models

ENGINE = "tensorrt_llm"
PREPROCESSING = "preprocessing"
CONTEXT_MODEL = "tensorrt_llm_context"  # see ``cog_triton.models.context``
IDS_ENSEMBLE = (
    "ensemble_ids"  # the ensemble without its last step; see ``cog_triton.repository.fill``
)
GRPC_ADDRESS = "grpc_address"  # parameter of CONTEXT_MODEL: host:port of the server that it runs in
# Tokens in each block of an engine's KV cache events. vLLM for CPUs supports no fewer.
KV_BLOCK_TOKENS = 32

# Outputs of ENGINE and IDS_ENSEMBLE

OUTPUTS = ("output_ids", "sequence_length", "num_input_tokens", "num_output_tokens")  # INT32
LOG_PROBS = "output_log_probs"  # FP32; see ``cog_triton.protocol.log_probs``
FRAMES = "frames"  # INT32; see ``cog_triton.protocol.frames``. TensorRT-LLM's C++ backend has none.
DIMS = {
    "output_ids": [-1, -1],
    "sequence_length": [-1],
    "num_input_tokens": [1],
    "num_output_tokens": [1],
    LOG_PROBS: [-1, -1],
    FRAMES: [-1],
}

# Parameters of a request, which are not tensors. The C++ backend ignores them.

FRAMES_FOR = "frames_for"  # a ``FrameAddress``: answer with FRAMES and no other output
# ``ids_text`` of the output that an earlier attempt has delivered. Preprocessing puts these ids behind the
# prompt's, and the embedded engines treat them as output.
CONTINUED = "continued_ids"
PROMPT_IDS = "prompt_ids"  # ``ids_text`` of the prompt, in place of its text
ADD_SPECIAL_TOKENS = "add_special_tokens"  # a boolean; false for a rendered chat, which has them
LOGIT_BIAS = "logit_bias"  # a JSON object of ids and biases, which becomes an embedding_bias
MIN_P = "min_p"  # a number as text
TOP_LOG_PROBS = "top_logprobs"  # an integer k: add the k likeliest tokens at each place
# A boolean: with return_log_probs, the first response begins with those of the prompt's tokens.
PROMPT_LOG_PROBS = "prompt_logprobs"
ALLOWED_IDS = "allowed_token_ids"  # ``ids_text`` of the only tokens that may be generated
TRACEPARENT = "traceparent"  # the client's span, as the W3C writes it; a header as well, for Triton

Parameters = Mapping[str, str | int | bool]  # of the types that both of Triton's endpoints take
NO_PARAMETERS: Parameters = MappingProxyType({})
