"""The same prompt and seed give the same answer from every API; docs/conformance.md has the table."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from cog_triton.protocol.names import ADD_SPECIAL_TOKENS
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.test_ensemble import infer
from tests.openai_server import MESSAGES, QUESTION, OpenAIServer
from tests.support import ROOT, CogServer, limit

PAGE = ROOT / "docs" / "conformance.md"
TYPES: dict[type, Any] = {int: np.int32, float: np.float32, str: np.object_}
NONE = "–"


@dataclass(frozen=True)
class Case:
    """One request, for each API."""

    fields: Mapping[str, Any]  # sampling parameters, whose names are the same everywhere
    is_chat: bool = False  # the question goes through the model's chat template


GREEDY: dict[str, Any] = {"top_k": 1, "top_p": 1.0, "temperature": 1.0, "seed": 0, "max_tokens": 12}
PLAIN: dict[str, Any] = GREEDY | {"top_k": 40, "top_p": 0.99, "temperature": 2.0, "seed": 7}
CASES = {
    "a prompt, greedy": Case(GREEDY),
    "a prompt, sampled": Case({**PLAIN, "repetition_penalty": 1.2}),
    "a chat, sampled": Case(PLAIN, is_chat=True),
}


@dataclass(frozen=True)
class Answer:
    """What an API returns of an answer."""

    text: str
    tokens: int | None = None
    ids: tuple[int, ...] | None = None
    pieces: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Apis:
    """Cog's server, and OpenAI's API on its Triton."""

    cog: CogServer
    openai: OpenAIServer
    http: str
    grpc: str
    tokenizer: Tokenizer

    def text(self, case: Case) -> str:
        """The text that the model sees."""
        if not case.is_chat:
            return QUESTION
        return str(
            self.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        )


@pytest.fixture(scope="module")
def apis(cog_server: CogServer, openai_server: OpenAIServer, tokenizer: Tokenizer) -> Apis:
    endpoints = cog_server.endpoints
    return Apis(cog_server, openai_server, endpoints.http, endpoints.grpc, tokenizer)


def kserve_grpc(apis: Apis, case: Case) -> Answer:
    """The ensemble, by NVIDIA's client."""
    inputs = {
        name: np.array([[value]], np.uint64 if name == "seed" else TYPES[type(value)])
        for name, value in {"text_input": apis.text(case), **case.fields}.items()
    }
    reply = infer(apis.grpc, inputs, parameters={ADD_SPECIAL_TOKENS: not case.is_chat})[0]
    ids = tuple(reply["output_ids"].reshape(-1).tolist())
    return Answer(reply["text_output"][0].decode(), len(ids), ids)


def generate(apis: Apis, model: str, case: Case) -> dict[str, Any]:
    body = {"text_input": apis.text(case), **case.fields, ADD_SPECIAL_TOKENS: not case.is_chat}
    url = f"http://{apis.http}/v2/models/{model}/generate"
    reply = httpx.post(url, json=body, trust_env=False, timeout=limit(60))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def kserve_http(apis: Apis, case: Case) -> Answer:
    reply = generate(apis, "ensemble", case)
    return Answer(reply["text_output"], len(reply["output_ids"]), tuple(reply["output_ids"]))


def bls(apis: Apis, case: Case) -> Answer:
    return Answer(generate(apis, "tensorrt_llm_bls", case)["text_output"])


def cog(apis: Apis, case: Case) -> Answer:
    question = {"messages": json.dumps(MESSAGES)} if case.is_chat else {"prompt": QUESTION}
    reply = apis.cog.predict(**question, **case.fields)
    assert reply["status"] == "succeeded", reply
    return Answer("".join(reply["output"]), reply["metrics"]["output_token_count"])


def completions(apis: Apis, case: Case) -> Answer:
    prompt: Any = apis.text(case)
    if case.is_chat:
        prompt = apis.openai.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    body = apis.openai.complete(prompt=prompt, logprobs=0, **case.fields).json()
    (choice,) = body["choices"]
    pieces = tuple(choice["logprobs"]["tokens"])
    return Answer(choice["text"], body["usage"]["completion_tokens"], pieces=pieces)


def chat(apis: Apis, case: Case) -> Answer:
    body = apis.openai.chat(logprobs=True, **case.fields).json()
    (choice,) = body["choices"]
    pieces = tuple(entry["token"] for entry in choice["logprobs"]["content"])
    return Answer(choice["message"]["content"], body["usage"]["completion_tokens"], pieces=pieces)


def responses(apis: Apis, case: Case) -> Answer:
    fields = dict(case.fields)
    asked = {"model": "demo", "input": QUESTION, "max_output_tokens": fields.pop("max_tokens")}
    asked |= {"include": ["message.output_text.logprobs"], **fields}
    body = apis.openai.post("/v1/responses", asked).json()
    (part,) = body["output"][0]["content"]
    pieces = tuple(entry["token"] for entry in part["logprobs"])
    return Answer(part["text"], body["usage"]["output_tokens"], pieces=pieces)


def messages(apis: Apis, case: Case) -> Answer:
    asked = {"model": "demo", "messages": MESSAGES, **case.fields}
    body = apis.openai.post("/v1/messages", asked).json()
    return Answer(body["content"][0]["text"], body["usage"]["output_tokens"])


APIS: dict[str, tuple[Callable[[Apis, Case], Answer], str]] = {
    "KServe v2 over gRPC, `ensemble`": (kserve_grpc, "both"),
    "KServe v2 over HTTP, `ensemble`": (kserve_http, "both"),
    "KServe v2 over HTTP, `tensorrt_llm_bls`": (bls, "both"),
    "Cog, `/predictions`": (cog, "both"),
    "OpenAI, `/v1/completions`": (completions, "both"),
    "OpenAI, `/v1/chat/completions`": (chat, "chat"),
    "OpenAI, `/v1/responses`": (responses, "chat"),
    "Anthropic, `/v1/messages`": (messages, "chat"),
}


def verdict(apis: Apis, answer: Answer, first: Answer) -> str:
    """What of an answer is the same as of the first one; an answer that differs is an error."""
    assert first.ids is not None
    assert answer.text == first.text
    assert answer.tokens in (first.tokens, None)
    if answer.ids is not None:
        assert answer.ids == first.ids
        return "ids"
    if answer.pieces is not None:
        assert answer.pieces == tuple(
            apis.tokenizer.decode([token], skip_special_tokens=False) for token in first.ids
        )
        return "text, token by token"
    return "text" if answer.tokens is None else "text, number of tokens"


def table(apis: Apis) -> str:
    """A row for each API, a column for each case: in what they agree."""
    asked = [kserve_grpc(apis, case) for case in CASES.values()]
    rows = [["API", *CASES], ["---"] * (len(CASES) + 1)]
    for name, (ask, kinds) in APIS.items():
        cells = [
            verdict(apis, ask(apis, case), first) if kinds == "both" or case.is_chat else NONE
            for case, first in zip(CASES.values(), asked, strict=True)
        ]
        rows.append([name, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_every_api_gives_the_same_answer_and_the_page_says_so(apis: Apis) -> None:
    made = table(apis)
    held = re.search(r"<!-- table:begin -->\n(.*?)<!-- table:end -->", PAGE.read_text(), re.DOTALL)
    assert held is not None
    assert held[1] == made
