"""Dynamo's requests and chunks, as dictionaries, to ours and back.

Its frontend keeps the text: templates, stop strings, tool calls. It drops ``logit_bias``, and stop strings
with ``ignore_eos``.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from cog_triton.errors import InvalidParameter, prompt_too_long
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.request.request import Guide, GuideKind, Request
from cog_triton.text.end_tokens import EndTokens

# Fields that a Request has as well.
_SAMPLING = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"),
    *("temperature", "top_p", "top_k", "min_p", "seed"),
)
_GUIDES = {
    "json": GuideKind.JSON_SCHEMA,
    "regex": GuideKind.REGEX,
    "grammar": GuideKind.GRAMMAR,
    "choice": GuideKind.CHOICE,
    "structural_tag": GuideKind.STRUCTURAL_TAG,
}
# Of a guide: how it is enforced, which the engine decides.
_HINTS = ("backend", "whitespace_pattern")

Body = Mapping[str, Any]


def request_of(
    body: Body,
    request_id: str,
    *,
    prompt_tokens: int,
    end_tokens: EndTokens,
    context_length: int | None,
    adapter: str,
    seeded: bool = True,
    defaults: Mapping[str, float] | None = None,
) -> Request:
    """Return what a request of Dynamo's asks for, or raise a UserError.

    A request without a seed has one of its id's, so that it continues alike on another worker; not with
    ``seeded`` false.

    Args:
        prompt_tokens: how many of its ids are the prompt; those after it are output of another worker.
        end_tokens: the model's.
    """
    sampling = set_options(body, "sampling_options")
    stops = set_options(body, "stop_conditions")
    output = set_options(body, "output_options")
    ids = tuple(body["token_ids"])
    _check_supported(body, sampling, stops)
    if context_length is not None and len(ids) >= context_length:
        raise prompt_too_long(len(ids), context_length - 1)
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": _seed_of(request_id) if seeded else None,
        # The model's recommended values stand between Dynamo's defaults and the client's values.
        **(defaults or {}),
        **{name: sampling[name] for name in _SAMPLING if name in sampling},
    }
    continued = ids[prompt_tokens:]
    tokens_left = None if context_length is None else context_length - len(ids)
    limit = stops.get("max_tokens", tokens_left)
    if limit is not None:
        # The limit leaves out what has been delivered.
        fields["max_tokens"] = limit + len(continued)
    return Request(
        prompt="",
        prompt_ids=ids[:prompt_tokens],
        continued_ids=continued,
        min_tokens=stops.get("min_tokens", 0) + len(continued),
        ignore_eos=bool(stops.get("ignore_eos")),
        stop_token_ids=_stop_token_ids(stops, end_tokens),
        guide=guide_of(set_options(sampling, "guided_decoding")),
        log_probs=output.get("logprobs"),
        prompt_log_probs=output.get("prompt_logprobs") is not None,
        # The frontend makes the text from the ids, and needs all of them.
        skip_special_tokens=False,
        adapter=adapter,
        **fields,
    )


def _check_supported(body: Body, sampling: Body, stops: Body) -> None:
    """Refuse what no engine here supports."""
    for name in ("n", "best_of"):
        if sampling.get(name, 1) != 1:
            raise InvalidParameter(
                f"{name} must be 1, not {sampling[name]}: send several requests instead"
            )
    if sampling.get("use_beam_search"):
        raise InvalidParameter("use_beam_search is not supported")
    if "max_thinking_tokens" in stops:
        raise InvalidParameter("max_thinking_tokens is not supported")
    if body.get("multi_modal_data") or body.get("prompt_embeds"):
        raise InvalidParameter("the prompt must be text")


def _seed_of(request_id: str) -> int:
    """Return a seed that is the same on every worker."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _stop_token_ids(stops: Body, end_tokens: EndTokens) -> tuple[int, ...]:
    """Return the tokens that end the output beside the model's end tokens."""
    # The frontend's end tokens, by the files of the model.
    hidden = [] if stops.get("ignore_eos") else stops.get("stop_token_ids_hidden", [])
    shown = [*stops.get("stop_token_ids_visible", []), *stops.get("stop_token_ids", [])]
    return tuple(i for i in dict.fromkeys([*hidden, *shown]) if i not in end_tokens.ids)


