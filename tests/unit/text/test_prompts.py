"""PROMPT_TEMPLATE: what is filled in, and what is refused."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.errors import BadPromptTemplate, CogTritonError, PromptTemplateError, PromptTooLong
from cog_triton.request.limits import TextLimits
from cog_triton.text.chat import format_prompt

LIMITS = TextLimits(1000)


@pytest.mark.parametrize(
    ("template", "prompt", "system_prompt", "expected"),
    [
        pytest.param("{prompt}", "hi", "unused", "hi", id="prompt"),
        pytest.param("{prompt}{prompt}", " ", "", "  ", id="prompt twice"),
        pytest.param(
            "[INST] <<SYS>>{system_prompt}<</SYS>> {prompt}",
            "q",
            "s",
            "[INST] <<SYS>>s<</SYS>> q",
            id="prompt and system prompt",
        ),
        pytest.param(
            "{{prompt}} {prompt}", "hi", "", "{prompt} hi", id="braces that stand for themselves"
        ),
        pytest.param("{{{prompt}}}", "hi", "", "{hi}", id="prompt within such braces"),
        pytest.param('{{"content": "{prompt}"}}', "hi", "", '{"content": "hi"}', id="JSON"),
        pytest.param(
            "{prompt}",
            "{system_prompt} {prompt} {{ } {0}",
            "s",
            "{system_prompt} {prompt} {{ } {0}",
            id="braces in the prompt",
        ),
        pytest.param(
            "{system_prompt}{prompt}",
            "p",
            "{prompt}",
            "{prompt}p",
            id="places in the system prompt",
        ),
        pytest.param(
            "{prompt}", r"\1 \g<0> %s", "", r"\1 \g<0> %s", id="backslashes in the prompt"
        ),
        pytest.param(
            "%s $prompt {prompt}", "hi", "", "%s $prompt hi", id="other signs in the template"
        ),
        pytest.param("{prompt}" * 20, "x" * 50, "", "x" * 1000, id="the longest of prompts"),
        pytest.param("{prompt}" + "{{" * 999, "x", "", "x" + "{" * 999, id="the longest of braces"),
    ],
)
def test_filled_templates(template: str, prompt: str, system_prompt: str, expected: str) -> None:
    assert format_prompt(template, prompt, system_prompt, LIMITS) == expected


@pytest.mark.parametrize("template", ["", "no place", "{system_prompt}", "{{prompt}}"])
def test_a_template_needs_a_place_for_the_prompt(template: str) -> None:
    with pytest.raises(BadPromptTemplate, match=r"\{prompt\}"):
        format_prompt(template, "hi")


@pytest.mark.parametrize("rest", ["", "{prompt} ", "{system_prompt}"])
@pytest.mark.parametrize(
    ("template", "named"),
    [
        pytest.param("{foo} {bar} {foo}", "'{foo}', '{bar}'.", id="other names"),
        pytest.param("{}", "{}", id="no name"),
        pytest.param("{ prompt }", "{ prompt }", id="spaces around the name"),
        pytest.param("{prompt.__class__.__mro__}", "{prompt.__class__.__mro__}", id="attribute"),
        pytest.param("{prompt[0]}", "{prompt[0]}", id="item"),
        pytest.param("{prompt!r}", "{prompt!r}", id="conversion"),
        pytest.param("{prompt:>9999999999}", "{prompt:>9999999999}", id="format"),
        pytest.param(
            "{prompt:{foo}}",
            "'{foo}' and unbalanced braces: '{' and '}'",
            id="place within a format",
        ),
        pytest.param("{", "'{'", id="single brace"),
        pytest.param("{prompt", "'{'", id="brace that is not closed"),
        pytest.param("{{prompt}", "'}'", id="brace that is not opened"),
        pytest.param("{prompt}}", "'}'", id="brace too many"),
        pytest.param('{"role": "user"}', '{"role": "user"}', id="JSON"),
        pytest.param(
            "".join(f"{{p{i}}}" for i in range(2000)), "'{p2}', and 1997 more.", id="many names"
        ),
        pytest.param("{" + "x" * 100_000 + "}", "xxx…", id="long name"),
    ],
)
def test_whatever_else_is_in_braces_is_an_error(template: str, named: str, rest: str) -> None:
    with pytest.raises(PromptTemplateError) as caught:
        format_prompt(rest + template, "hi")
    assert named in caught.value.message
    assert "{{ for {, }} for }" in caught.value.message
    assert len(caught.value.message) < 400


@given(
    pieces=st.lists(st.sampled_from(["{", "}", "{{", "}}", "{prompt}", "{system_prompt}", "a"])),
    prompt=st.text(min_size=1),
)
def test_braces_are_read_as_str_format_reads_them(pieces: list[str], prompt: str) -> None:
    template = "".join(pieces)
    try:
        expected = template.format(prompt=prompt, system_prompt="")
    except (ValueError, KeyError, IndexError):
        expected = None
    try:
        assert format_prompt(template, prompt) == expected
    except PromptTemplateError:
        assert expected is None
    except BadPromptTemplate:
        assert expected is not None


@pytest.mark.parametrize(
    ("template", "prompt", "system_prompt", "error", "text"),
    [
        (
            "{prompt}",
            "x" * 1001,
            "",
            PromptTooLong,
            "the prompt has 1001 characters; the limit is 1000",
        ),
        ("{prompt}", "x", "x" * 1001, PromptTooLong, "the system prompt has 1001 characters"),
        ("{prompt}" * 20, "x" * 51, "", PromptTooLong, "in its template has 1020 characters"),
        ("{prompt}{system_prompt}", "x" * 501, "x" * 500, PromptTooLong, "has 1001 characters"),
        ("{prompt}" + "{{" * 1000, "x", "", PromptTooLong, "in its template has 1001 characters"),
        ("{prompt}" * 2000, "x" * 1000, "", PromptTooLong, "in its template has 2000000"),
        (
            "{prompt}" * 20_000,
            "x",
            "",
            PromptTemplateError,
            "40000 braces; the limits are 262144 and 4096",
        ),
        ("x" * 2**18 + "{prompt}", "x", "", PromptTemplateError, "has 262152 characters"),
    ],
    ids=range(8),
)
def test_what_is_too_long_is_refused_and_not_built(
    template: str, prompt: str, system_prompt: str, error: type[CogTritonError], text: str
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(error, match=text):
            format_prompt(template, prompt, system_prompt, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
