"""The table of template variables, their values, and the YAML file that gives some."""

from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.repository.variables import TABLES, VARIABLES, Variable, known, load_overrides


def variable(kind: str, **fields: Any) -> Variable:
    return Variable(kind=kind, description="", **fields)


@pytest.mark.parametrize(
    ("variable", "values", "text"),
    [
        pytest.param(variable("integer", default=4), [None, ""], "4", id="default"),
        pytest.param(variable("integer", default=4), [7, "7", " 7\n", "+7"], "7", id="integer"),
        pytest.param(variable("integer"), [None, ""], None, id="integer that is unset"),
        pytest.param(variable("integer"), ["-3"], "-3", id="negative integer"),
        pytest.param(variable("float", minimum=0, maximum=1), ["0.90"], "0.9", id="float"),
        pytest.param(
            variable("float", minimum=0, maximum=1), [1], "1.0", id="float that is an integer"
        ),
        pytest.param(
            variable("boolean"),
            [True, "True", "true", "TRUE", "1", 1, "yes", " true "],
            "true",
            id="true",
        ),
        pytest.param(
            variable("boolean", default=True),
            [False, "False", "false", "0", 0, "no"],
            "false",
            id="false",
        ),
        pytest.param(variable("switch"), ["True"], "true", id="switch that is on"),
        pytest.param(variable("switch"), [False], None, id="switch that is off"),
        pytest.param(variable("text"), [" as it is "], " as it is ", id="text"),
        pytest.param(variable("text", default=""), [None], "", id="text that is empty by default"),
        pytest.param(variable("path"), ["/a/b"], "/a/b", id="path"),
        pytest.param(variable("data type"), ["TYPE_BF16", "BF16"], "TYPE_BF16", id="data type"),
        pytest.param(variable("integer list"), ["0,1, 2", [0, 1, 2]], "0,1,2", id="integers"),
        pytest.param(variable("integer list"), ["0,1;2,3"], "0,1;2,3", id="lists of integers"),
        pytest.param(variable("integer list"), [2560], "2560", id="one of integers"),
        pytest.param(variable("choice", default="a", choices=("a", "b")), ["b"], "b", id="choice"),
    ],
)
def test_a_value_is_spelled_as_triton_reads_it(
    variable: Variable, values: list[object], text: str | None
) -> None:
    for value in values:
        assert variable.render(value) == text


@pytest.mark.parametrize(
    ("variable", "values", "problem"),
    [
        pytest.param(
            variable("text", required=True), [None, ""], "required, text, in quotes", id="required"
        ),
        pytest.param(
            variable("integer", minimum=1, maximum=10),
            ["four", True, 4.0, "4_0", "٤", 0, 11, [4]],
            "expected an integer from 1 to 10, got ",
            id="integer",
        ),
        pytest.param(
            variable("integer", minimum=1),
            [0],
            "an integer of at least 1, got 0",
            id="integer without a maximum",
        ),
        pytest.param(
            variable("float"), ["nan", "inf", False, {}], "expected a number, got ", id="float"
        ),
        pytest.param(
            variable("boolean"), ["maybe", 2], "expected true or false, got ", id="boolean"
        ),
        pytest.param(variable("text"), [7], "expected text, in quotes, got 7", id="text"),
        pytest.param(variable("path"), [True, "\udc80"], "expected a path, got ", id="path"),
        pytest.param(
            variable("data type"), ["float"], "such as TYPE_FP32, got 'float'", id="data type"
        ),
        pytest.param(
            variable("integer list"),
            ["0,x", "0,", True],
            "separated by commas, got ",
            id="integers",
        ),
        pytest.param(
            variable("choice", choices=("a", "b")), ["c"], "one of a, b, got 'c'", id="choice"
        ),
        pytest.param(
            variable("path"),
            ["${HOME}/a"],
            "still to be expanded, '${HOME}/a'",
            id="path with a variable of the shell",
        ),
        pytest.param(
            variable("integer"),
            ["${HOME}/a"],
            "still to be expanded, '${HOME}/a'",
            id="integer that is a variable of the shell",
        ),
    ],
)
def test_a_value_that_is_not_valid(variable: Variable, values: list[object], problem: str) -> None:
    for value in values:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            variable.render(value)
        text = str(raised.value)
        assert problem in text
        assert text.endswith(repr(value)) or variable.required


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


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        pytest.param("", {}, id="nothing"),
        pytest.param("server:", {}, id="no models"),
        pytest.param("weights: x\ninstantiate: [1]", {}, id="instantiate of another kind"),
        pytest.param("instantiate: {weights: x}", {}, id="instantiate without server"),
        pytest.param("instantiate: {server: }", {}, id="instantiate with an empty server"),
        pytest.param(
            "server: {ensemble: , tensorrt_llm: {args: }}",
            {"ensemble": {}, "tensorrt_llm": {}},
            id="models without values",
        ),
        pytest.param(
            "server: {ensemble: {args: {a: 1, b: 0.5, c: True, d: '1', e: [0, 1], f: , 1: x}}}",
            {"ensemble": {"a": 1, "b": 0.5, "c": True, "d": "1", "e": [0, 1], "f": None, "1": "x"}},
            id="values of every kind",
        ),
        pytest.param(
            "server:\ninstantiate: {server: {ensemble: {args: {a: 1}}}}",
            {"ensemble": {"a": 1}},
            id="empty server beside instantiate",
        ),
    ],
)
def test_load_overrides(text: str, overrides: dict[str, Any], file: Path) -> None:
    file.write_text(text)
    assert load_overrides(file) == overrides


def problem(file: Path) -> str:
    with pytest.raises(ConfigurationError) as raised:
        load_overrides(file)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a: [", "c.yaml: not valid YAML: ", id="no YAML"),
        pytest.param(
            "a: !!python/object:os.system {}", "c.yaml: not valid YAML: ", id="Python object"
        ),
        pytest.param("- 1", "c.yaml: the file: expected a mapping, got [1]", id="list"),
        pytest.param(
            "server: 1", "c.yaml: server: expected a mapping, got 1", id="server that is a number"
        ),
        pytest.param(
            "instantiate: {server: []}",
            "c.yaml: instantiate.server: expected a mapping, got []",
            id="server of instantiate that is a list",
        ),
        pytest.param(
            "server: {ensemble: 1}",
            "c.yaml: server.ensemble: expected a mapping, got 1",
            id="model that is a number",
        ),
        pytest.param(
            "server: {ensemble: {arg: {}}}",
            "c.yaml: server.ensemble.arg: unknown key; only args is allowed here",
            id="unknown key",
        ),
        pytest.param(
            "instantiate: {server: {ensemble: {args: [a]}}}",
            "c.yaml: instantiate.server.ensemble.args: expected a mapping, got ['a']",
            id="values that are a list",
        ),
        pytest.param(
            "server: {}\ninstantiate: {server: {}}",
            "use server or instantiate.server, not both",
            id="two servers",
        ),
    ],
)
def test_a_file_of_another_shape(text: str, expected: str, file: Path) -> None:
    file.write_text(text)
    found = problem(file)
    assert found.startswith("E3001 ")
    assert expected in found


def test_a_file_that_cannot_be_read(file: Path) -> None:
    assert "c.yaml cannot be read: No such file or directory" in problem(file)
    file.write_bytes(b"server: \xff")
    assert "c.yaml: not valid YAML: unacceptable character" in problem(file)


def test_models_beside_server_are_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("max_batch_size: 64\nensemble: {args: {triton_max_batch_size: 64}}")
    assert load_overrides(file) == {}
    assert caplog.messages == [f"{file}: ensemble is ignored; it belongs under server"]
