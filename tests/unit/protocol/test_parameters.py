import pytest

from cog_triton.errors import InvalidParameter
from cog_triton.protocol.names import CONTINUED
from cog_triton.protocol.parameters import adapter_task_id, ids_parameter, ids_text


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 3], [2**31 - 1, 128_000]])
def test_ids_in_a_parameter_come_back(ids: list[int]) -> None:
    assert ids_parameter({CONTINUED: ids_text(ids), "other": 1}, CONTINUED) == ids
    assert ids_parameter({"other": CONTINUED}, CONTINUED) == []


@pytest.mark.parametrize("value", ["!", "AAA=", 7, None, {"a": 1}, "\ud800", ids_text([5, -1])])
def test_what_is_no_list_of_ids_is_refused(value: object) -> None:
    with pytest.raises(InvalidParameter, match=f"{CONTINUED} must be"):
        ids_parameter({CONTINUED: value}, CONTINUED)


def test_an_adapters_number_is_the_same_everywhere() -> None:
    """The value is fixed: a client and a server of different versions must agree."""
    assert adapter_task_id("fr") == 487058246
    assert [adapter_task_id(name) for name in ("1", "2147483647")] == [1, 2**31 - 1]
    others = ("007", "0", "2147483648", "9" * 40, "٣", "-1", *(f"adapter-{i}" for i in range(1000)))
    numbers = {adapter_task_id(name) for name in others}
    assert len(numbers) == len(others)
    assert all(0 < number < 2**31 for number in numbers)
