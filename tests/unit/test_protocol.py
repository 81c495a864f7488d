from __future__ import annotations

import json

import pytest

from cog_triton.protocol import CONTINUED, continued_ids, continued_text


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 3], [2**31 - 1, 128_000]])
def test_continued_ids_come_back(ids: list[int]) -> None:
    assert continued_ids(json.dumps({CONTINUED: continued_text(ids), "other": 1})) == ids


@pytest.mark.parametrize("parameters", ["", "{}", '{"ids_only": true}'])
def test_a_request_that_begins_has_none(parameters: str) -> None:
    assert continued_ids(parameters) == []


@pytest.mark.parametrize("value", ['"!"', '"AAA="', "7", "null", '{"a": 1}', '"\\ud800"'])
def test_what_is_no_list_of_ids_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"^{CONTINUED} must be"):
        continued_ids(f'{{"{CONTINUED}": {value}}}')


def test_a_negative_id_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        continued_ids(json.dumps({CONTINUED: continued_text([5, -1])}))


def test_the_name_in_another_parameter_is_nothing() -> None:
    assert continued_ids(json.dumps({"foo": CONTINUED})) == []
