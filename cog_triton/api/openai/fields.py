"""The bodies of requests, as OpenAI's reference has them, with what vLLM's users add, to a ``Request``."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticKnownError

from cog_triton.api.openai.errors import TABLES, invalid
from cog_triton.api.openai.served import Served
from cog_triton.request.limits import LOGIT_BIASES, MESSAGES, TOP_LOG_PROBS
from cog_triton.request.request import MAX_INT32, Guide, GuideKind, Request, resolve_seed

MOST_ANSWERS = 1024  # of the prompts of one request together
Temperature = Annotated[float, Field(le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
OutputTokens = Annotated[int, Field(ge=1, le=MAX_INT32)]
# OpenAI allows 64 characters; agents that Anthropic's API serves send up to 128.
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Ids = Annotated[list[int], Field(fail_fast=True)]
# Without it, each wrong element of a list would have an error of its own.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Bounded = Field(max_length=MESSAGES, fail_fast=True)  # of a list of objects
Answers = Field(max_length=MOST_ANSWERS, fail_fast=True)
Schema = dict[str, Any]


def few_pairs(most: int) -> BeforeValidator:
    """Return the check of an object's length, before its pairs, each of which may have an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            lengths = {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", lengths)
        return value

    return BeforeValidator(check)


Biases = Annotated[dict[TokenId, Bias], few_pairs(LOGIT_BIASES)]
Metadata = Annotated[dict[str, str], few_pairs(16)]


class Body(BaseModel):
    """A JSON object; what it has beyond its fields is named in a warning."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    def names(self) -> dict[str, str]:
        """Return its fields, also by the names that a ``Request`` has for them, for errors."""
        names = {name: name for name in type(self).model_fields}
        for name, own in TABLES.get(type(self).__name__, {}).get("names", {}).items():
            given = (field for field in own if getattr(self, field, None) is not None)
            names[name] = next(given, own[-1])
        return names


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class Function(NamedFunction):
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(NamedTool):
    function: Function


class Custom(NamedFunction):
    """What a chat's custom tool is; its input is a text, perhaps of a grammar."""

    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None


class NamedCustomTool(Body):
    type: Literal["custom"]
    custom: NamedFunction


class CustomTool(NamedCustomTool):
    custom: Custom


class HostedTool(Body):
    """A tool of another type, or the choice of one: OpenAI's servers run it, and nothing here can."""

    type: str


def _tool_kind(tool: Any) -> str:
    """Return which class a tool has."""
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    if kind == "custom":
        return "custom"
    return "hosted" if isinstance(kind, str) and kind != "function" else "function"


def _choice_kind(choice: Any) -> str:
    """Return which class a tool_choice has that is an object."""
    kind = choice.get("type") if isinstance(choice, Mapping) else getattr(choice, "type", None)
    return "allowed" if kind == "allowed_tools" else _tool_kind(choice)


AnyTool = Annotated[
    Annotated[Tool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_kind),
]
AnyNamedTool = Annotated[
    Annotated[NamedTool, Tag("function")]
    | Annotated[NamedCustomTool, Tag("custom")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_kind),
]


class AllowedToolNames(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyNamedTool], Field(min_length=1), Bounded]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolNames


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Of OpenAI's API the first three types; the others, with their fields, are trtllm-serve's."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "ebnf"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    regex: str | None = None
    ebnf: str | None = None


class StructuredOutputs(Body):
    """vLLM's, of which one is given."""

    json_: Schema | str | None = Field(default=None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: Texts | None = None
    json_object: bool | None = None


class Asking(Body):
    """The fields that all APIs have for an answer."""

    model: str
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: float | None = None
    seed: int | None = None
    # Beyond some of the APIs':
    top_k: int | None = None
    min_p: float | None = None
    _left_out: list[str] = PrivateAttr(default_factory=list)

    def leave_out(self, what: str) -> None:
        """Note a part of the request that cannot be done here, for the Warning header."""
        if what not in self._left_out:
            self._left_out.append(what)

    @model_validator(mode="after")
    def _refuse(self) -> "Asking":
        given = self.__pydantic_extra__ or {}
        for name, values in TABLES[type(self).__name__]["refused"].items():
            if given.get(name) is not None and given[name] not in values:
                raise invalid(f"{name} is not supported", name, "unsupported_parameter")
        return self

    def warning(self) -> dict[str, str]:
        """Return the header that names what this server passed over, if there is anything."""
        table = TABLES[type(self).__name__]
        known = {*table["refused"], *table["ignored"]}
        unknown = sorted((self.__pydantic_extra__ or {}).keys() - known)
        notes = []
        if unknown:
            notes.append(f"ignored fields: {_header_list(unknown, most_characters=40)}")
        if self._left_out:
            notes.append(f"left out: {_header_list(self._left_out, most_characters=80)}")
        if not notes:
            return {}
        return {"Warning": f'199 cog-triton "{"; ".join(notes)}"'}


def _header_list(names: Sequence[str], most_characters: int) -> str:
    """Return names as a header may have them: no line feeds, no quotes, and not many."""
    readable = (
        re.sub(r"[^\w .-]", "", name)[:most_characters].strip() or "?" for name in names[:10]
    )
    return ", ".join(readable).encode("ascii", "replace").decode()


class Sampling(Asking):
    """The fields that chat and text completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = Field(None, ge=1, le=128)
    stop: str | Texts | None = None
    logit_bias: Biases | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    user: str | None = None
    # Beyond OpenAI's:
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: Texts | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[Ids, Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=TOP_LOG_PROBS)
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(2**63), lt=2**63)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Texts | None = None


class Message(Body):
    """A message of a chat; further fields are up to the chat template."""

    role: str = Field(min_length=1)
    content: Any = None
    refusal: str | None = None
    tool_call_id: str | None = None


class Rendering(Body):
    """The fields of a chat that its template takes."""

    tools: Annotated[list[AnyTool], Bounded] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatBody(Rendering, Sampling):
    messages: Annotated[list[Message], Field(min_length=1), Bounded]
    max_completion_tokens: OutputTokens | None = None
    reasoning_effort: Effort | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOG_PROBS)
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[
            Annotated[NamedTool, Tag("function")]
            | Annotated[NamedCustomTool, Tag("custom")]
            | Annotated[AllowedTools, Tag("allowed")]
            | Annotated[HostedTool, Tag("hosted")],
            Discriminator(_choice_kind),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None

    @property
    def wanted_log_probs(self) -> int | None:
        """Alternatives of each token of the answer; None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Sampling):
    prompt: str | Annotated[list[str], Answers] | Ids | Annotated[list[Ids], Answers]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=TOP_LOG_PROBS)

    @property
    def wanted_log_probs(self) -> int | None:
        return self.logprobs


