"""The directory of predictions, where another user of the machine may have been first."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cog_triton.api.cog import predictions as predictions_module
from cog_triton.api.cog import private_directory as module
from cog_triton.api.cog.front import Front
from cog_triton.api.cog.messages import VARIABLE
from cog_triton.api.cog.predictions import Predictions
from cog_triton.api.cog.private_directory import PrivateDirectory, UnsafeDirectory
from cog_triton.settings import read_settings
from cog_triton.web.server import bound

OTHER_USER = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coglet" / "predictions"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Files that must stay, in directories with the names of predictions."""
    home = tmp_path / "home"
    for name in ("predictions/Documents", "Documents"):
        (home / name).mkdir(parents=True)
        (home / name / "precious").touch()
        (home / name / "mark").touch()
    return home


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def linked(path: Path, home: Path) -> None:
    path.parent.mkdir(mode=0o755)
    path.symlink_to(home)


def parent_linked(path: Path, home: Path) -> None:
    path.parent.symlink_to(home)


def link_to_nothing(path: Path, home: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(home / "new")


def a_file(path: Path, _: Path) -> None:
    path.parent.mkdir()
    path.touch()


def of_another_user(path: Path, _: Path) -> None:
    path.mkdir(parents=True)
    os.chown(path, OTHER_USER, OTHER_USER)


def parent_of_another_user(path: Path, _: Path) -> None:
    path.mkdir(parents=True)
    os.chown(path.parent, OTHER_USER, OTHER_USER)


UNSAFE = (
    *(linked, parent_linked, link_to_nothing, a_file),
    *(pytest.param(case, marks=as_root) for case in (of_another_user, parent_of_another_user)),
)


@pytest.mark.parametrize("plant", UNSAFE)
def test_nothing_is_made_or_removed_where_another_user_may_write(
    path: Path, home: Path, plant: Callable[[Path, Path], None]
) -> None:
    plant(path, home)
    before = files(home)
    directory = PrivateDirectory(path)
    assert str(path.parent) in directory.problem()
    with pytest.raises(UnsafeDirectory):
        directory.make("new", "mark")
    directory.remove("Documents")
    directory.remove_marked("mark")
    assert files(home) == before


@pytest.mark.parametrize("plant", UNSAFE)
@pytest.mark.anyio
async def test_a_prediction_is_refused_whose_files_another_user_could_lead_elsewhere(
    path: Path,
    home: Path,
    plant: Callable[[Path, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(predictions_module, "REMOVE_SECONDS", 0.0)
    plant(path, home)
    before = files(home)
    predictions = Predictions(path)
    front = Front(bound("127.0.0.1", 0), read_settings({}), predictions)
    assert predictions.files.problem()
    transport = httpx.ASGITransport(front)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.put("/predictions/Documents", json={"input": {}})
    assert reply.status_code == 503
    assert str(path.parent) in reply.json()["detail"]
    for _ in range(3):
        await asyncio.sleep(0)
    await asyncio.wrap_future(predictions.files.after_removals())
    predictions.files.remove_all()
    assert predictions.left() == ""
    assert files(home) == before


def test_missing_directories_are_made_for_this_user_alone(path: Path) -> None:
    PrivateDirectory(path).make("x", "mark")
    for made in (path.parent, path, path / "x"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert files(path) == ["x", "x/mark"]


def test_what_others_could_write_is_closed_to_them(path: Path) -> None:
    path.mkdir(parents=True)
    for directory in (path, path.parent):
        directory.chmod(0o777)
    assert PrivateDirectory(path).problem() == ""
    assert [stat.S_IMODE(made.stat().st_mode) for made in (path, path.parent)] == [0o755, 0o755]


@as_root
@pytest.mark.parametrize(("mode", "safe"), [(0o755, True), (0o777, False), (0o1777, True)])
def test_roots_directories_need_a_sticky_bit_where_all_write(
    path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, safe: bool
) -> None:
    path.mkdir(parents=True)
    path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    assert (PrivateDirectory(path).problem() == "") is safe


def test_a_link_in_place_of_a_predictions_directory(path: Path, home: Path) -> None:
    path.mkdir(parents=True)
    (path / "Documents").symlink_to(home / "Documents")
    before = files(home)
    directory = PrivateDirectory(path)
    with pytest.raises(UnsafeDirectory, match="Documents is a link"):
        directory.make("Documents", "new")
    directory.remove("Documents")
    directory.remove_marked("mark")
    assert files(home) == before


def test_links_in_a_predictions_directory_are_removed_and_not_followed(
    path: Path, home: Path
) -> None:
    directory = PrivateDirectory(path)
    directory.make("x", "mark")
    directory.make("y", "other")
    (path / "x" / "outputs" / "deep").mkdir(parents=True)
    (path / "x" / "outputs" / "to_home").symlink_to(home)
    (path / "x" / "outputs" / "deep" / "to_file").symlink_to(home / "Documents" / "precious")
    before = files(home)
    directory.remove_marked("mark")
    assert files(path) == ["y", "y/other"]
    directory.remove("y")
    assert files(path) == []
    assert files(home) == before


def test_a_path_that_leads_elsewhere_after_its_check(
    path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = PrivateDirectory(path)
    directory.make("Documents", "mark")
    before = files(home)
    moved = path.with_name("moved")
    remove_tree = module._remove_tree

    def remove_after_a_swap(name: str, within: int) -> None:
        path.rename(moved)
        path.symlink_to(home)
        remove_tree(name, within)

    monkeypatch.setattr(module, "_remove_tree", remove_after_a_swap)
    directory.remove("Documents")
    assert files(moved) == []
    assert files(home) == before
