from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cog_triton.errors import (
    BadPromptTemplate,
    CogTritonError,
    PromptRequired,
    PromptTemplateError,
    PromptTooLong,
)
from cog_triton.request.limits import TextLimits
from cog_triton.text.chat import format_prompt, validate_template


@pytest.mark.parametrize(
    ("template", "prompt", "system_prompt", "expected"),
    [
        ("{prompt}", "hi", "", "hi"),
        ("{prompt}", "hi", "unused", "hi"),
        ("{prompt}", " ", "", " "),
        ("{prompt}{prompt}", "hi", "", "hihi"),
        ("{system_prompt}\n\n{prompt}", "hi", "be kind", "be kind\n\nhi"),
        ("[INST] <<SYS>>{system_prompt}<</SYS>> {prompt} [/INST]", "q", "s",
         "[INST] <<SYS>>s<</SYS>> q [/INST]"),
        ("{{prompt}} {prompt}", "hi", "", "{prompt} hi"),
        ("{{{prompt}}}", "hi", "", "{hi}"),
        ("{{{{{prompt}}}}}", "hi", "", "{{hi}}"),
        ('{{"content": "{prompt}"}}', "hi", "", '{"content": "hi"}'),
        ("{prompt}", "{system_prompt} {prompt} {{ } {0}", "s", "{system_prompt} {prompt} {{ } {0}"),
        ("{system_prompt}{prompt}", "p", "{prompt}", "{prompt}p"),
        ("{prompt}", r"\1 \g<0> %s", "", r"\1 \g<0> %s"),
        ("%s $prompt {prompt}", "hi", "", "%s $prompt hi"),
    ],
)  # fmt: skip
def test_format_prompt(template: str, prompt: str, system_prompt: str, expected: str) -> None:
    assert format_prompt(template, prompt, system_prompt) == expected


@pytest.mark.parametrize("prompt", ["", None])
@pytest.mark.parametrize("template", ["{prompt}", "no place", "{"])
def test_prompt_is_required(template: str, prompt: str | None) -> None:
    with pytest.raises(PromptRequired):
        format_prompt(template, prompt)


@pytest.mark.parametrize("template", ["", "no place", "{system_prompt}", "{{prompt}}", "{{}}"])
def test_template_needs_a_place_for_the_prompt(template: str) -> None:
    with pytest.raises(BadPromptTemplate, match=r"\{prompt\}"):
        format_prompt(template, "hi")
    with pytest.raises(BadPromptTemplate):
        validate_template(template)


@pytest.mark.parametrize("rest", ["", "{prompt} ", "{system_prompt}"])
@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{foo}", ["{foo}"]),
        ("{foo} {bar} {foo}", ["{foo}", "{bar}"]),
        ("{}", ["{}"]),
        ("{0}", ["{0}"]),
        ("{ prompt }", ["{ prompt }"]),
        ("{Prompt}", ["{Prompt}"]),
        ("{prompt.x}", ["{prompt.x}"]),
        ("{prompt.__class__.__mro__}", ["{prompt.__class__.__mro__}"]),
        ("{prompt[0]}", ["{prompt[0]}"]),
        ("{prompt!r}", ["{prompt!r}"]),
        ("{prompt:>10}", ["{prompt:>10}"]),
        ("{prompt:>9999999999}", ["{prompt:>9999999999}"]),
        ("{prompt:{foo}}", ["'{'", "{foo}", "'}'"]),
        ("{", ["'{'"]),
        ("}", ["'}'"]),
        ("{prompt", ["'{'"]),
        ("prompt}", ["'}'"]),
        ("{{prompt}", ["'}'"]),
        ("{prompt}}", ["'}'"]),
        ('{"role": "user"}', ['{"role": "user"}']),
        ('{\n"role": {prompt}\n}', ["'{'", "'}'"]),
    ],
)
def test_whatever_else_is_in_braces_is_an_error(template: str, named: list[str], rest: str) -> None:
    for check in (validate_template, lambda given: format_prompt(given, "hi")):
        with pytest.raises(PromptTemplateError) as caught:
            check(rest + template)
        for name in named:
            assert name in caught.value.message
        assert "{{ for {, }} for }" in caught.value.message
        assert caught.value.code == "E1004"


