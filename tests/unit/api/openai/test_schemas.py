"""What the classes of bodies declare, and what a new field takes."""

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from pydantic import Field

from cog_triton.api.openai import schemas
from cog_triton.api.openai.schemas.base import AnswerBody, Ignored, Refused, RequestBody, SetBy
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.responses import ResponsesBody

NONE: dict[str, Any] = {"refused": {}, "ignored": frozenset(), "set_by": {}}


def bodies(base: type[RequestBody] = RequestBody) -> Iterator[type[RequestBody]]:
    """Yield all classes of bodies that the schemas have."""
    for module in pkgutil.iter_modules(schemas.__path__):
        importlib.import_module(f"{schemas.__name__}.{module.name}")
    for body in base.__subclasses__():
        if body.__module__.startswith(schemas.__name__):
            yield body
            yield from bodies(body)


def declared(**declarations: Any) -> type[RequestBody]:
    """Make a class of a body, as a statement of a module does."""
    annotations = dict.fromkeys(declarations, ClassVar[Any]) | {"first": int | None}
    attributes = {"__annotations__": annotations, "__module__": __name__, "first": None}
    return type("NewBody", (RequestBody,), {**attributes, **declarations})


@pytest.mark.parametrize("missing", sorted(NONE))
def test_a_class_without_a_declaration_fails_at_import(missing: str) -> None:
    rest = {name: value for name, value in NONE.items() if name != missing}
    with pytest.raises(TypeError, match=f"NewBody must declare {missing}"):
        declared(**rest)


@pytest.mark.parametrize(
    ("declarations", "problem"),
    [
        ({"refused": {"first": []}}, "declares first as read and refused"),
        ({"ignored": frozenset({"first"})}, "declares first as read and ignored"),
        (
            {"refused": {"b": []}, "ignored": frozenset({"b"})},
            "declares b as refused and ignored",
        ),
        ({"set_by": {"nothing": ["first"]}}, "a Request has no field nothing"),
        ({"set_by": {"prompt": ["second"]}}, "must list fields of the class"),
        ({"set_by": {"prompt": []}}, "must list fields of the class"),
    ],
    ids=["refused", "ignored", "both", "no field of a Request", "no field", "no fields"],
)
def test_a_contradiction_fails_at_import(declarations: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        declared(**(NONE | declarations))


def test_every_body_declares_what_it_does_with_every_field() -> None:
    found = {body.__name__ for body in bodies()}
    assert {"ChatBody", "CompletionBody", "ResponsesBody", "MessagesBody", "BatchBody"} <= found


@pytest.mark.parametrize("body", list(bodies()), ids=lambda body: body.__name__)
def test_lists_and_objects_of_a_body_are_bounded_or_fail_at_their_first_wrong_element(
    body: type[RequestBody],
) -> None:
    """Otherwise each wrong element would make an error of its own."""
    assert list(unbounded(body.__pydantic_core_schema__, body.__name__)) == []


def unbounded(schema: Any, place: str) -> Iterator[str]:
    if isinstance(schema, dict):
        is_list = schema.get("type") == "list" and "items_schema" in schema
        is_free = schema.get("items_schema", {}).get("type") == "any" if is_list else False
        if is_list and not is_free and not schema.get("fail_fast"):
            yield place
        for name, part in schema.items():
            if name not in ("metadata", "cls", "ref"):
                yield from unbounded(part, f"{place}.{name}")
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            yield from unbounded(part, place)


@pytest.mark.parametrize(
    ("body", "needed"),
    [
        (ChatBody, {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}),
        (ResponsesBody, {"model": "m", "input": "Hello"}),
    ],
    ids=["chat", "responses"],
)
def test_values_of_unknown_fields_are_dropped(
    body: type[AnswerBody], needed: dict[str, Any]
) -> None:
    """They have no type, so nothing may store or pass them on."""
    read = body.model_validate({**needed, "zebra": {"a": [1]}, "service_tier": "auto"})
    assert read.model_extra == {}
    assert not {"zebra", "service_tier"} & read.model_dump().keys()
    assert read.warning() == {"Warning": '199 cog-triton "ignored fields: zebra"'}


class WithNewField(ChatBody):
    """A chat with a new field: its bound, and what the field is called in a ``Request``."""

    refused: ClassVar[Refused] = ChatBody.refused
    ignored: ClassVar[Ignored] = ChatBody.ignored
    set_by: ClassVar[SetBy] = ChatBody.set_by

    creativity: int | None = Field(None, ge=0, le=10)


@pytest.mark.parametrize(("value", "is_taken"), [(10, True), (11, False), ("3", False)])
def test_a_new_field_is_one_line_of_its_class(value: Any, is_taken: bool) -> None:
    from cog_triton.api.openai.errors import ApiError
    from cog_triton.api.openai.validation import valid

    messages: Sequence[Any] = [{"role": "user", "content": "Hello"}]
    body = {"model": "m", "messages": messages, "creativity": value}
    if is_taken:
        read = valid(WithNewField, body)
        assert (read.creativity, read.warning(), read.names()["creativity"]) == (
            value,
            {},
            "creativity",
        )
        return
    with pytest.raises(ApiError) as refused:
        valid(WithNewField, body)
    assert (refused.value.status, refused.value.param) == (400, "creativity")
