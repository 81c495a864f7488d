"""The classes that all bodies share: what they refuse and ignore, and what a warning names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator
from typing_extensions import Self

from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.values import Temperature
from cog_triton.request.request import Request

# By the name of a refused field, the values that ask for nothing and are accepted.
Refused = Mapping[str, Sequence[Any]]
Ignored = frozenset[str]
# By the name of a field of a ``Request``, the fields of a body that set it.
SetBy = Mapping[str, Sequence[str]]

NAMES_IN_WARNING = 10
FIELD_CHARACTERS = 40
LEFT_OUT_CHARACTERS = 80
_DECLARATIONS = ("refused", "ignored", "set_by")
_REQUEST_FIELDS = frozenset(field.name for field in fields(Request))


class JsonObject(BaseModel):
    """A JSON object of a request. It keeps what it has beyond its fields, for chat templates and echoes."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class RequestBody(JsonObject):
    """The whole body of a request.

    Only the names of unknown fields are kept, so that no value without a type is stored or passed on. Each
    subclass declares these three, which are checked when its module is imported:

    Attributes:
        refused: fields that ask for what this server cannot do, each with the values that ask for nothing.
        ignored: fields that change no answer, and are not named in a warning.
        set_by: for errors, the fields of the body that set a field of a ``Request``. Of several, an error
            names the first that the body has, or else the last.
    """

    refused: ClassVar[Refused]
    ignored: ClassVar[Ignored]
    set_by: ClassVar[SetBy]

    _unknown: list[str] = PrivateAttr(default_factory=list)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        _check_declarations(cls)

    @model_validator(mode="after")
    def _drop_extra_fields(self) -> Self:
        extra = self.__pydantic_extra__
        if not extra:  # also where a body is validated again, as FastAPI does
            return self
        for name, harmless in self.refused.items():
            value = extra.get(name)
            if value is not None and value not in harmless:
                raise invalid(f"{name} is not supported", name, "unsupported_parameter")
        known = {*self.refused, *self.ignored}
        self._unknown = sorted(extra.keys() - known)
        extra.clear()
        return self

    def names(self) -> dict[str, str]:
        """Return the name that an error has for each field, of this body and of a ``Request``."""
        names = {name: name for name in type(self).model_fields}
        for name, setting in self.set_by.items():
            present = (place for place in setting if getattr(self, place, None) is not None)
            names[name] = next(present, setting[-1])
        return names


def _check_declarations(body: type[RequestBody]) -> None:
    """Raise TypeError unless a class declares what it refuses and ignores, without contradictions."""
    where = f"{body.__module__}.{body.__qualname__}"
    missing = [name for name in _DECLARATIONS if name not in body.__dict__]
    if missing:
        raise TypeError(f"{where} must declare {', '.join(missing)}")
    read = body.model_fields.keys()
    for first, second, what in (
        (read, body.refused.keys(), "read and refused"),
        (read, body.ignored, "read and ignored"),
        (body.refused.keys(), body.ignored, "refused and ignored"),
    ):
        both = sorted(set(first) & set(second))
        if both:
            raise TypeError(f"{where} declares {', '.join(both)} as {what}")
    for name, setting in body.set_by.items():
        if name not in _REQUEST_FIELDS:
            raise TypeError(f"{where}.set_by: a Request has no field {name}")
        unknown = [place for place in setting if place.partition(".")[0] not in read]
        if unknown or not setting:
            raise TypeError(
                f"{where}.set_by[{name!r}] must list fields of the class, not {unknown}"
            )


class AnswerBody(RequestBody):
    """The body of a request for an answer, with the fields that all APIs have."""

    refused: ClassVar[Refused] = {}
    ignored: ClassVar[Ignored] = frozenset()
    set_by: ClassVar[SetBy] = {}

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

    def warning(self) -> dict[str, str]:
        """Return the header that names what this server passed over, if there is anything."""
        notes = []
        if self._unknown:
            notes.append(f"ignored fields: {_header_list(self._unknown, FIELD_CHARACTERS)}")
        if self._left_out:
            notes.append(f"left out: {_header_list(self._left_out, LEFT_OUT_CHARACTERS)}")
        if not notes:
            return {}
        return {"Warning": f'199 cog-triton "{"; ".join(notes)}"'}


def _header_list(names: Sequence[str], characters: int) -> str:
    """Return names as a header may have them: no line feeds, no quotes, and not many."""
    readable = []
    for name in names[:NAMES_IN_WARNING]:
        text = re.sub(r"[^\w .-]", "", name)[:characters].strip()
        readable.append(text or "?")
    return ", ".join(readable).encode("ascii", "replace").decode()
