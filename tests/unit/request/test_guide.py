from __future__ import annotations

import json
import re

import pytest

from cog_triton.request.request import Guide, GuideKind, check_guide, engine_guide

AWKWARD = ["yes", "a.b*c", "x|y (z)", "[1]{2}^$", "back\\slash/", "ż\n-", 'quote "it"']


def choice(*texts: object) -> Guide:
    return Guide(GuideKind.CHOICE, json.dumps(texts))


def test_engines_get_a_choice_as_a_regular_expression() -> None:
    told = engine_guide(choice(*AWKWARD))
    assert told.kind is GuideKind.REGEX
    for text in AWKWARD:
        assert re.fullmatch(told.text, text)
    for other in ("ye", "aXbc", "x", "y (z)", "1"):
        assert not re.fullmatch(told.text, other)


@pytest.mark.parametrize("kind", [kind for kind in GuideKind if kind is not GuideKind.CHOICE])
def test_engines_get_other_guides_as_they_are(kind: GuideKind) -> None:
    guide = Guide(kind, "{}")
    assert engine_guide(guide) == guide


@pytest.mark.parametrize(
    ("expression", "sent"),
    [
        (r"\d{3}-\w", r"[0-9]{3}-[A-Za-z0-9_]"),
        (r"[\d-]+\s", r"[0-9-]+[ \t\n\r\f\v]"),
        (r"\D\W\S", r"[^0-9][^A-Za-z0-9_][^ \t\n\r\f\v]"),
        (r"[]\d][^]\w]\d", r"[]0-9][^]A-Za-z0-9_][0-9]"),
        (r"\\d\[\d\]\p{Lu}[\W]\u00e9", r"\\d\[[0-9]\]\p{Lu}[\W]\u00e9"),
    ],
)
def test_classes_of_an_expression_are_ascii_for_every_engine(expression: str, sent: str) -> None:
    assert engine_guide(Guide(GuideKind.REGEX, expression)).text == sent
    assert engine_guide(Guide(GuideKind.REGEX, sent)).text == sent


@pytest.mark.parametrize(
    ("characters", "expression"),
    [("07٣", r"\d"), ("aZ_9é", r"\w"), (" \t\n\r\f\v\xa0\x1c", r"\s"), ("a٣7", r"\D")],
)
def test_classes_are_those_of_pythons_re_with_ascii(characters: str, expression: str) -> None:
    sent = engine_guide(Guide(GuideKind.REGEX, expression)).text
    for character in characters:
        wanted = re.fullmatch(expression, character, re.ASCII)
        assert bool(re.fullmatch(sent, character)) is bool(wanted)


@pytest.mark.parametrize(
    ("guide", "why"),
    [
        (Guide(GuideKind.REGEX), "of kind regex must have a text"),
        (Guide(GuideKind.REGEX, r"a\Z"), r"\\Z is not supported in a regular expression"),
        (Guide(GuideKind.REGEX, r"(a)\1"), r"\\1 is not supported"),
        (Guide(GuideKind.JSON_SCHEMA, "{"), "the guide is no JSON: "),
        (Guide(GuideKind.JSON_SCHEMA, "[" * 100_000), "the guide is no JSON: "),
        (Guide(GuideKind.JSON_SCHEMA, "[]"), "a JSON schema must be an object"),
        (choice(), "choice must be a JSON list of texts"),
        (choice("a", ""), "none of them empty"),
        (choice("a", 5), "choice must be a JSON list of texts"),
        (choice("a", "\ud800"), "texts in Unicode"),
        (Guide(GuideKind.CHOICE, '{"a": 1}'), "choice must be a JSON list of texts"),
    ],
)
def test_what_is_no_guide(guide: Guide, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_guide(guide)


def test_what_is_a_guide() -> None:
    for guide in (
        Guide(GuideKind.JSON),
        Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}'),
        Guide(GuideKind.REGEX, "a+"),
        Guide(GuideKind.GRAMMAR, 'root ::= "a"'),
        choice("a"),
    ):
        check_guide(guide)
