from __future__ import annotations

from cog_triton.errors import PromptRequired
from cog_triton.faces.cog.error_names import name_once


def as_cog_shows(error: BaseException) -> str:
    return f"{type(error).__qualname__}: {error}"


def test_an_error_names_itself_once_and_is_the_same_error() -> None:
    error = PromptRequired("a prompt: is required")
    assert as_cog_shows(error) == "PromptRequired: E1001 PromptRequired: a prompt: is required"
    assert name_once(error) is error
    assert isinstance(error, PromptRequired)
    assert as_cog_shows(error) == "E1001 PromptRequired: a prompt: is required"
    assert as_cog_shows(name_once(error)) == "E1001 PromptRequired: a prompt: is required"


def test_other_errors_are_left_as_they_are() -> None:
    assert as_cog_shows(name_once(ValueError("no: ValueError"))) == "ValueError: no: ValueError"
