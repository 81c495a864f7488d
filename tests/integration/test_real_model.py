"""A real instruct model, SmolLM2-135M-Instruct, by every API: what Hugging Face's generate() says.

One server for the whole file, on the transformers engine in float32. Answers are short, since two cores
make about ten tokens a second.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.text.tokenizer import Tokenizer, load_tokenizer
from tests.integration.test_resuming import LASTING, victim
from tests.late import torch, transformers
from tests.support import CogServer, free_port
from tools.server_sent_events import EventParser
from tools.smollm2 import CannotBeFetched, checkpoint

pytestmark = [pytest.mark.rare, pytest.mark.usefixtures("expected")]

MAX_TOKENS = 10
TIMEOUT = 300
ADAPTER = "bard"
QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Japan?",
    "How many legs does a spider have?",
    "Name three colours.",
    "What is 2 + 2?",
    "Who wrote Hamlet?",
    "Translate 'good morning' into French.",
    "Translate 'thank you' into German: only the words.",
    "What do bees make?",
    "Write a line about the sea. 🌊",
    "Was ist ein Computer?",
    "Qu'est-ce que la photosynthèse ?",
    "说一句中文。",
    "List the days of the week.",
    "What is the boiling point of water in °C?",
    "Write a Python function that adds two numbers.",
    "Is the Earth flat? Answer with yes or no.",
    "Give me a synonym of happy.",
    "What is machine learning?",
    "Tell me a joke about cats.",
]
TEXT = (
    "The lighthouse stood at the end of a narrow strip of land, where the wind never rested. Every "
    "evening the keeper climbed its stairs, lit the lamp and wrote the time in a book. Ships passed "
    "far out; some of them answered with a horn. In winter the waves rose over the rocks and left a "
    "crust of salt on the windows. He did not mind. He had books, a stove and a radio, and on clear "
    "nights he counted the stars until he lost the number."
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "country": {"type": "string", "maxLength": 12},
        "visited": {"type": "boolean"},
    },
    "required": ["city", "country", "visited"],
    "additionalProperties": False,
}


def messages_of(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@dataclass(frozen=True)
class Generated:
    """The greedy answer of generate() to a chat."""

    prompt_ids: list[int]
    ids: list[int]  # the end token among them
    is_ended: bool  # by the end token, not by MAX_TOKENS
    text: str  # without special tokens


class Reference:
    """Hugging Face's model, with PEFT's adapter or without."""

    def __init__(self, directory: Path, adapter: Path, tokenizer: Tokenizer) -> None:
        from peft import PeftModel

        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model = PeftModel.from_pretrained(model, str(adapter)).eval()
        self._tokenizer = tokenizer

    def answers(self, questions: list[str]) -> dict[str, Generated]:
        with self._model.disable_adapter():
            return self._answers(questions)

    def answers_with_adapter(self, questions: list[str]) -> dict[str, Generated]:
        return self._answers(questions)

    def log_probabilities(self, ids: list[int]) -> torch.Tensor:
        """Return those of every token at every place, given the tokens before it."""
        with self._model.disable_adapter(), torch.no_grad():
            logits = self._model(input_ids=torch.tensor([ids])).logits[0]
        rows: torch.Tensor = logits.log_softmax(-1)
        return rows

    def _answers(self, questions: list[str]) -> dict[str, Generated]:
        # All in one batch, which takes a tenth of the time.
        prompts = [self._prompt(question) for question in questions]
        width = max(len(prompt) for prompt in prompts)
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        outputs = self._model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(masks),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
        )
        return {
            question: self._generated(prompt, output[width:].tolist())
            for question, prompt, output in zip(questions, prompts, outputs, strict=True)
        }

    def _prompt(self, question: str) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            messages_of(question), add_generation_prompt=True, return_dict=False
        )
        return list(ids)

    def _generated(self, prompt: list[int], ids: list[int]) -> Generated:
        end = self._tokenizer.eos_token_id
        if end in ids:
            ids = ids[: ids.index(end) + 1]  # what is behind it fills the batch
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Generated(prompt_ids=prompt, ids=ids, is_ended=end in ids, text=str(text))


@dataclass(frozen=True)
class Answer:
    """What an API says; ``ids`` where it says them."""

    text: str
    tokens: int
    reason: str
    ids: list[int] | None = None


class Apis:
    """One server with Cog's API and, beside it, OpenAI's and Anthropic's."""

    def __init__(self, server: CogServer) -> None:
        self.server = server
        self._openai = f"http://127.0.0.1:{server.environment['OPENAI_PORT']}/v1"

    def post(self, path: str, **fields: Any) -> Any:
        """Return the whole answer of OpenAI's or Anthropic's API."""
        body = {"model": "smollm2", "temperature": 0, **fields}
        reply = httpx.post(f"{self._openai}/{path}", json=body, trust_env=False, timeout=TIMEOUT)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def predict(self, **inputs: Any) -> Any:
        """Return the whole prediction of Cog's API."""
        url = f"{self.server.url}/predictions"
        body = {"input": {"temperature": 0, **inputs}}
        reply = httpx.post(url, json=body, trust_env=False, timeout=TIMEOUT)
        prediction = reply.json()
        assert prediction.get("status") == "succeeded", prediction
        return prediction

    def events(self, url: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the JSON of a stream's events, as they come."""
        accept = {"Accept": "text/event-stream"}
        with httpx.stream(
            "POST", url, json=body, headers=accept, trust_env=False, timeout=TIMEOUT
        ) as reply:
            assert reply.status_code == 200, reply.read()
            parser = EventParser()
            for block in reply.iter_raw():
                for _, data in parser.feed(block):
                    if data.strip() != b"[DONE]":
                        yield json.loads(data)

    def cog(self, question: str, **inputs: Any) -> Answer:
        prediction = self.predict(**{"prompt": question, "max_tokens": MAX_TOKENS, **inputs})
        metrics = prediction["metrics"]
        return Answer(
            text="".join(prediction["output"]),
            tokens=metrics["output_token_count"],
            reason=metrics["finish_reason"],
        )

    def chat(self, question: str, **fields: Any) -> Answer:
        asked = {"max_tokens": MAX_TOKENS, "return_token_ids": True, **fields}
        body = self.post("chat/completions", messages=messages_of(question), **asked)
        (choice,) = body["choices"]
        return Answer(
            text=choice["message"]["content"],
            tokens=body["usage"]["completion_tokens"],
            reason=choice["finish_reason"],
            ids=choice["token_ids"],
        )

    def completion(self, prompt: list[int], **fields: Any) -> Answer:
        asked = {"max_tokens": MAX_TOKENS, "return_token_ids": True, **fields}
        body = self.post("completions", prompt=prompt, **asked)
        (choice,) = body["choices"]
        return Answer(
            text=choice["text"],
            tokens=body["usage"]["completion_tokens"],
            reason=choice["finish_reason"],
            ids=choice["token_ids"],
        )

    def response(self, question: str, **fields: Any) -> Answer:
        body = self.post("responses", input=question, max_output_tokens=MAX_TOKENS, **fields)
        (part,) = body["output"][0]["content"]
        return Answer(
            text=part["text"],
            tokens=body["usage"]["output_tokens"],
            reason="stop" if body["status"] == "completed" else "length",
        )

    def message(self, question: str, **fields: Any) -> Answer:
        asked = {"max_tokens": MAX_TOKENS, **fields}
        body = self.post("messages", messages=messages_of(question), **asked)
        reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}
        return Answer(
            text="".join(block["text"] for block in body["content"]),
            tokens=body["usage"]["output_tokens"],
            reason=reasons[body["stop_reason"]],
        )

    def pieces(self, api: str, question: str, prompt: list[int]) -> Iterator[str]:
        """Yield the texts of a streamed answer."""
        if api == "cog":
            inputs = {"prompt": question, "temperature": 0, "max_tokens": MAX_TOKENS}
            for event in self.events(f"{self.server.url}/predictions", {"input": inputs}):
                yield event.get("chunk", "")
            return
        body: dict[str, Any] = {"model": "smollm2", "temperature": 0, "stream": True}
        if api == "responses":
            body |= {"input": question, "max_output_tokens": MAX_TOKENS}
        elif api == "completions":
            body |= {"prompt": prompt, "max_tokens": MAX_TOKENS}
        else:
            body |= {"messages": messages_of(question), "max_tokens": MAX_TOKENS}
        for event in self.events(f"{self._openai}/{api}", body):
            if api == "responses":
                is_text = event["type"] == "response.output_text.delta"
                yield event["delta"] if is_text else ""
            elif api == "messages":
                is_text = event["type"] == "content_block_delta"
                yield event["delta"]["text"] if is_text else ""
            elif api == "completions":
                yield event["choices"][0]["text"]
            else:
                yield event["choices"][0]["delta"].get("content") or ""


