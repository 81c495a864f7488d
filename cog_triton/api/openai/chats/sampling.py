"""The fields of a ``Request`` that do not depend on the prompt."""

from typing import Any

from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.completions import CompletionBody
from cog_triton.api.openai.schemas.sampling import SAME_IN_REQUEST
from cog_triton.api.openai.served import Served
from cog_triton.request.request import resolve_seed

# Tokens of an answer without a limit, where only the engine knows the context length; it cuts to that.
UNKNOWN_CONTEXT = 2**20
OPENAIS_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}


def sampling(body: ChatBody | CompletionBody, served: Served) -> dict[str, Any]:
    """Return the arguments of a ``Request`` that do not depend on the prompt."""
    if body.stream_options and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs is not allowed when stream is true", "prompt_logprobs")
    alternatives = [
        number for number in (body.wanted_log_probs, body.prompt_logprobs) if number is not None
    ]
    echoes_log_probs = isinstance(body, CompletionBody) and bool(body.echo and alternatives)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return {
        **OPENAIS_DEFAULTS,
        **served.backend.sampling_defaults,
        **body.model_dump(include=SAME_IN_REQUEST, exclude_none=True),
        "seed": resolve_seed(body.seed, draws=served.backend.draws_seeds),
        "stop_sequences": stop or (),
        "include_stop": bool(body.include_stop_str_in_output),
        "logit_bias": [(int(token), bias) for token, bias in (body.logit_bias or {}).items()],
        "log_probs": max(alternatives, default=None),
        "prompt_log_probs": body.prompt_logprobs is not None or echoes_log_probs,
        "guide": body.guide(),
        "adapter": served.adapter(body.model),
        "pad_id": served.settings.pad_id,
    }
