"""Requests as the LLM API takes them, what it answers, and its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cog_triton.engines.base import EngineError, GenerationRequest, Tokens

NO_END_ID = -1
ANY_ID = 0  # pads what no one reads; without it the LLM would pad with NO_END_ID


def sampling_arguments(request: GenerationRequest) -> dict[str, Any]:
    """The arguments of ``tensorrt_llm.SamplingParams`` that a request stands for.

    What changes nothing is left out, but for what means something else when it is missing. Stop
    words are not the LLM's business: they stay in the output here, and are looked for elsewhere.

    Raises:
        EngineError: a bad word has several tokens.
    """
    arguments: dict[str, Any] = {"max_tokens": request.max_tokens, **_end(request.end_id)}
    sampling = request.sampling
    if sampling.greedy:
        # The one that means greedy in all releases. A temperature or top_p of 0 does not.
        arguments["top_k"] = 1
    else:
        arguments["temperature"] = sampling.temperature
        # The LLM takes a top_p of 0 as greedy, even with a top_k; SamplingParams takes it as none.
        arguments["top_p"] = sampling.top_p or 1.0
        arguments["seed"] = sampling.seed
        if sampling.top_k:
            arguments["top_k"] = sampling.top_k
    arguments |= sampling.unusual
    if bad := _single_ids(sampling.bad_words):
        arguments["bad_token_ids"] = bad
    if request.return_log_probs:
        arguments["logprobs"] = 1  # 0 means none in older releases
    return arguments


def _end(end_id: int | None) -> dict[str, Any]:
    # Without a tokenizer the LLM refuses requests that give no end id.
    if end_id is None:
        return {"end_id": NO_END_ID, "pad_id": ANY_ID, "ignore_eos": True}
    return {"end_id": end_id}


def _single_ids(words: Sequence[Sequence[int]]) -> list[int]:
    long = [list(word) for word in words if len(word) > 1]
    if long:
        raise EngineError(
            "TensorRT-LLM's LLM API does not support bad words of several tokens, such as token "
            f"ids {long[0]}"
        )
    return [word[0] for word in words if word]


def next_tokens(
    completion: Any, request: GenerationRequest, last_id: int | None, *, finished: bool
) -> Tokens:
    """Return the new tokens of one of the LLM's ``CompletionOutput``.

    Args:
        last_id: the last id of the update before.
        finished: whether the ``RequestOutput`` is.

    Raises:
        EngineError: log probabilities are missing, or the LLM gave the request up.
    """
    ids = list(completion.token_ids_diff)
    log_probs = chosen_log_probs(ids, completion.logprobs_diff) if request.return_log_probs else []
    if not finished:
        return Tokens(ids, log_probs)
    reason = completion.finish_reason
    if reason in ("timeout", "cancelled"):
        raise EngineError(f"TensorRT-LLM ended the request: {reason}")
    # No stop words are given to the LLM, so "stop" is the end token.
    if reason == "stop" and request.end_id not in (None, ids[-1] if ids else last_id):
        ids.append(request.end_id)
    return Tokens(ids, log_probs, finished=True)


def chosen_log_probs(ids: Sequence[int], entries: Sequence[Any] | None) -> list[float]:
    """The log probability of each id.

    Args:
        entries: for each id a number, or a mapping from ids to objects with a ``logprob``, as
            releases differ.

    Raises:
        EngineError: one is missing.
    """
    log_probs = [_log_prob(token, entry) for token, entry in zip(ids, entries or (), strict=False)]
    if len(log_probs) < len(ids) or None in log_probs:
        raise EngineError("TensorRT-LLM left out the log probability of a token")
    return [value for value in log_probs if value is not None]


def _log_prob(token: int, entry: Any) -> float | None:
    if isinstance(entry, Mapping):
        entry = entry.get(token)
    value = getattr(entry, "logprob", entry)
    return None if value is None else float(value)


def is_fatal(error: Exception) -> bool:
    """Tell an error that ends the LLM from one of a request.

    A request's own errors are ``RequestError``, or those of Python for arguments; what ends the
    executor, or is raised because it has ended, is a RuntimeError or comes from a socket or pipe.
    """
    # By name, for its place in the package is not promised.
    if any(base.__name__ == "RequestError" for base in type(error).__mro__):
        return False
    return isinstance(error, (RuntimeError, OSError))


_TOO_LONG = re.compile(r"prompt length.*(exceed|larger than)", re.IGNORECASE | re.DOTALL)


def error_text(error: Exception, prompt_length: int) -> str:
    """The text for the client. A prompt that is too long is called what it is in the C++ backend."""
    text = str(error) or repr(error)
    if _TOO_LONG.search(text) and "exceeds maximum input length" not in text:
        return f"Prompt length ({prompt_length}) exceeds maximum input length: {text}"
    return text
