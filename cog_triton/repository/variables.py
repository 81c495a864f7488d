"""The template variables, which stand as ``${name}`` in a model's config.pbtxt, and a file of their values.

The variables are in variables.yaml, of which ``scripts/make_docs.py`` makes docs/configuration.md's table.
"""

import logging
import math
import os
import re
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped, unused-ignore]
from pydantic import BaseModel

from cog_triton.errors import ConfigurationError
from cog_triton.protocol.triton_messages import DataType

logger = logging.getLogger(__name__)

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Variable(BaseModel, frozen=True, extra="forbid"):
    """One template variable of one model."""

    # The kind of its values, a key of ``expected``. A switch is a boolean whose false means unset.
    kind: str
    description: str
    required: bool = False
    # None leaves the variable unset.
    default: bool | int | float | str | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    def render(self, value: object = None) -> str | None:
        """Return a value as config.pbtxt spells it, None for none or an empty one, or raise ValueError."""
        value = self.default if value is None or value == "" else value
        if value is None and self.required:
            raise ValueError(f"required, {self._expected}")
        if value is None or value == "":
            return value
        # A shell variable that nobody expanded, or a template filled halfway.
        if "${" in str(value):
            raise ValueError(f"still to be expanded, {value!r}")
        try:
            return self._spell(value)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"expected {self._expected}, got {value!r}") from None

    def same(self, one: object, other: object) -> bool:
        """Compare two values as they are spelled; those that are not valid differ."""
        try:
            return self.render(one) == self.render(other)
        except ValueError:
            return False

    def _spell(self, value: object) -> str | None:
        """Return a value as text, or raise KeyError, TypeError or ValueError if it is not of the kind."""
        text = str(value).strip()
        listed = ",".join(map(str, value)) if isinstance(value, list | tuple) else text
        match self.kind:
            case "text" | "path":
                path: str = os.fspath(value)  # type: ignore[call-overload]
                # This fails for bytes, and for half a surrogate pair.
                str.encode(path)
                return path
            case "boolean":
                return str(_BOOLEANS[text.lower()]).lower()
            case "switch":
                return "true" if _BOOLEANS[text.lower()] else None
            case "data type":
                return str(DataType.Name(DataType.Value(f"TYPE_{text.removeprefix('TYPE_')}")))
            case "choice":
                return self._choice(text)
            case "choice list":
                return ",".join(self._choice(item.strip()) for item in listed.split(","))
            case "integer list":
                # Semicolons separate the lists of several model instances in gpu_device_ids.
                return _matching(r"[0-9]+([,;][0-9]+)*", "".join(listed.split()))
            case "integer":
                return str(self._in_range(int(_matching(r"[+-]?[0-9]+", text))))
            case _:
                return str(self._in_range(float(text)))

    def _choice(self, text: str) -> str:
        if text not in self.choices:
            raise ValueError
        return text

    def _in_range(self, number: float) -> float:
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        if not (low <= number <= high and math.isfinite(number)):
            raise ValueError
        return number

    @property
    def _expected(self) -> str:
        words = TABLES.expected[self.kind].format(", ".join(self.choices))
        if self.maximum is not None:
            return f"{words} from {self.minimum:g} to {self.maximum:g}"
        return words if self.minimum is None else f"{words} of at least {self.minimum:g}"


def _matching(pattern: str, text: str) -> str:
    if not re.fullmatch(pattern, text):
        raise ValueError
    return text


class _Tables(BaseModel, frozen=True, extra="forbid"):
    """The content of variables.yaml, whose comments explain the parts."""

    shared: dict[str, Variable]
    variables: dict[str, dict[str, Variable]]
    ignored: dict[str, dict[str, Variable]]
    renamed: dict[str, dict[str, str]]
    renamed_values: dict[str, dict[str, dict[str, str]]]
    optional_models: frozenset[str]
    expected: dict[str, str]


# The parser in C, where PyYAML has it, is eight times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TEXT = Path(__file__).with_name("variables.yaml").read_text(encoding="utf-8")
TABLES: Final = _Tables.model_validate(yaml.load(_TEXT, Loader=_LOADER))
VARIABLES: Final = TABLES.variables


def known(model: str) -> dict[str, Variable]:
    """Return every variable that a template of ``model`` may use, those of older templates included."""
    return {**VARIABLES.get(model, {}), **TABLES.ignored.get(model, {})}


def load_overrides(path: Path) -> dict[str, dict[str, object]]:
    """Read values by model and variable from a YAML file, or raise ConfigurationError.

    They are under ``server: {<model>: {args: {…}}}``, or that under ``instantiate``, as in older releases.
    """
    try:
        document = _mapping(yaml.safe_load(path.read_bytes()), path, "the file")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path}: not valid YAML: {reason}") from None
    where = "server"
    server = document.get("server")
    outer = document.get("instantiate")
    if isinstance(outer, dict) and "server" in outer:
        if server is not None:
            raise ConfigurationError(f"{path}: use server or instantiate.server, not both")
        where = "instantiate.server"
        server = outer["server"]
    for model in document.keys() & VARIABLES.keys():
        logger.warning("%s: %s is ignored; it belongs under server", path, model)
    values = {}
    for model, entry in _mapping(server, path, where).items():
        entry = _mapping(entry, path, f"{where}.{model}")
        for key in entry.keys() - {"args"}:
            raise ConfigurationError(
                f"{path}: {where}.{model}.{key}: unknown key; only args is allowed here"
            )
        args = _mapping(entry.get("args"), path, f"{where}.{model}.args")
        values[str(model)] = {str(name): value for name, value in args.items()}
    return values


def _mapping(value: object, path: Path, where: str) -> dict[Any, Any]:
    if value is not None and not isinstance(value, dict):
        raise ConfigurationError(f"{path}: {where}: expected a mapping, got {value!r}")
    return value or {}
