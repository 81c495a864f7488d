"""The bodies of requests, as OpenAI's reference has them, with what vLLM's users add, to a ``Request``.

None stands for a field that was not given. Values are checked by type here, and by range in a ``Request``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cog_triton.errors import shown
from cog_triton.faces.openai.errors import invalid
from cog_triton.request.limits import MESSAGES, TOP_LOG_PROBS
from cog_triton.request.request import MAX_INT32, Guide, GuideKind, Request, resolve_seed

MOST_ANSWERS = 1024  # of the prompts of one request together
Temperature = Annotated[float, Field(le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
OutputTokens = Annotated[int, Field(ge=1, le=MAX_INT32)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Ids = Annotated[list[int], Field(fail_fast=True)]
Bounded = Field(max_length=MESSAGES, fail_fast=True)  # of a list of objects
Answers = Field(max_length=MOST_ANSWERS, fail_fast=True)
Schema = dict[str, Any]


class Body(BaseModel):
    """A JSON object; what it has beyond its fields is named in a warning."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    def names(self) -> dict[str, str]:
        """Return its fields by the names that a ``Request`` has for them, for the texts of errors."""
        return {}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Function(Body):
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedToolNames(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1), Bounded]


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
    choice: list[str] | None = None
    json_object: bool | None = None


class Sampling(Body):
    """The fields that chat and text completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: Temperature | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=1, le=128)
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    user: str | None = None
    # Beyond OpenAI's:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
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
    guided_choice: list[str] | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    def names(self) -> dict[str, str]:
        guides = [
            name for name in type(self).model_fields if name.startswith(("guided_", "struct"))
        ]
        given = [name for name in guides if getattr(self, name) is not None]
        return {"prompt": "prompt", "guide": given[0] if given else "response_format"}


class Message(Body):
    """A message of a chat; further fields are up to the chat template."""

    role: str = Field(min_length=1)
    content: Any = None
    refusal: str | None = None
    tool_call_id: str | None = None


class ChatBody(Sampling):
    messages: Annotated[list[Message], Field(min_length=1), Bounded]
    max_completion_tokens: OutputTokens | None = None
    reasoning_effort: Effort | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOG_PROBS)
    tools: Annotated[list[Tool], Bounded] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None

    @property
    def wanted_log_probs(self) -> int | None:
        """Alternatives of each token of the answer; None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def names(self) -> dict[str, str]:
        names = {**super().names(), "prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names


class CompletionBody(Sampling):
    prompt: str | Annotated[list[str], Answers] | Ids | Annotated[list[Ids], Answers]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=TOP_LOG_PROBS)

    @property
    def wanted_log_probs(self) -> int | None:
        return self.logprobs


class TokenizeBody(Body):
    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Bounded] | None = None
    tools: Annotated[list[Tool], Bounded] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def names(self) -> dict[str, str]:
        return {"prompt": "messages" if self.prompt is None else "prompt"}


class DetokenizeBody(Body):
    model: str
    tokens: Ids


