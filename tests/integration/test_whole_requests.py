"""What requests may ask beyond text and sampling, through a real server with the demo model."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.errors import InvalidParameter
from cog_triton.request.request import Guide, GuideKind, Request
from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from cog_triton.wire import TokenLogProb
from tests.integration.test_generation import (
    ANSWER,
    QUESTION,
    TRANSPORTS,
    collect,
    greedy,
    text,
    with_client,
)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_log_probabilities_with_alternatives(
    triton: TritonServer, transport: str, tokenizer: Tokenizer
) -> None:
    def ask(**values: Any) -> list[TokenLogProb]:
        request = greedy(QUESTION, **values)
        chunks = with_client(transport, triton, lambda c: collect(request, c, tokenizer))
        assert text(chunks) == ANSWER
        places = [place for chunk in chunks for place in chunk.log_probs]
        assert [place.id for place in places] == [i for c in chunks for i in c.ids] * bool(places)
        return places

    places = ask(log_probs=3)
    assert len(places) > 5
    for place in places:
        assert len(place.top) == 3
        assert place.top[0] == (place.id, place.log_prob)  # greedy takes the most likely
        assert sorted((-value for _, value in place.top)) == [-value for _, value in place.top]
    chosen = ask(log_probs=0)
    assert [place.log_prob for place in chosen] == pytest.approx(
        [place.log_prob for place in places], abs=1e-4
    )
    assert all(place.top == () for place in chosen)
    assert ask() == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_log_probabilities_of_a_prompt_and_its_answer_are_one_texts(
    triton: TritonServer, transport: str, tokenizer: Tokenizer
) -> None:
    """An answer's tokens are as likely when they are a prompt's."""

    def ask(**values: Any) -> tuple[list[TokenLogProb], list[TokenLogProb]]:
        request = greedy("", log_probs=1, prompt_log_probs=True, **values)
        chunks = with_client(transport, triton, lambda c: collect(request, c, tokenizer))
        assert not any(chunk.prompt_log_probs for chunk in chunks[1:])
        return list(chunks[0].prompt_log_probs), [p for c in chunks for p in c.log_probs]

    ids = tuple(tokenizer(QUESTION).input_ids)
    prompt, answer = ask(prompt_ids=ids)
    assert [place.id for place in prompt] == [*ids]
    again, _ = ask(prompt_ids=(*ids, *(place.id for place in answer)), max_tokens=1)
    assert [place.id for place in again] == [*ids, *(place.id for place in answer)]
    for one, other in zip([*prompt, *answer], again, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-3)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_structured_output(triton: TritonServer, transport: str, tokenizer: Tokenizer) -> None:
    def ask(guide: Guide, seed: int, **values: Any) -> tuple[str, str | None]:
        request = Request(QUESTION, seed, temperature=1.5, top_p=1.0, guide=guide, **values)
        chunks = with_client(transport, triton, lambda c: collect(request, c, tokenizer))
        return text(chunks), chunks[-1].finish_reason

    schema = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))
    for seed in range(3):
        answer, reason = ask(schema, seed)
        jsonschema.validate(json.loads(answer), SCHEMA)
        assert reason == "stop"
    assert ask(schema, 0, max_tokens=4)[1] == "length"
    choice, _ = ask(Guide(GuideKind.CHOICE, '["yes", "no (never)"]'), 1)
    assert choice in ("yes", "no (never)")
    grammar, _ = ask(Guide(GuideKind.GRAMMAR, "root ::= [a-c] [0-9]"), 1)
    assert re.fullmatch("[a-c][0-9]", grammar)
    with pytest.raises(InvalidParameter, match=r"type regex cannot be used: .*unclosed"):
        ask(Guide(GuideKind.REGEX, "["), 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_biases_and_limits(triton: TritonServer, transport: str, tokenizer: Tokenizer) -> None:
    def ask(**values: Any) -> list[int]:
        request = Request(QUESTION, 7, max_tokens=12, temperature=2.0, top_p=1.0, **values)
        chunks = with_client(transport, triton, lambda c: collect(request, c, tokenizer))
        return [token for chunk in chunks for token in chunk.ids]

    certain = greedy(QUESTION, max_tokens=12)
    chunks = with_client(transport, triton, lambda c: collect(certain, c, tokenizer))
    assert ask(min_p=1.0) == [token for chunk in chunks for token in chunk.ids]
    assert ask() != ask(min_p=1.0)
    assert ask(logit_bias=((264, 1000.0),), ignore_eos=True) == [264] * 12
    end = ((tokenizer.eos_token_id, 1000.0),)
    assert ask(logit_bias=end) == [tokenizer.eos_token_id]
    assert ask(logit_bias=end, ignore_eos=True, min_tokens=12) == [tokenizer.eos_token_id] * 12


def test_the_simulated_engine_refuses_by_name(
    paced_triton: TritonServer, tokenizer: Tokenizer
) -> None:
    def ask(**values: Any) -> None:
        request = greedy(QUESTION, **values)
        with_client("grpc", paced_triton, lambda c: collect(request, c, tokenizer))

    with pytest.raises(InvalidParameter, match=r"does not support .*guided_decoding_guide"):
        ask(guide=Guide(GuideKind.JSON))
    with pytest.raises(InvalidParameter, match="does not support lora_task_id"):
        ask(adapter="poet")
