from __future__ import annotations

import json
from array import array

import pytest

from cog_triton.protocol import CONTINUED, checksum, continued_ids, ids_text


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 3], [2**31 - 1, 128_000]])
def test_continued_ids_come_back(ids: list[int]) -> None:
    assert continued_ids(json.dumps({CONTINUED: ids_text(ids), "other": 1})) == ids


@pytest.mark.parametrize("parameters", ["", "{}", '{"ids_only": true}'])
def test_a_request_that_begins_has_none(parameters: str) -> None:
    assert continued_ids(parameters) == []


@pytest.mark.parametrize("value", ['"!"', '"AAA="', "7", "null", '{"a": 1}', '"\\ud800"'])
def test_what_is_no_list_of_ids_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"^{CONTINUED} must be"):
        continued_ids(f'{{"{CONTINUED}": {value}}}')


def test_a_negative_id_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        continued_ids(json.dumps({CONTINUED: ids_text([5, -1])}))


def test_the_name_in_another_parameter_is_nothing() -> None:
    assert continued_ids(json.dumps({"foo": CONTINUED})) == []


def test_a_checksum_tells_ids_and_places_apart() -> None:
    """The values are fixed: a client and a server of different versions must agree."""
    assert checksum(array("i", [1, 2, 3]), 2) == 1669584492
    ids = [array("i", ids) for ids in ([], [0], [0, 0], [1], [2**31 - 1], [1, 2, 3])]
    sums = [checksum(values, place) for values in ids for place in (0, 1, 2, 100_000)]
    assert len(set(sums)) == len(sums)
    assert all(-(2**31) <= value < 2**31 for value in sums)
