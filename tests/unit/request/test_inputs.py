from __future__ import annotations

import pytest

from cog_triton.errors import InvalidParameter
from cog_triton.request.limits import parse_list, parse_object
from cog_triton.request.request import Guide, GuideKind, choose_guide, parse_logit_bias


def test_inputs_that_are_json() -> None:
    assert parse_list("messages", '[{"role": "user"}]') == [{"role": "user"}]
    assert parse_object("logit_bias", '{"5": 1}') == {"5": 1}
    for text in ("{", "5", "{}", '["x"]', "[" * 100_000):
        with pytest.raises(InvalidParameter, match=r"messages must (be|have at most)"):
            parse_list("messages", text)
    with pytest.raises(InvalidParameter, match="logit_bias must be a JSON object"):
        parse_object("logit_bias", "[]")


def test_logit_bias() -> None:
    assert parse_logit_bias(None) == ()
    assert parse_logit_bias('{"5": 1, "7": -0.5}') == ((5, 1.0), (7, -0.5))
    for text in ("5", "{", '{"a": 1}', '{"1": "x"}'):
        with pytest.raises(InvalidParameter, match="logit_bias must be as a JSON object"):
            parse_logit_bias(text)


def test_guides_exclude_each_other() -> None:
    assert choose_guide() is None
    assert choose_guide(json_schema="{}") == Guide(GuideKind.JSON_SCHEMA, "{}")
    assert choose_guide(regex="a+") == Guide(GuideKind.REGEX, "a+")
    assert choose_guide(grammar="root ::= a") == Guide(GuideKind.GRAMMAR, "root ::= a")
    assert choose_guide(choice='["a"]') == Guide(GuideKind.CHOICE, '["a"]')
    with pytest.raises(InvalidParameter, match="json_schema and regex exclude each other"):
        choose_guide(json_schema="{}", regex="a+")
