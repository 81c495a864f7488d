"""The generated tables and the examples of docs/configuration.md are those of the code."""

import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest

from cog_triton import settings
from cog_triton.errors import TemplateError
from cog_triton.repository.fill import fill_repository
from cog_triton.repository.variables import TABLES, VARIABLES, load_overrides
from tests.support import ROOT

PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
NAMES: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))


def test_the_pages_are_up_to_date() -> None:
    for page in NAMES["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert text == NAMES["filled"](text), "run scripts/make_docs.py"


def test_every_name_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in NAMES["PAGES"])
    names = [*settings.VARIABLES]
    for table in (VARIABLES, TABLES.ignored, TABLES.renamed):
        names += [name for model in table.values() for name in model]
    assert [name for name in names if f"| `{name}` |" not in pages] == []


def test_the_worked_examples_are_read(tmp_path: Path) -> None:
    one, two = (block.split("```")[0] for block in PAGE.split("```yaml\n")[1:])
    file = tmp_path / "config.yaml"
    file.write_text(two)
    assert load_overrides(file)["tensorrt_llm"]
    file.write_text(one)
    overrides = load_overrides(file)
    for model in ("preprocessing", "postprocessing"):
        overrides[model]["tokenizer_dir"] = "/models/llama"
    fill_repository(ROOT / "triton_model_repo", tmp_path / "filled", overrides)


def test_the_message_on_the_page_is_the_one_that_comes(tmp_path: Path) -> None:
    overrides: dict[str, dict[str, object]] = {
        "preprocessing": {"tokenizer_dirr": "/models/llama"},
        "postprocessing": {"tokenizer_dir": "/models/llama"},
        "tensorrt_llm": {"kv_cache_free_gpu_mem_fraction": 90},
    }
    with pytest.raises(TemplateError) as raised:
        fill_repository(ROOT / "triton_model_repo", tmp_path / "filled", overrides)
    assert textwrap.indent(str(raised.value), "    ") in PAGE
