"""The two forms of the build configuration, as they are written: the keys of each, and what is under them.

What the values mean is not asked here: those of the short form are checked by ``EngineConfig``, those of
the step form become values of it, see ``migration``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails, PydanticCustomError

from tools.engine_builder.arguments import OLD_SCRIPTS
from tools.engine_builder.config import EngineConfig

Problem = tuple[str, str]
"""The path of a key in the file, and what is wrong there."""
Names = dict[Any, Any] | None


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_SHORT_FORM: dict[str, Any] = {
    **dict.fromkeys((*EngineConfig.model_fields, "max_output_len"), (Any, None)),
    **dict.fromkeys(("plugins", "convert_args", "quantize_args", "build_args"), (Names, None)),
}
ShortForm = create_model("ShortForm", __base__=_Form, **_SHORT_FORM)
"""Ours: the keys are the fields of ``EngineConfig``, and what is wanted is under each."""


def _program(value: Any) -> Any:
    if value not in (None, "python", "python3", "trtllm-build"):
        raise _said(f"expected python or trtllm-build, got {value!r}")
    return value


def _script_runner(value: Any) -> Any:
    if _program(value) == "trtllm-build":
        raise _said("trtllm-build is for the step build")
    return value


def _path(value: Any) -> Any:
    if not isinstance(value, str | None):
        raise _said(f"expected a path, got {value!r}")
    return value


def _old_script(value: Any) -> Any:
    if _path(value) is not None and Path(value).name not in OLD_SCRIPTS:
        raise _said(f"engines are built by trtllm-build, not by {value}")
    return value


class Step(_Form):
    """What is run in one step."""

    executable: Annotated[Any, AfterValidator(_script_runner)] = None
    script: Annotated[Any, AfterValidator(_path)] = None
    output_dir: Any = None
    args: Names = None


class BuildStep(Step):
    """The step that runs trtllm-build, whatever it was called when a guide was written."""

    executable: Annotated[Any, AfterValidator(_program)] = None
    script: Annotated[Any, AfterValidator(_old_script)] = None


class StepForm(_Form):
    """That of Replicate's cog-trt-llm: what is run, step by step."""

    model_id: Any = None
    model_tar_url: Any = None
    example_name: Any = None
    weight_format: Any = None
    merge: Any = None
    hf_token: Any = None
    checksum: Any = None
    tokenizer: Any = None
    timeout: Any = None
    trust_remote_code: Any = None
    convert_to_ft: Step = Step()
    convert: Step = Step()
    quantize: Step = Step()
    build: BuildStep = BuildStep()


_OF_THE_STEP_FORM = {"model_id", "model_tar_url", "convert_to_ft", "convert", "quantize", "build"}


def read_form(document: Mapping[str, Any]) -> tuple[BaseModel, list[Problem]]:
    """The document as the form that its keys say, without what is wrong in it; and what is."""
    form = StepForm if _OF_THE_STEP_FORM & document.keys() else ShortForm
    try:
        return form.model_validate(document), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems = [(".".join(map(str, detail["loc"])), _explain(form, detail)) for detail in details]
    return form.model_validate(_without(document, [detail["loc"] for detail in details])), problems


def unknown(name: str, known: Iterator[str] | Mapping[str, Any] | list[str]) -> str:
    """What to say of a key that is not known."""
    close = get_close_matches(name, list(known), 1)
    return "unknown key" + (f"; did you mean {close[0]}?" if close else "")


def _said(text: str) -> PydanticCustomError:
    return PydanticCustomError("said", "{text}", {"text": text})


def _explain(form: type[BaseModel], detail: ErrorDetails) -> str:
    match detail["type"]:
        case "said":
            return detail["msg"]
        case "dict_type":
            return f"expected names and values, got {detail['input']!r}"
        case "model_type":
            return "expected script or executable, and args"
    known = form if len(detail["loc"]) == 1 else Step
    return unknown(str(detail["loc"][-1]), known.model_fields)


def _without(document: Mapping[Any, Any], places: list[tuple[int | str, ...]]) -> dict[Any, Any]:
    """The document without what stands in these places."""
    inside = {place[0]: [p[1:] for p in places if p[0] == place[0]] for place in places}
    return {
        key: _without(value, inside[key]) if key in inside else value
        for key, value in document.items()
        if () not in inside.get(key, ())
    }
