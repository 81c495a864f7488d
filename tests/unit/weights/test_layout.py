from __future__ import annotations

import contextlib
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from cog_triton.weights.tar import unpack
from tests.unit.weights.support import DIR, LNK, SYM, entry, tar_of, unpacked

UNSAFE: dict[str, list[Any]] = {
    "parent": [("../x", b"1")],
    "inner parent": [("a/../../x", b"1")],
    "directory": [("../d", b"", DIR)],
    "absolute symlink": [("s", b"", SYM, "/etc/passwd")],
    "symlink out": [("s", b"", SYM, "../x")],
    "deep symlink out": [("a/s", b"", SYM, "../../x")],
    "symlink up by a later link": [
        ("s", b"", SYM, "a/b/up/.."),
        ("a/b/up", b"", SYM, "../.."),
    ],
    "file through a link": [("d", b"", DIR), ("s", b"", SYM, "d"), ("s/x", b"1")],
    "file in place of a link": [("s", b"", SYM, "d"), ("s", b"1")],
    "directory in place of a link": [("s", b"", SYM, "d"), ("s", b"", DIR)],
    "absolute hardlink": [("h", b"", LNK, "/etc/passwd")],
    "hardlink out": [("h", b"", LNK, "../x")],
    "hardlink to nothing": [("h", b"", LNK, "x")],
    "hardlink to a link": [("a/b/s", b"", SYM, "../../x"), ("h", b"", LNK, "a/b/s")],
    "file through a file": [("x", b"1"), ("x/y", b"2")],
    "file in place of a directory": [("d", b"", DIR), ("d", b"1")],
    "character device": [("d", b"", tarfile.CHRTYPE)],
    "block device": [("d", b"", tarfile.BLKTYPE)],
    "pipe": [("d", b"", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("members", UNSAFE.values(), ids=UNSAFE.keys())
def test_an_unsafe_member_is_refused(members: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        unpacked(tmp_path, tar_of(entry("ok", b"1"), *[entry(*member) for member in members]))
    (kept,) = (tmp_path / "cache").iterdir()
    assert list(kept.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"m.tar", "cache"}


def test_the_message_names_the_member(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"m\.tar is not unpacked: its member 's/x' leads"):
        unpacked(tmp_path, tar_of(entry("s", kind=SYM, link="d"), entry("s/x", b"1")))


LINKS = [
    entry("blobs/1", b"one"),
    entry("snapshots/main/model", kind=SYM, link="../../blobs/1"),
    entry("snapshots/main/again", kind=SYM, link="model"),
    entry("snapshots/main/hard", kind=LNK, link="blobs/1"),
    entry("current", kind=SYM, link="snapshots/./main"),
]


def test_links_that_stay_inside_are_kept(tmp_path: Path) -> None:
    (tmp_path / "m.tar").write_bytes(tar_of(*LINKS))
    found = fetch(str(tmp_path / "m.tar"), cache=tmp_path / "cache")
    for name in ("model", "again", "hard"):
        assert (found / "current" / name).read_bytes() == b"one"
    assert (found / "current").is_symlink()


PARTS = st.sampled_from(["a", "b", "c", "..", ".", "/"])
MEMBERS = st.lists(
    st.tuples(
        st.lists(PARTS, min_size=1, max_size=4).map("/".join),
        st.sampled_from([tarfile.REGTYPE, DIR, SYM, SYM, LNK]),
        st.lists(PARTS, min_size=1, max_size=5).map("/".join),
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=100)
@given(members=MEMBERS)
@example(members=[("a//", SYM, "..")])
def test_whatever_is_unpacked_stays_inside(
    members: list[tuple[str, bytes, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("unpack")
    tree = directory / "outer" / "tree"
    tree.mkdir(parents=True)
    content = tar_of(
        *[entry(name, b"x" * (kind == b"0"), kind, link) for name, kind, link in members]
    )
    (directory / "m.tar").write_bytes(content)
    with contextlib.suppress(
        ConfigurationError, OSError
    ):  # what it left must be inside all the same
        unpack(directory / "m.tar", tree, "it")
    assert [path.name for path in (directory / "outer").iterdir()] == ["tree"]
    assert {path.name for path in directory.iterdir()} == {"outer", "m.tar"}
    for path in tree.rglob("*"):
        if path.is_symlink() and path.exists():
            assert path.resolve().is_relative_to(tree)
    shutil.rmtree(directory)