STREAMING = ["cog", "chat/completions", "completions", "responses", "messages"]


@pytest.fixture(scope="module")
def model() -> Path:
    pytest.importorskip("gguf")
    try:
        return checkpoint()
    except CannotBeFetched as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.peft_reference import make_varied_adapter

    directory = tmp_path_factory.mktemp("adapters")
    make_varied_adapter(model, directory / ADAPTER)
    return directory


@pytest.fixture(scope="module")
def model_tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(str(model))


@pytest.fixture(scope="module")
def reference(model: Path, adapters: Path, model_tokenizer: Tokenizer) -> Reference:
    return Reference(model, adapters / ADAPTER, model_tokenizer)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[str, Generated]:
    """The answers of generate(), made before the server takes the processors."""
    return reference.answers(QUESTIONS)


@pytest.fixture(scope="module")
def apis(
    model: Path,
    adapters: Path,
    expected: dict[str, Generated],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Apis]:
    assert expected
    environment = {
        **LASTING,
        "MODEL": str(model),
        "ENGINE": "transformers",
        "DTYPE": "float32",
        "LORA_DIR": str(adapters),
        "OPENAI_PORT": str(free_port()),
        "SERVED_MODEL_NAME": "smollm2",
    }
    with CogServer(environment, tmp_path_factory.mktemp("smollm2") / "log") as server:
        server.wait_until_ready()
        yield Apis(server)
    assert "Traceback" not in server.log.read_text()