def set_options(body: Body, group: str) -> dict[str, Any]:
    """Return a group's options; those that nobody set are None there."""
    return {name: value for name, value in (body.get(group) or {}).items() if value is not None}


def guide_of(guided: Body) -> Guide | None:
    """Return a request's guide; ``json`` is a schema, as an object or as text."""
    guides = {name: value for name, value in guided.items() if name not in _HINTS}
    if guides.pop("json_object", False):
        return Guide(GuideKind.JSON)
    unknown = guides.keys() - _GUIDES
    if unknown:
        raise InvalidParameter(f"guided_decoding: {sorted(unknown)[0]} is not supported")
    if len(guides) > 1:
        raise InvalidParameter(f"{' and '.join(guides)} cannot be combined: set only one of them")
    if not guides:
        return None
    ((name, value),) = guides.items()
    return Guide(_GUIDES[name], value if isinstance(value, str) else json.dumps(value))


def unknown_end_ids(body: Body, end_tokens: EndTokens) -> frozenset[int]:
    """Return the end tokens that the frontend does not find in the model's files, such as END_ID's."""
    hidden = set_options(body, "stop_conditions").get("stop_token_ids_hidden", [])
    return frozenset(end_tokens.ids) - {*hidden, *(body.get("eos_token_ids") or [])}


def chunk_of(chunk: Chunk, unknown: Collection[int] = ()) -> dict[str, Any]:
    """Return a chunk as Dynamo's.

    Args:
        unknown: end tokens that the frontend does not know. One that ends the output is left out, because
            the frontend would show its text.
    """
    ids = list(chunk.ids)
    log_probs = chunk.log_probs
    by_end_token = chunk.finish_reason == "stop" and chunk.stop_token is None
    if by_end_token and ids and ids[-1] in unknown:
        del ids[-1]
        log_probs = log_probs[: len(ids)]
    made: dict[str, Any] = {"token_ids": ids, "index": 0}
    if log_probs:
        made["log_probs"] = [token.log_prob for token in log_probs]
        made["top_logprobs"] = [alternatives(token) for token in log_probs]
    if chunk.prompt_log_probs:
        # A prompt's first token has none.
        rows = [None, *map(_prompt_row, chunk.prompt_log_probs[1:])]
        made["engine_data"] = {"prompt_logprobs": rows}
    if chunk.finish_reason is not None:
        made["finish_reason"] = chunk.finish_reason
        input_tokens = chunk.input_tokens or 0
        made["completion_usage"] = {
            "prompt_tokens": input_tokens,
            "completion_tokens": chunk.output_tokens,
            "total_tokens": input_tokens + chunk.output_tokens,
        }
        if chunk.stop_token is not None:
            made["stop_reason"] = chunk.stop_token
    return made


def _prompt_row(token: TokenLogProb) -> dict[str, Any]:
    """Return the log probabilities at a place of the prompt, by token ids."""
    log_probs = {token.id: token.log_prob, **dict(token.top)}
    return {str(token_id): {"logprob": value} for token_id, value in log_probs.items()}


def alternatives(token: TokenLogProb) -> list[dict[str, Any]]:
    """Return the likeliest tokens at a place, the chosen one among them."""
    likely = dict(token.top) | {token.id: token.log_prob}
    ranked = sorted(likely.items(), key=lambda entry: -entry[1])
    return [
        {"rank": rank, "token_id": token_id, "token": None, "logprob": log_prob}
        for rank, (token_id, log_prob) in enumerate(ranked, 1)
    ]