# Fields of OpenAI's and vLLM's that ask for what no engine here does, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "prediction", "web_search_options", "chat_template"), ()),
    **dict.fromkeys(("logprob_token_ids", "prompt_embeds", "repetition_detection"), ()),
    **dict.fromkeys(("functions", "documents", "logits_processors"), ([],)),
    **dict.fromkeys(("include_reasoning", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("use_beam_search", "return_tokens_as_token_ids", "watermarking"), (False,)),
    "suffix": ("",),
    "best_of": (1,),
    "function_call": ("none",),
    "modalities": (["text"],),
    "thinking_token_budget": (-1,),
    "vllm_xargs": ({},),
}
# Those that change no answer, and are no news.
IGNORED = frozenset({"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
FIELDS = frozenset({*ChatBody.model_fields, *CompletionBody.model_fields})
UNKNOWN_CONTEXT = 2**20  # tokens, where only the engine knows how many; it cuts to them
LONGEST_BIAS = 1024
_KINDS = {
    "json": GuideKind.JSON_SCHEMA,
    "regex": GuideKind.REGEX,
    "grammar": GuideKind.GRAMMAR,
    "choice": GuideKind.CHOICE,
}
# Fields that go to a Request as they are; one that is not given is left to its default.
_SAME = Sampling.model_fields.keys() & Request.__dataclass_fields__.keys()
_SAME -= {"max_tokens", "add_special_tokens", "seed", "logit_bias"}


def sampling(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """Return the arguments of a ``Request`` that do not depend on the prompt."""
    if body.stream_options and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs is not allowed when stream is true", "prompt_logprobs")
    values = {name: getattr(body, name) for name in _SAME}
    asked = [n for n in (body.wanted_log_probs, body.prompt_logprobs) if n is not None]
    echoes = isinstance(body, CompletionBody) and bool(body.echo and asked)
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        **{name: value for name, value in values.items() if value is not None},
        "seed": resolve_seed(body.seed),
        "stop_sequences": [body.stop] if isinstance(body.stop, str) else body.stop or (),
        "include_stop": bool(body.include_stop_str_in_output),
        "logit_bias": logit_bias(body.logit_bias or {}),
        "log_probs": max(asked, default=None),
        "prompt_log_probs": body.prompt_logprobs is not None or echoes,
        "guide": guide(body),
    }


def check_fields(
    body: Body,
    refused: Mapping[str, tuple[Any, ...]] = REFUSED,
    ignored: Collection[str] = IGNORED,
) -> dict[str, str]:
    """Refuse known fields that no engine honours; return the headers that name unknown ones."""
    given = body.__pydantic_extra__ or {}
    for name in sorted(refused.keys() & given.keys()):
        if given[name] is not None and given[name] not in refused[name]:
            raise invalid(f"{name} is not supported", name, "unsupported_parameter")
    if not (unknown := sorted(given.keys() - refused.keys() - set(ignored))):
        return {}
    # A header takes neither line feeds nor quotes, and no long list.
    names = ", ".join("".join(filter(str.isidentifier, name))[:40] or "?" for name in unknown[:10])
    names = names.encode("ascii", "replace").decode()
    return {"Warning": f'199 cog-triton "ignored fields: {names}"'}


def logit_bias(given: dict[str, float]) -> list[tuple[int, float]]:
    name = "logit_bias"
    if len(given) > LONGEST_BIAS:
        raise invalid(f"{name} must have at most {LONGEST_BIAS} tokens", name)
    for token, bias in given.items():
        if not token.isdecimal():
            raise invalid(f"{name} must have token ids for keys, not {shown(token)}", name)
        if not -100 <= bias <= 100:
            raise invalid(f"{name} must be between -100 and 100, not {bias}", name)
    return [(int(token), bias) for token, bias in given.items()]


def guide(body: Sampling) -> Guide | None:
    """Return the guide that a body asks for; it may ask for one only."""
    found = guides(body)
    if body.response_format and (formatted := _of_format(body.response_format)):
        found["response_format"] = formatted
    if len(found) > 1:
        raise invalid(f"{' and '.join(found)} contradict; give one of them", next(iter(found)))
    return next(iter(found.values()), None)


def guides(body: Sampling) -> dict[str, Guide]:
    """Return the guides of fields beyond OpenAI's, by their names."""
    asked = {f"guided_{kind}": getattr(body, f"guided_{kind}") for kind in _KINDS}
    if body.structured_outputs:
        given = body.structured_outputs.model_dump(by_alias=True).items()
        wanted = {kind: value for kind, value in given if value is not None and value is not False}
        if not wanted:
            text = "structured_outputs must say what the output has to be"
            raise invalid(text, "structured_outputs")
        asked |= {f"structured_outputs.{kind}": value for kind, value in wanted.items()}
    return {name: _guide(name, value) for name, value in asked.items() if value is not None}


def _guide(name: str, value: Any) -> Guide:
    kind = name.removeprefix("guided_").removeprefix("structured_outputs.")
    if kind == "json_object":
        return Guide(GuideKind.JSON)
    if kind not in _KINDS:
        raise invalid(f"{name} is not supported", "structured_outputs", "unsupported_parameter")
    return Guide(_KINDS[kind], value if isinstance(value, str) else json.dumps(value))


def _of_format(format: ResponseFormat) -> Guide | None:
    if format.type == "text":
        return None
    if format.type == "json_object":
        return Guide(GuideKind.JSON)
    schema = format.json_schema.schema_ if format.json_schema else None
    place, kind, value = {
        "json_schema": ("json_schema.schema", "json", schema),
        "json": ("schema", "json", format.schema_),
        "regex": ("regex", "regex", format.regex),
        "ebnf": ("ebnf", "grammar", format.ebnf),
    }[format.type]
    if value is None:
        raise invalid(f"response_format must have {place}", "response_format")
    return _guide(kind, value)