def assert_equal(answer: Answer, generated: Generated) -> None:
    """Compare all that an API says with generate()'s answer."""
    assert answer.text == generated.text
    assert answer.reason == ("stop" if generated.is_ended else "length")
    if answer.ids is not None:
        assert answer.ids == generated.ids
    assert answer.tokens == len(generated.ids)


def test_alone_every_answer_has_the_ids_of_generate(
    apis: Apis, expected: dict[str, Generated]
) -> None:
    for question, generated in expected.items():
        assert_equal(apis.chat(question), generated)


def test_sixteen_at_once_have_them_too_by_every_api(
    apis: Apis, expected: dict[str, Generated]
) -> None:
    ways: list[Callable[[str], Answer]] = [
        apis.chat,
        lambda question: apis.completion(expected[question].prompt_ids),
        apis.response,
        apis.message,
        apis.cog,
    ]
    questions = QUESTIONS[:16]
    with ThreadPoolExecutor(len(questions)) as pool:
        asked = [
            pool.submit(ways[number % len(ways)], question)
            for number, question in enumerate(questions)
        ]
        answers = [future.result() for future in asked]
    for question, answer in zip(questions, answers, strict=True):
        assert_equal(answer, expected[question])


@pytest.mark.parametrize("api", STREAMING)
def test_a_streamed_answer_comes_in_pieces(
    apis: Apis, expected: dict[str, Generated], api: str
) -> None:
    question = "What is machine learning?"
    generated = expected[question]
    pieces = [piece for piece in apis.pieces(api, question, generated.prompt_ids) if piece]
    assert "".join(pieces) == generated.text
    assert len(pieces) > MAX_TOKENS // 2


def test_a_chat_ends_at_its_end_token(apis: Apis, model_tokenizer: Tokenizer) -> None:
    question = "What is the capital of France?"
    answer = apis.chat(question)
    assert answer.text == "The capital of France is Paris."
    assert answer.reason == "stop"
    assert answer.ids is not None
    assert model_tokenizer.convert_ids_to_tokens(answer.ids[-1]) == "<|im_end|>"
    assert "Paris" in "".join(apis.predict(prompt=question, max_tokens=MAX_TOKENS)["output"])
    # The same prompt, as it is: the model goes on with it instead of answering.
    raw = apis.predict(prompt=question, prompt_template="{prompt}", max_tokens=4, min_tokens=4)
    assert "".join(raw["output"]) != answer.text


