from __future__ import annotations

from pathlib import Path

import pytest

from cog_triton.weights import fetch
from cog_triton.weights.files import root_of
from tests.unit.weights.support import tar


@pytest.mark.parametrize(
    ("names", "root"),
    [
        (["config.json"], ""),
        (["./config.json"], ""),
        (["m/config.json"], "m"),
        (["m/n/config.json"], "m"),
        (["./m/config.json", "._m"], "m"),
        (["m/config.json", "README"], ""),
    ],
)
def test_a_single_top_directory_is_the_root(names: list[str], root: str, tmp_path: Path) -> None:
    (tmp_path / "m.tar").write_bytes(tar(dict.fromkeys(names, b"x")))
    found = fetch(str(tmp_path / "m.tar"), cache=tmp_path / "cache")
    assert found.name == root or (not root and found.name.startswith("tree-"))


def test_a_link_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "m").symlink_to(tmp_path)
    assert root_of(tmp_path / "tree") == tmp_path / "tree"
