"""The template variables: what may stand as ``${name}`` in a model's config.pbtxt.

The table of them is variables.yaml, beside this file; here is what it is read as, and how a value
becomes what config.pbtxt has. ``scripts/make_docs.py`` turns the table into the one in
docs/configuration.md.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from cog_triton.data_files import read_data

Kind = Literal[
    "integer",
    "float",
    "boolean",
    "switch",
    "text",
    "path",
    "data type",
    "integer list",
    "choice",
    "choice list",
]

REQUIRED: Final = object()
"""Default of a variable that must be given."""


@dataclass(frozen=True)
class Variable:
    """One template variable of one model.

    Attributes:
        default: the value when none is given. ``None`` means unset: the lines that use the
            variable are dropped. ``REQUIRED`` means that a value must be given.
        kind: what values look like. A switch is a boolean whose false means unset.
    """

    name: str
    kind: Kind
    default: object
    description: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    def render(self, value: object = None) -> str | None:
        """The value as config.pbtxt spells it, unescaped; None leaves the variable unset.

        An empty value counts as none given.

        Raises:
            ValueError: saying what was expected, without the variable's name.
        """
        value = self.default if value is None or value == "" else value
        if value is REQUIRED:
            raise ValueError(f"required, {self.expected}")
        if value is None:
            return None
        if value == "":
            return ""
        # What a shell variable that nobody expanded, or a template filled halfway, leaves.
        if "${" in str(value):
            raise ValueError(f"still to be expanded, {value!r}")
        try:
            return _RENDER[self.kind](self, value)
        except ValueError:
            raise ValueError(f"expected {self.expected}, got {value!r}") from None

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "choice list":
            return f"some of {', '.join(self.choices)}, separated by commas"
        return _EXPECTED[self.kind] + self._range

    @property
    def _range(self) -> str:
        if self.maximum is not None:
            return f" from {self.minimum:g} to {self.maximum:g}"
        return "" if self.minimum is None else f" of at least {self.minimum:g}"

    def check_range(self, number: float) -> None:
        """Raises ValueError for a number outside of minimum and maximum."""
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        if not low <= number <= high:
            raise ValueError


_EXPECTED: dict[Kind, str] = {
    "integer": "an integer",
    "float": "a number",
    "boolean": "true or false",
    "switch": "true or false",
    "text": "text, in quotes",
    "path": "a path",
    "data type": "a Triton data type such as TYPE_FP32",
    "integer list": "integers separated by commas",
}
_BOOLEANS = {
    "true": "true",
    "1": "true",
    "yes": "true",
    "false": "false",
    "0": "false",
    "no": "false",
}
_DATA_TYPES = {"BOOL", "STRING", "BF16", "FP16", "FP32", "FP64"} | {
    f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)
}


def _integer(variable: Variable, value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError
    variable.check_range(value)
    return str(value)


def _float(variable: Variable, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    variable.check_range(number)
    return repr(number)


def _boolean(_variable: Variable, value: object) -> str:
    try:
        return _BOOLEANS[str(value).strip().lower()]
    except KeyError:
        raise ValueError from None


def _switch(variable: Variable, value: object) -> str | None:
    return "true" if _boolean(variable, value) == "true" else None


def _text(_variable: Variable, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    value.encode()  # raises for half a surrogate pair, which cannot be written to a file
    return value


def _path(variable: Variable, value: object) -> str:
    return _text(variable, os.fspath(value) if isinstance(value, os.PathLike) else value)


def _data_type(_variable: Variable, value: object) -> str:
    name = str(value).strip().removeprefix("TYPE_")
    if name not in _DATA_TYPES:
        raise ValueError
    return f"TYPE_{name}"


def _integer_list(_variable: Variable, value: object) -> str:
    items = value if isinstance(value, (list, tuple)) else [value]
    text = ",".join("".join(str(item).split()) for item in items)
    # Semicolons separate the lists of several model instances in gpu_device_ids.
    if not re.fullmatch(r"[0-9]+([,;][0-9]+)*", text):
        raise ValueError
    return text


def _choice(variable: Variable, value: object) -> str:
    if str(value).strip() not in variable.choices:
        raise ValueError
    return str(value).strip()


def _choice_list(variable: Variable, value: object) -> str:
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    if not items:
        raise ValueError
    return ",".join(_choice(variable, item) for item in items)


_RENDER: dict[Kind, Callable[[Variable, object], str | None]] = {
    "integer": _integer,
    "float": _float,
    "boolean": _boolean,
    "switch": _switch,
    "text": _text,
    "path": _path,
    "data type": _data_type,
    "integer list": _integer_list,
    "choice": _choice,
    "choice list": _choice_list,
}


class _Row(BaseModel):
    """One variable as variables.yaml has it: either required, or with a default (unset without one)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    description: str
    required: bool = False
    default: bool | int | float | str | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    def variable(self, name: str) -> Variable:
        default = REQUIRED if self.required else self.default
        rest = self.model_dump(exclude={"required", "default"})
        return Variable(name=name, default=default, **rest)


class _Tables(BaseModel):
    """The file variables.yaml. Its key ``shared`` holds what the others refer to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared: dict[str, _Row]
    variables: dict[str, dict[str, _Row]]
    ignored: dict[str, dict[str, _Row]]
    renamed: dict[str, dict[str, str]]
    renamed_values: dict[str, dict[str, dict[str, str]]]
    optional_models: frozenset[str]


def _named(models: Mapping[str, Mapping[str, _Row]]) -> dict[str, dict[str, Variable]]:
    return {
        model: {name: row.variable(name) for name, row in rows.items()}
        for model, rows in models.items()
    }


_TABLES: Final = read_data(Path(__file__).with_name("variables.yaml"), _Tables)

VARIABLES: Final[Mapping[str, Mapping[str, Variable]]] = _named(_TABLES.variables)
"""By model, then by name. A template may use any of its model's variables and need not use all."""

IGNORED: Final[Mapping[str, Mapping[str, Variable]]] = _named(_TABLES.ignored)
"""Names of older templates that have no effect in today's. The description says why.

They are known rather than unknown, so that a template of that age can still be filled.
"""

RENAMED: Final[Mapping[str, Mapping[str, str]]] = _TABLES.renamed
"""Old name to new name, by model."""

RENAMED_VALUES: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = _TABLES.renamed_values
"""Old value to new value, by model and variable."""

OPTIONAL_MODELS: Final = _TABLES.optional_models
"""Models that are part of a filled repository only if a configuration has values for them, or names
them without any. It may do so without the templates' directory having the model."""


def known(model: str) -> dict[str, Variable]:
    """Every variable that a template of ``model`` may use, those of older templates included."""
    return {**VARIABLES.get(model, {}), **IGNORED.get(model, {})}