@pytest.mark.parametrize("api", ["cog", "chat/completions", "messages"])
def test_an_answer_to_a_json_schema_is_valid(apis: Apis, api: str) -> None:
    question = "Describe a trip to Rome as JSON with city, country and visited."
    if api == "cog":
        text = apis.cog(question, json_schema=json.dumps(SCHEMA), max_tokens=60).text
    elif api == "messages":
        schema_format = {"type": "json_schema", "schema": SCHEMA}
        text = apis.message(question, output_config={"format": schema_format}, max_tokens=60).text
    else:
        named = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
        text = apis.chat(question, response_format=named, max_tokens=60).text
    trip = json.loads(text)
    assert list(trip) == ["city", "country", "visited"]
    assert isinstance(trip["visited"], bool)
    assert len(trip["city"]) <= 12


def test_a_stop_string_ends_the_text_before_it(apis: Apis, expected: dict[str, Generated]) -> None:
    question = "What is the capital of Japan?"
    whole = expected[question].text
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]  # wherever the tokens begin and end
    before, _, _ = whole.partition(stop)
    answers = [
        apis.chat(question, stop=[stop]),
        apis.message(question, stop_sequences=[stop]),
        apis.cog(question, stop_sequences=stop),
    ]
    assert [answer.text for answer in answers] == [before] * 3
    assert {answer.reason for answer in answers} == {"stop"}


def test_log_probabilities_are_near_those_of_generate(
    apis: Apis, reference: Reference, expected: dict[str, Generated]
) -> None:
    question = "Who wrote Hamlet?"
    generated = expected[question]
    asked = {"max_tokens": MAX_TOKENS, "logprobs": True, "top_logprobs": 3}
    body = apis.post("chat/completions", messages=messages_of(question), **asked)
    entries = body["choices"][0]["logprobs"]["content"]
    assert entries
    rows = reference.log_probabilities(generated.prompt_ids + generated.ids)
    first = len(generated.prompt_ids) - 1
    for entry, row, token in zip(entries, rows[first:], generated.ids, strict=False):
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=5e-3)
        most = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert most == pytest.approx(row.topk(3).values.tolist(), abs=5e-3)


def test_the_perplexity_of_a_text_is_that_of_hugging_face(
    apis: Apis, reference: Reference, model_tokenizer: Tokenizer
) -> None:
    ids = model_tokenizer(TEXT).input_ids
    body = apis.post("completions", prompt=TEXT, echo=True, logprobs=0, max_tokens=0)
    values = body["choices"][0]["logprobs"]["token_logprobs"]
    assert len(values) == len(ids)
    rows = reference.log_probabilities(ids)
    wanted = [rows[place, token].item() for place, token in enumerate(ids[1:])]
    perplexities = [math.exp(-sum(some) / len(some)) for some in (values[1:], wanted)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=0.01)
    assert 5 < perplexities[0] < 100, "a trained model knows English"


def test_an_adapter_answers_beside_its_base(
    apis: Apis, reference: Reference, expected: dict[str, Generated]
) -> None:
    questions = QUESTIONS[:3]
    wanted = reference.answers_with_adapter(questions)
    with ThreadPoolExecutor(2 * len(questions)) as pool:
        adapted = [pool.submit(apis.chat, question, model=ADAPTER) for question in questions]
        plain = [pool.submit(apis.chat, question) for question in questions]
    for question, with_adapter, without in zip(questions, adapted, plain, strict=True):
        assert wanted[question].ids != expected[question].ids
        assert_equal(with_adapter.result(), wanted[question])
        assert_equal(without.result(), expected[question])


def test_answers_go_on_when_tritonserver_is_killed(
    apis: Apis, expected: dict[str, Generated]
) -> None:
    questions = [question for question in QUESTIONS if not expected[question].is_ended][:5]
    process = victim(apis.server, "tritonserver")
    begun = threading.Barrier(len(questions) + 1)

    def streamed(api: str, question: str) -> str:
        text = ""
        pieces = 0
        for piece in apis.pieces(api, question, expected[question].prompt_ids):
            text += piece
            if piece:
                pieces += 1
            if piece and pieces == 2:
                begun.wait(TIMEOUT)
        return text

    with ThreadPoolExecutor(len(questions)) as pool:
        asked = [pool.submit(streamed, *pair) for pair in zip(STREAMING, questions, strict=True)]
        begun.wait(TIMEOUT)
        os.kill(process, signal.SIGKILL)
        answers = [future.result() for future in asked]
    assert answers == [expected[question].text for question in questions]
    assert "resuming request" in apis.server.log.read_text()
