"""The fields that ask for a form of the output: OpenAI's, trtllm-serve's and vLLM's."""

import json
from typing import Any, Literal

from pydantic import Field

from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.base import JsonObject
from cog_triton.api.openai.schemas.values import JsonSchemaObject, Texts
from cog_triton.request.request import Guide, GuideKind

# The fields of a body that ask for a form, the likeliest to be blamed for an error first.
GUIDE_FIELDS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "guided_choice",
    "response_format",
)


class JsonSchema(JsonObject):
    name: str | None = None
    description: str | None = None
    schema_: JsonSchemaObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(JsonObject):
    """The first three types are OpenAI's; the others, with their fields, are trtllm-serve's."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "ebnf"]
    json_schema: JsonSchema | None = None
    schema_: JsonSchemaObject | None = Field(default=None, alias="schema")
    regex: str | None = None
    ebnf: str | None = None

    @property
    def asks_for_json(self) -> bool:
        return self.type in ("json_object", "json_schema", "json")

    def guide(self) -> Guide | None:
        """Return the guide of the format; None for plain text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Guide(GuideKind.JSON)
            case "json_schema":
                schema = self.json_schema.schema_ if self.json_schema else None
                return _schema_guide(_required(schema, "json_schema.schema"))
            case "json":
                return _schema_guide(_required(self.schema_, "schema"))
            case "regex":
                return Guide(GuideKind.REGEX, _required(self.regex, "regex"))
            case "ebnf":
                return Guide(GuideKind.GRAMMAR, _required(self.ebnf, "ebnf"))


def _required(value: Any, field: str) -> Any:
    if value is None:
        raise invalid(f"response_format must have {field}", "response_format")
    return value


class StructuredOutputs(JsonObject):
    """vLLM's field, which has exactly one of these."""

    json_: JsonSchemaObject | str | None = Field(default=None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: Texts | None = None
    json_object: bool | None = None

    def guides(self) -> dict[str, Guide]:
        """Return the guides of the fields that are set, by their names, or raise ApiError."""
        for name, value in (self.__pydantic_extra__ or {}).items():
            if value is not None and value is not False:
                text = f"structured_outputs.{name} is not supported"
                raise invalid(text, "structured_outputs", "unsupported_parameter")
        guides = _guides("structured_outputs.", self.json_, self.regex, self.grammar, self.choice)
        if self.json_object:
            guides["structured_outputs.json_object"] = Guide(GuideKind.JSON)
        if not guides:
            text = (
                "structured_outputs must have one of json, regex, choice, grammar and json_object"
            )
            raise invalid(text, "structured_outputs")
        return guides


class GuidedFields(JsonObject):
    """The fields of a body that ask for a form of the output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaObject | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Texts | None = None

    def guide(self) -> Guide | None:
        """Return the one guide that the body asks for, or raise ApiError."""
        guides = self.vllm_guides()
        if self.response_format:
            form = self.response_format.guide()
            if form is not None:
                guides["response_format"] = form
        if len(guides) > 1:
            text = f"{' and '.join(guides)} cannot be combined; set only one of them"
            raise invalid(text, next(iter(guides)))
        return next(iter(guides.values()), None)

    def vllm_guides(self) -> dict[str, Guide]:
        """Return the guides of vLLM's fields, by their names."""
        guides = _guides(
            "guided_",
            self.guided_json,
            self.guided_regex,
            self.guided_grammar,
            self.guided_choice,
        )
        if self.structured_outputs:
            guides |= self.structured_outputs.guides()
        return guides


def _guides(
    prefix: str,
    schema: JsonSchemaObject | str | None,
    regex: str | None,
    grammar: str | None,
    choice: list[str] | None,
) -> dict[str, Guide]:
    guides: dict[str, Guide] = {}
    if schema is not None:
        guides[f"{prefix}json"] = _schema_guide(schema)
    if regex is not None:
        guides[f"{prefix}regex"] = Guide(GuideKind.REGEX, regex)
    if grammar is not None:
        guides[f"{prefix}grammar"] = Guide(GuideKind.GRAMMAR, grammar)
    if choice is not None:
        guides[f"{prefix}choice"] = Guide(GuideKind.CHOICE, json.dumps(choice))
    return guides


def _schema_guide(schema: JsonSchemaObject | str) -> Guide:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return Guide(GuideKind.JSON_SCHEMA, text)
