"""The inputs of ``cog-triton predict``, which have the bounds that Cog's server holds them to."""

import re

import pytest

from cog_triton.cli import main
from cog_triton.cli.inputs import inputs_of
from cog_triton.errors import ConfigurationError
from predict import Predictor


def inputs(*assignments: str, prompt: str | None = "Hi") -> dict[str, object]:
    pairs = [(name, value) for name, _, value in (text.partition("=") for text in assignments)]
    return inputs_of(Predictor.predict, prompt, pairs)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("max_tokens=20", 20),
        ("temperature=0", 0.0),
        ("temperature=5", 5.0),
        ("seed=18446744073709551615", 2**64 - 1),
        ("seed=-1", -1),
        ("ignore_eos=yes", True),
        ("ignore_eos=0", False),
        ("stop_sequences=a=b,c", "a=b,c"),
        ("system_prompt=", ""),
    ],
)
def test_a_value_has_the_type_of_its_input(text: str, value: object) -> None:
    found = inputs(text)[text.partition("=")[0]]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_tokens=hello", "max_tokens=hello is not an integer"),
        ("max_tokens=", "max_tokens= is not an integer"),
        ("max_tokens=1.5", "max_tokens=1.5 is not an integer"),
        ("max_tokens=0", "max_tokens=0 is too small: the minimum is 1"),
        ("temperature=warm", "temperature=warm is not a number"),
        ("temperature=99", "temperature=99 is too large: the maximum is 5"),
        ("temperature=-0.1", "temperature=-0.1 is too small: the minimum is 0"),
        ("top_p=nan", "top_p=nan is not a finite number"),
        (
            "seed=18446744073709551616",
            "seed=18446744073709551616 is too large: the maximum is 18446744073709551615",
        ),
        ("ignore_eos=maybe", "ignore_eos=maybe is not true or false"),
        ("max_token=5", "unknown input 'max_token'; did you mean max_tokens?"),
        ("nonsense=5", "unknown input 'nonsense'; the inputs are prompt, system_prompt"),
    ],
)
def test_what_a_server_would_refuse_is_one_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(problem)):
        inputs(text)


def test_a_prompt_of_nothing_is_the_question_of_the_pages() -> None:
    assert inputs(prompt=None)["prompt"] == "What is machine learning?"
    assert inputs("messages=[]", prompt=None)["prompt"] is None
    assert inputs("prompt=Hello", prompt=None)["prompt"] == "Hello"


def test_an_input_without_a_value_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["predict", "-i", "max_tokens", "hello"])
    assert ended.value.code == 2
    assert (
        "'max_tokens' is not of the form NAME=VALUE, such as max_tokens=512"
        in capsys.readouterr().err
    )
