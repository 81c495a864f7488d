from __future__ import annotations

import runpy
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from cog_triton import settings
from cog_triton.errors import TemplateError
from cog_triton.repository.fill import fill_repository
from cog_triton.repository.variables import TABLES, VARIABLES, load_overrides

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configuration.md"
NAMES: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))
filled: Callable[[str], str] = NAMES["filled"]


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "run scripts/make_docs.py"


def test_check_tells_by_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    main: Callable[[list[str]], int] = NAMES["main"]
    monkeypatch.setitem(main.__globals__, "PAGE", page)
    current = filled(PAGE.read_text(encoding="utf-8"))
    page.write_text(current.replace("| `64` |", "| `63` |"))
    assert main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert "| `63` |" in page.read_text()
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert page.read_text() == current


@pytest.mark.parametrize("missing", ["variables:begin", "old-names:end", "settings:begin"])
def test_a_missing_marker_is_an_error(missing: str) -> None:
    page = PAGE.read_text(encoding="utf-8").replace(f"<!-- {missing} -->", "")
    with pytest.raises(ValueError, match=missing.split(":")[0]):
        filled(page)


def test_every_name_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = [
        name
        for table in (VARIABLES, TABLES.ignored, TABLES.renamed)
        for model in table.values()
        for name in model
    ]
    names += [row[0] for row in settings.describe()]
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_a_bar_in_a_description_stays_in_its_cell() -> None:
    assert NAMES["table"](["A"], [["a|b"]]) == "| A |\n| --- |\n| a\\|b |\n"


def test_the_worked_examples_are_read(tmp_path: Path) -> None:
    blocks = PAGE.read_text(encoding="utf-8").split("```yaml\n")[1:]
    examples = [block.split("```")[0] for block in blocks]
    assert len(examples) == 2
    for text in examples:
        assert yaml.safe_load(text)
        file = tmp_path / "config.yaml"
        file.write_text(text)
        assert load_overrides(file)["tensorrt_llm"]
    file.write_text(examples[0])
    overrides = load_overrides(file)
    for model in ("preprocessing", "postprocessing"):
        overrides[model]["tokenizer_dir"] = "/models/llama"
    fill_repository(ROOT / "triton_model_repo", tmp_path / "filled", overrides)


def test_the_message_shown_is_what_is_said(tmp_path: Path) -> None:
    overrides: dict[str, dict[str, object]] = {
        "preprocessing": {"tokenizer_dirr": "/models/llama"},
        "postprocessing": {"tokenizer_dir": "/models/llama"},
        "tensorrt_llm": {"kv_cache_free_gpu_mem_fraction": 90},
    }
    with pytest.raises(TemplateError) as raised:
        fill_repository(ROOT / "triton_model_repo", tmp_path / "filled", overrides)
    shown = textwrap.indent(str(raised.value), "    ")
    assert shown in PAGE.read_text(encoding="utf-8")