def test_a_long_placeholder_does_not_make_a_long_message() -> None:
    with pytest.raises(PromptTemplateError) as caught:
        validate_template("{" + "x" * 100_000 + "}")

    assert len(caught.value.message) < 400


def reference(template: str, prompt: str) -> str | None:
    """``str.format`` itself, for templates which it reads as we do."""
    try:
        return template.format(prompt=prompt, system_prompt="")
    except (ValueError, KeyError, IndexError, AttributeError):
        return None


@given(
    pieces=st.lists(st.sampled_from(["{", "}", "{{", "}}", "{prompt}", "{system_prompt}", "a"])),
    prompt=st.text(min_size=1),
)
@example(["{{", "{prompt}", "}}", "}"], "x")
def test_braces_are_read_as_str_format_reads_them(pieces: list[str], prompt: str) -> None:
    template = "".join(pieces)
    expected = reference(template, prompt)
    try:
        assert format_prompt(template, prompt) == expected
    except PromptTemplateError:
        assert expected is None
    except BadPromptTemplate:
        assert expected is not None


@given(template=st.text(alphabet="{}prompt "), prompt=st.text(min_size=1))
def test_validation_and_formatting_agree(template: str, prompt: str) -> None:
    try:
        validate_template(template)
    except (BadPromptTemplate, PromptTemplateError) as error:
        with pytest.raises(type(error)):
            format_prompt(template, prompt)
    else:
        format_prompt(template, prompt)


LIMITS = TextLimits(1000)


@pytest.mark.parametrize(
    ("template", "prompt", "system_prompt", "error", "text"),
    [
        ("{prompt}", "x" * 1001, "", PromptTooLong, "the prompt has 1001 characters; 1000 are"),
        ("{prompt}", "x", "x" * 1001, PromptTooLong, "the system prompt has 1001 characters"),
        ("{prompt}" * 20, "x" * 51, "", PromptTooLong, "in its template has 1020 characters"),
        ("{prompt}{system_prompt}", "x" * 501, "x" * 500, PromptTooLong, "has 1001 characters"),
        ("{prompt}" + "{{" * 1000, "x", "", PromptTooLong, "in its template has 1001 characters"),
        ("{prompt}" * 20_000, "x", "", PromptTemplateError, "40000 braces; 4096 are the most"),
        ("x" * 2**18 + "{prompt}", "x", "", PromptTemplateError, "262152 characters; 262144"),
    ],
)
def test_what_is_too_long_is_refused(
    template: str, prompt: str, system_prompt: str, error: type[CogTritonError], text: str
) -> None:
    with pytest.raises(error, match=text):
        format_prompt(template, prompt, system_prompt, LIMITS)


def test_what_just_fits_is_filled_in() -> None:
    assert format_prompt("{prompt}" * 20, "x" * 50, "", LIMITS) == "x" * 1000
    assert len(format_prompt("{prompt}" + "{{" * 999, "x", "", LIMITS)) == 1000
    assert len(format_prompt("{prompt}" * 2048, "x")) == 2048


@pytest.mark.parametrize("places", [2_000, 20_000])
def test_what_is_too_long_is_not_built(places: int) -> None:
    template, prompt = "{prompt}" * places, "x" * 20_000
    tracemalloc.start()
    try:
        with pytest.raises((PromptTooLong, PromptTemplateError)):
            format_prompt(template, prompt)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_many_unknown_placeholders_do_not_make_a_long_message() -> None:
    with pytest.raises(PromptTemplateError, match=r"'\{p2\}', and 1997 more\.") as caught:
        validate_template("{prompt}" + "".join(f"{{p{i}}}" for i in range(2000)))
    assert len(caught.value.message) < 400
