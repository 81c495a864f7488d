"""What of a request would be ignored in silence, or done twice, by parts that are not this project's.

The engines in Python refuse by themselves what they cannot do. TensorRT-LLM's C++ backend and NVIDIA's
preprocessing take no notice of parameters that they do not know.
"""

from __future__ import annotations

from dataclasses import replace

from cog_triton.engine_choice import EngineName
from cog_triton.errors import InvalidParameter
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import Tokenizer


def with_own_beginning(request: Request, tokenizer: Tokenizer) -> Request:
    """The request for a preprocessing model that adds the tokens that begin a text, whatever it is told.

    A prompt by a chat template has them: the text of the first one is taken off.
    """
    if request.add_special_tokens is not False:
        return request
    begin = getattr(tokenizer, "bos_token", None) or ""
    return replace(request, prompt=request.prompt.removeprefix(begin), add_special_tokens=None)


def check_supported(
    request: Request, engine: EngineName | None, *, own_preprocessing: bool
) -> None:
    """Refuses what would have no effect.

    Args:
        engine: None for one that refuses by itself what it cannot do.
        own_preprocessing: whether prompts become ids in this project's model.

    Raises:
        InvalidParameter: naming each of it, and what does not support it.
    """
    if engine == "tensorrtllm":
        _refuse(
            "TensorRT-LLM's C++ backend",
            {
                "min_p": request.min_p,
                "top_logprobs": request.log_probs,
                "prompt_logprobs": request.prompt_log_probs,
                "allowed_token_ids": request.allowed_token_ids,
            },
        )
    if not own_preprocessing:
        asked = {
            "prompt_ids": request.prompt_ids,
            "add_special_tokens": request.add_special_tokens is not None,
            "logit_bias": request.logit_bias,
        }
        _refuse("the preprocessing model of TRITON_MODEL_REPO", asked)


def _refuse(part: str, asked: dict[str, object]) -> None:
    names = [name for name, value in asked.items() if value]
    if names:
        raise InvalidParameter(f"{part} does not support {', '.join(names)}")
