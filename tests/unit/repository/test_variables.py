"""The table of template variables, their values, and the YAML file that gives some."""

from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.repository.variables import TABLES, VARIABLES, Variable, known, load_overrides
from tests.support import load_cases

CASES = load_cases(__file__, "variables.yaml")


@pytest.mark.parametrize("case", CASES["spelled"])
def test_a_value_is_spelled_as_triton_reads_it(case: dict[str, Any]) -> None:
    variable = Variable(description="", **case["variable"])
    for value in case["values"]:
        assert variable.render(value) == case["text"]


@pytest.mark.parametrize("case", CASES["refused"])
def test_a_value_that_is_not_valid(case: dict[str, Any]) -> None:
    variable = Variable(description="", **case["variable"])
    for value in case["values"]:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            variable.render(value)
        said = str(raised.value)
        assert case["problem"] in said
        assert said.endswith(repr(value)) or variable.required


@pytest.mark.parametrize("model", [*VARIABLES])
def test_the_table_is_sound(model: str) -> None:
    for found in known(model).values():
        assert found.description.strip() == found.description > ""
        assert bool(found.choices) == (found.kind in ("choice", "choice list"))
        if not found.required:
            found.render()
    assert not TABLES.ignored.get(model, {}).keys() & VARIABLES[model].keys()
    renamed = TABLES.renamed.get(model, {})
    assert set(renamed.values()) <= VARIABLES[model].keys()
    assert not renamed.keys() & known(model).keys()
    for name, values in TABLES.renamed_values.get(model, {}).items():
        choices = set(VARIABLES[model][name].choices)
        assert set(values.values()) <= choices
        assert not values.keys() & choices


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


@pytest.mark.parametrize("case", CASES["files"])
def test_load_overrides(case: dict[str, Any], file: Path) -> None:
    file.write_text(case["file"])
    assert load_overrides(file) == case["overrides"]


def problem(file: Path) -> str:
    with pytest.raises(ConfigurationError) as raised:
        load_overrides(file)
    return str(raised.value)


@pytest.mark.parametrize("case", CASES["problems"])
def test_a_file_of_another_shape(case: dict[str, Any], file: Path) -> None:
    file.write_text(case["file"])
    said = problem(file)
    assert said.startswith("E3001 ")
    assert case["problem"] in said


def test_a_file_that_cannot_be_read(file: Path) -> None:
    assert "c.yaml cannot be read: No such file or directory" in problem(file)
    file.write_bytes(b"server: \xff")
    assert "c.yaml: not valid YAML: unacceptable character" in problem(file)


def test_models_beside_server_are_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("max_batch_size: 64\nensemble: {args: {triton_max_batch_size: 64}}")
    assert load_overrides(file) == {}
    assert caplog.messages == [f"{file}: ensemble is ignored; it belongs under server"]
