"""Conversations as templates with the habits of real ones take them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox
import pytest

from cog_triton.text.conversation import fitted
from cog_triton.text.template_traits import TemplateTraits, find_traits

CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments }}]{% endfor %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + CALLS + "{% endfor %}"
FIRST_SYSTEM_ONLY = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only in front') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
# As Llama 3.1's: what is not in front is dropped without a word.
SILENT = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# As Command R7B's, in which the word stands in another place.
ONE_DEVELOPER = "{# developer #}" + SILENT.replace(
    "m.role != 'system'", "m.role in ('user', 'assistant')"
)
# As Mistral's: turns alternate, calls and results do not count, and ids have nine characters.
ALTERNATES = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% for c in m.tool_calls or [] %}"
    "{% if c.id|length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "[{{ c.id }} {{ c.function.name }}]"
    "{% endfor %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('in front') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
# As Llama 3.1's, and, without a word, gpt-oss's.
ONE_CALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
    "{% if m.tool_calls|length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "[{{ m.tool_calls[0].function.arguments }}]{% endif %}{% endfor %}"
)
FIRST_CALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}[{{ m.tool_calls[0].function.arguments }}]{% endif %}{% endfor %}"
)
# As LFM 2's, which shows the results only, and GLM 4's, which shows neither.
NO_CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_TOOLS = (
    "{% for m in messages if m.role in ('user', 'assistant') %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TEMPLATES = {
    "one_developer": ONE_DEVELOPER,
    "one_call": ONE_CALL,
    "first_call": FIRST_CALL,
    "no_calls": NO_CALLS,
    "no_tools": NO_TOOLS,
    "plain": PLAIN,
    "first_system_only": FIRST_SYSTEM_ONLY,
    "silent": SILENT,
    "no_system": NO_SYSTEM,
    "alternates": ALTERNATES,
}


def renderer(template: str) -> Any:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()

    def raise_exception(text: str) -> None:
        raise jinja2.TemplateError(text)

    compiled = environment.from_string(template)

    def render(turns: Sequence[Mapping[str, Any]]) -> str | None:
        try:
            return compiled.render(messages=turns, raise_exception=raise_exception)
        except Exception:
            return None

    return render


def rendered(template: str, turns: list[dict[str, Any]]) -> str | None:
    render = renderer(template)
    prompt: str | None = render(fitted(turns, find_traits(render)))
    return prompt


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(identifier: str) -> list[dict[str, Any]]:
    call = {"id": identifier, "function": {"name": "look", "arguments": {}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identifier, "content": "sun"},
    ]


def two_calls() -> list[dict[str, Any]]:
    calls = [
        {"id": f"abcdefgh{n}", "function": {"name": "look", "arguments": {"n": n}}} for n in (1, 2)
    ]
    return [
        {**assistant("b"), "tool_calls": calls},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "one"},
        {"role": "tool", "tool_call_id": "abcdefgh2", "content": "two"},
    ]


def test_a_template_that_takes_everything_gets_everything_as_it_is() -> None:
    turns = [
        system("a"),
        system("b"),
        user("c"),
        user("d"),
        system("e"),
        *called("long_id_of_a_call"),
    ]
    assert find_traits(renderer(PLAIN)) == TemplateTraits()
    assert fitted(turns, TemplateTraits()) == turns


@pytest.mark.parametrize(
    ("template", "turns", "prompt"),
    [
        pytest.param(
            "first_system_only",
            [system("a"), system("b"), user("c")],
            "<system>a\n\nb<user>c",
            id="system turns in front are joined",
        ),
        pytest.param(
            "silent",
            [system("a"), system("b"), user("c")],
            "<system>a\n\nb<user>c",
            id="a template that drops the second without a word",
        ),
        pytest.param(
            "first_system_only",
            [user("a"), system("b")],
            "<user>a\n\nb",
            id="a system turn at the end goes to the user turn before it",
        ),
        pytest.param(
            "first_system_only",
            [system("a"), user("b"), assistant("c"), system("d"), system("e"), user("f")],
            "<system>a<user>b<assistant>c<user>d\n\ne\n\nf",
            id="system turns in the middle go to the user turn behind them",
        ),
        pytest.param(
            "silent",
            [user("a"), assistant("b"), system("c")],
            "<user>a<assistant>b<user>c",
            id="a system turn behind an answer becomes a user turn",
        ),
        pytest.param(
            "no_system",
            [system("a"), system("b"), user("c")],
            "<user>a\n\nb\n\nc",
            id="no system turns at all",
        ),
        pytest.param(
            "one_developer",
            [system("a"), {"role": "developer", "content": "b"}, user("c")],
            "<system>a\n\nb<user>c",
            id="a developer's turn that a template drops without a word",
        ),
        pytest.param(
            "alternates",
            [user("a"), user("b"), assistant("c"), assistant("d"), user("e")],
            "<user>a\n\nb<assistant>c\n\nd<user>e",
            id="turns of one role that follow one another",
        ),
        pytest.param(
            "alternates",
            [system("s"), assistant("Hello!"), user("a")],
            "<system>s<user><assistant>Hello!<user>a",
            id="a greeting",
        ),
        pytest.param(
            "one_call",
            [user("a"), *two_calls()],
            "<user>a<assistant>b[{'n': 1}]<tool>one<assistant>[{'n': 2}]<tool>two",
            id="calls that a template takes one by one",
        ),
        pytest.param(
            "first_call",
            [user("a"), *two_calls()],
            "<user>a<assistant>b[{'n': 1}]<tool>one<assistant>[{'n': 2}]<tool>two",
            id="a second call that a template drops without a word",
        ),
        pytest.param(
            "no_calls",
            [user("a"), *two_calls()],
            '<user>a<assistant>b\n{"name": "look", "arguments": {"n": 1}}\n'
            '{"name": "look", "arguments": {"n": 2}}<tool>one<tool>two',
            id="calls that a template does not show",
        ),
        pytest.param(
            "no_tools",
            [user("a"), *called("abcdefgh1"), user("b")],
            '<user>a<assistant>{"name": "look", "arguments": {}}<user>sun<user>b',
            id="calls and results that a template does not show",
        ),
        pytest.param(
            "alternates",
            [user("a"), *called("abcdefgh1"), user("b")],
            "<user>a[abcdefgh1 look]<assistant><tool>sun\n\nb",
            id="a user's text behind a result",
        ),
    ],
)
def test_turns_that_a_template_has_no_place_for(
    template: str, turns: list[dict[str, Any]], prompt: str
) -> None:
    assert rendered(TEMPLATES[template], turns) == prompt


def test_ids_of_another_server_are_shortened_alike_in_calls_and_results() -> None:
    traits = find_traits(renderer(ALTERNATES))
    assert not traits.calls.long_ids
    _, call, result = fitted([user("a"), *called("call_0123456789abcdef")], traits)
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9
    _, call, result = fitted([user("a"), *called("abcdefgh1")], traits)
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] == "abcdefgh1"


@pytest.mark.parametrize("calls", [[], None], ids=["empty", "null"])
def test_no_calls_are_no_field(calls: Any) -> None:
    turn = {**assistant("a"), "tool_calls": calls}
    assert fitted([turn], TemplateTraits()) == [assistant("a")]


def test_what_was_handed_in_stays_as_it_is() -> None:
    turns = [system("a"), user("b"), system("c"), user("d")]
    before = [dict(turn) for turn in turns]
    rendered(ALTERNATES, turns)
    assert turns == before


def test_a_template_that_cannot_be_asked_is_taken_to_accept_everything() -> None:
    assert find_traits(lambda _: None) == TemplateTraits()