class TokenizeBody(Rendering):
    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Bounded] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str = ""
    tokens: Ids


UNKNOWN_CONTEXT = 2**20  # tokens, where only the engine knows how many; it cuts to them
# Fields that go to a Request as they are; one that is not given is left to its default.
_SAME = Sampling.model_fields.keys() & Request.__dataclass_fields__.keys()
_SAME -= {"max_tokens", "add_special_tokens", "seed", "logit_bias"}


def sampling(body: ChatBody | CompletionBody, served: Served) -> dict[str, Any]:
    """Return the arguments of a ``Request`` that do not depend on the prompt."""
    if body.stream_options and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs is not allowed when stream is true", "prompt_logprobs")
    asked = [n for n in (body.wanted_log_probs, body.prompt_logprobs) if n is not None]
    echoes = isinstance(body, CompletionBody) and bool(body.echo and asked)
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        **served.backend.sampling_defaults,
        **body.model_dump(include=_SAME, exclude_none=True),
        "seed": resolve_seed(body.seed, draws=served.backend.draws_seeds),
        "stop_sequences": [body.stop] if isinstance(body.stop, str) else body.stop or (),
        "include_stop": bool(body.include_stop_str_in_output),
        "logit_bias": [(int(token), bias) for token, bias in (body.logit_bias or {}).items()],
        "log_probs": max(asked, default=None),
        "prompt_log_probs": body.prompt_logprobs is not None or echoes,
        "guide": guide(body),
        "adapter": served.adapter(body.model),
        "pad_id": served.settings.pad_id,
    }


def guide(body: Sampling) -> Guide | None:
    """Return the guide that a body asks for; it may ask for one only."""
    found, format = guides(body), body.response_format
    if format and format.type != "text":
        place, kind = TABLES["formats"][format.type]
        value: Any = format.model_dump(by_alias=True)
        for name in place.split("."):
            value = value and value[name]
        if value is None:
            raise invalid(f"response_format must have {place}", "response_format")
        found["response_format"] = _guide(kind, value)
    if len(found) > 1:
        raise invalid(
            f"{' and '.join(found)} cannot be combined; set only one of them", next(iter(found))
        )
    return next(iter(found.values()), None)


def guides(body: Sampling) -> dict[str, Guide]:
    """Return the guides of fields beyond OpenAI's, by their names."""
    given = {f"guided_{kind}": getattr(body, f"guided_{kind}", None) for kind in TABLES["guides"]}
    if body.structured_outputs:
        outputs = body.structured_outputs.model_dump(by_alias=True).items()
        wanted = {f"structured_outputs.{kind}": own for kind, own in outputs if own is not False}
        if all(value is None for value in wanted.values()):
            text = (
                "structured_outputs must have one of json, regex, choice, grammar and json_object"
            )
            raise invalid(text, "structured_outputs")
        given |= wanted
    return {name: _guide(name, value) for name, value in given.items() if value is not None}


def _guide(name: str, value: Any) -> Guide:
    kind = name.removeprefix("guided_").removeprefix("structured_outputs.")
    if kind == "json_object":
        return Guide(GuideKind.JSON)
    if kind not in TABLES["guides"]:
        raise invalid(f"{name} is not supported", "structured_outputs", "unsupported_parameter")
    text = value if isinstance(value, str) else json.dumps(value)
    return Guide(GuideKind(TABLES["guides"][kind]), text)
