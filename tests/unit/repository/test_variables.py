"""The table of template variables, as variables.yaml has it."""

from __future__ import annotations

import pytest

from cog_triton.repository.variables import TABLES, VARIABLES, Variable, known

EVERY = [
    pytest.param(variable, id=f"{model}-{name}")
    for model in VARIABLES
    for name, variable in known(model).items()
]


@pytest.mark.parametrize("variable", EVERY)
def test_a_variable_is_described_and_has_choices_if_its_kind_says_so(variable: Variable) -> None:
    assert variable.description.strip() == variable.description > ""
    assert bool(variable.choices) == (variable.kind in ("choice", "choice list"))


@pytest.mark.parametrize("model", [*TABLES.renamed])
def test_an_old_name_is_that_of_a_variable_there_is(model: str) -> None:
    assert set(TABLES.renamed[model].values()) <= VARIABLES[model].keys()
    assert not TABLES.renamed[model].keys() & known(model).keys()


def test_an_old_value_is_that_of_a_choice_there_is() -> None:
    for model, variables in TABLES.renamed_values.items():
        for name, values in variables.items():
            choices = set(VARIABLES[model][name].choices)
            assert set(values.values()) <= choices
            assert not values.keys() & choices


def test_optional_models_are_models() -> None:
    assert VARIABLES.keys() >= TABLES.optional_models > set()


def test_variables_of_several_models_are_the_same_in_each() -> None:
    size = VARIABLES["ensemble"]["triton_max_batch_size"]
    assert (size.kind, size.default, size.minimum) == ("integer", 64, 1)
    assert all(VARIABLES[model]["triton_max_batch_size"] == size for model in VARIABLES)
    assert VARIABLES["preprocessing"]["tokenizer_dir"].required
    assert VARIABLES["tensorrt_llm"]["tokenizer_dir"].default == ""
