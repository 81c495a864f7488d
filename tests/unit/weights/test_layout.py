from __future__ import annotations

import contextlib
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from cog_triton.weights.tar import Layout, UnsafeMember, unpack
from tests.unit.weights.support import DIR, LNK, SYM, as_before_filters, entry, tar_of, unpacked

UNSAFE: dict[str, tuple[list[Any], str]] = {
    "absolute": ([("/etc/x", b"1")], "has the absolute name '/etc/x'"),
    "parent": ([("../x", b"1")], r"has \.\. in the name"),
    "inner parent": ([("a/../../x", b"1")], r"has \.\. in the name"),
    "directory": ([("../d", b"", DIR)], r"has \.\. in the name"),
    "absolute symlink": ([("s", b"", SYM, "/etc/passwd")], "links to the absolute path"),
    "symlink out": ([("s", b"", SYM, "../x")], "outside the directory"),
    "deep symlink out": ([("a/s", b"", SYM, "../../x")], "outside the directory"),
    "symlink out and back": ([("s", b"", SYM, "../tree/x")], "outside the directory"),
    "symlink up by a link": (
        [("a/b/up", b"", SYM, "../.."), ("s", b"", SYM, "a/b/up/..")],
        "leads through a link or a file",
    ),
    "symlink up by a later link": (
        [("s", b"", SYM, "a/b/up/.."), ("a/b/up", b"", SYM, "../..")],
        "in the place of another",
    ),
    "file through a link": (
        [("d", b"", DIR), ("s", b"", SYM, "d"), ("s/x", b"1")],
        "leads through a link or a file",
    ),
    "file through a later link": ([("s/x", b"1"), ("s", b"", SYM, "d")], "in the place of another"),
    "file in place of a link": ([("s", b"", SYM, "d"), ("s", b"1")], "in the place of another"),
    "link in place of a file": ([("s", b"1"), ("s", b"", SYM, "d")], "in the place of another"),
    "directory in place of a link": (
        [("s", b"", SYM, "d"), ("s", b"", DIR)],
        "in the place of another",
    ),
    "nameless link": ([(".", b"", SYM, "d")], "in the place of another"),
    "absolute hardlink": ([("h", b"", LNK, "/etc/passwd")], "has the absolute name"),
    "hardlink out": ([("h", b"", LNK, "../x")], r"has \.\. in the name"),
    "hardlink to nothing": ([("h", b"", LNK, "x")], "no file before it"),
    "hardlink to a link": (
        [("a/b/s", b"", SYM, "../../x"), ("h", b"", LNK, "a/b/s")],
        "no file before it",
    ),
    "hardlink in place of a file": (
        [("x", b"1"), ("y", b"2"), ("y", b"", LNK, "x")],
        "in the place of another",
    ),
    "file through a file": ([("x", b"1"), ("x/y", b"2")], "leads through a link or a file"),
    "file in place of a directory": ([("d", b"", DIR), ("d", b"1")], "in the place of another"),
    "directory in place of a file": ([("d", b"1"), ("d", b"", DIR)], "in the place of another"),
    "dotted link in place of a directory": (
        [("d/x", b"1"), ("d/.", b"", SYM, "e")],
        "in the place of another",
    ),
    "character device": ([("d", b"", tarfile.CHRTYPE)], "is a device or a pipe"),
    "block device": ([("d", b"", tarfile.BLKTYPE)], "is a device or a pipe"),
    "pipe": ([("d", b"", tarfile.FIFOTYPE)], "is a device or a pipe"),
}


@pytest.mark.parametrize(("members", "problem"), UNSAFE.values(), ids=UNSAFE.keys())
def test_an_unsafe_member_is_refused(
    members: list[Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = members[-1][0]
    with pytest.raises(ConfigurationError, match=problem) as error:
        unpacked(tmp_path, tar_of(entry("ok", b"1"), *[entry(*member) for member in members]))
    assert f"its member {last!r} " in str(error.value)
    (kept,) = (tmp_path / "cache").iterdir()
    assert list(kept.iterdir()) == []
    # By the checks alone, and not because tarfile's filter agrees.
    as_before_filters(monkeypatch)
    with pytest.raises(ConfigurationError, match=problem):
        unpacked(tmp_path, tar_of(entry("ok", b"1"), *[entry(*member) for member in members]))
    assert {path.name for path in tmp_path.iterdir()} == {"m.tar", "cache"}


@pytest.mark.parametrize("name", ["a\0b", "a/\0"])
def test_a_nul_in_a_name_is_refused(name: str) -> None:
    with pytest.raises(UnsafeMember, match="NUL"):
        Layout().place(tarfile.TarInfo(name))


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
