from ..llm import LLM, CompletionOutput, RequestError, RequestOutput
from ..llm_args import KvCacheConfig
from ..sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "KvCacheConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
