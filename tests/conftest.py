import argparse
import contextlib
import gc
import importlib
import itertools
import logging
import os
import re
import reprlib
import shutil
import signal
import ssl
import sys
import warnings
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import certifi
import pytest

from cog_triton.deployment import deployment, transformers_checks
from cog_triton.models import stub
from cog_triton.processes import without_collections
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer
from cog_triton.text.transformers_import import list_models_once_imported
from tests.support import regions_left, wait_until
from tools.demo_model import DIRECTORY

ROOT = Path(__file__).resolve().parents[1]
UNIT_DIRECTORY = ROOT / "tests/unit"
MOST_PROCESSES = 4
sys.path.insert(0, str(ROOT))  # predict.py and scripts/ are no packages
sys.path.insert(0, str(ROOT / "scripts"))

# A run starts some hundred processes. Without bytecode on disk, each compiles PyTorch and what else it
# imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Nor does each need to look for plugins of Pydantic in the metadata of some 200 packages.
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "1"

# Several processes of a run compute, and so do their servers. The threads of PyTorch's operations spin
# while they wait for each other: with too few processors, that takes many times longer than the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines are shared: no example fails for the time that it takes. Each run tries other examples, so a
# quarter of the usual number is enough; `make test-rare` tries many.
with contextlib.suppress(ImportError):  # the environment of ENGINE=vllm has no Hypothesis
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None, max_examples=25)
    settings.register_profile("thorough", deadline=None, max_examples=500)
    settings.load_profile("untimed")

# Of sentencepiece, whose authors are not we.
SWIG_WARNING = r"builtin type (SwigPyPacked|SwigPyObject|swigvarlink) has no __module__ attribute"


@pytest.fixture(scope="session", autouse=True)
def pytorch_for_all_tests_or_for_none(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let transformers find PyTorch if a test of this run may compute; else spare its import of seconds.

    transformers looks once, so for one process the answer is for good.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (deployment, transformers_checks, stub):
            patch.setattr(module, "without_torch", lambda: None)
        list_models_once_imported()
        items = request.session.items
        is_unit_run = all(item.path.is_relative_to(UNIT_DIRECTORY) for item in items)
        if is_unit_run and "torch" not in sys.modules:
            patch.setitem(sys.modules, "torch", None)
        yield


PYTORCHS_LOGGERS: list[str] = []


def pytest_runtest_logfinish() -> None:
    """Let PyTorch's loggers hand on what they log, once it is imported.

    pytest attaches its handlers to each logger that does not, some fifty, six times in each test.
    """
    if sys.modules.get("torch") is None or PYTORCHS_LOGGERS:
        return
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True
            logger.handlers.clear()
            PYTORCHS_LOGGERS.append(name)


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """Read the certificates of public servers once, which takes some 30 ms.

    httpx reads them for each client, also of a server without TLS; a test that polls makes many.
    """
    create = ssl.create_default_context
    certificates = certifi.where()
    context = create(cafile=certificates)

    def create_default_context(*arguments: Any, **options: Any) -> ssl.SSLContext:
        if arguments or options != {"cafile": certificates}:
            return create(*arguments, **options)
        return context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create_default_context)
        yield


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run all unit tests in several processes: no test of them needs what another one has started."""
    if config.pluginmanager.hasplugin("xdist") and uses_all_cores(config.args, config.option):
        config.option.numprocesses = "logical"
        config.option.maxprocesses = MOST_PROCESSES
        config.option.dist = "loadgroup"


def uses_all_cores(arguments: Sequence[str], options: argparse.Namespace) -> bool:
    """Return whether a run is one of all unit tests, of which nobody says where or how they run."""
    is_unit_run = [Path(argument).resolve() for argument in arguments] == [UNIT_DIRECTORY]
    is_watched = options.usepdb or options.capture == "no" or options.collectonly
    is_told = options.numprocesses is not None
    # A process of such a run calls this too, with the same arguments: it must start no others.
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_watched or is_told or is_worker:
        return False
    return is_unit_run and (os.cpu_count() or 1) > 1


def pytest_configure(config: pytest.Config) -> None:
    is_chosen = bool(config.option.markexpr or config.option.keyword)
    if leaves_out_rare_tests(config.args, is_chosen=is_chosen):
        config.option.markexpr = "not rare"
    config.addinivalue_line("filterwarnings", f"ignore:{SWIG_WARNING}:DeprecationWarning")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As a shell without job control starts what it runs in the background. All processes that the tests
        # start would ignore a Ctrl-C, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Also where the interpreter ends, after pytest.
    warnings.filterwarnings("ignore", SWIG_WARNING, DeprecationWarning)


def leaves_out_rare_tests(arguments: Sequence[str], *, is_chosen: bool) -> bool:
    """Return whether a run is one of whole directories, and not of tests chosen by mark or keyword."""
    return not is_chosen and all(Path(argument).is_dir() for argument in arguments)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a case by its values where pytest would number it: fields of a request, say."""
    if not isinstance(val, (dict, list, tuple)) or not is_plain(val):
        return None
    shortened = reprlib.Repr()
    shortened.maxdict = shortened.maxlist = shortened.maxtuple = 4
    return " ".join(shortened.repr(val).split())


def is_plain(value: object) -> bool:
    """Return whether a value's text is short, and the same in each process: no address, and no set."""
    if isinstance(value, (dict, list, tuple)):
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return len(parts) <= 64 and all(map(is_plain, parts))
    if isinstance(value, int):
        return abs(value) < 1 << 128
    return value is None or isinstance(value, (str, bytes, float))


REGIONS_BEFORE = pytest.StashKey[set[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[REGIONS_BEFORE] = regions_left()


@pytest.hookimpl(trylast=True)  # after the fixtures have stopped their servers
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if a server of it left shared memory."""
    if hasattr(session.config, "workerinput"):  # the process that started the workers looks
        return
    before = session.config.stash[REGIONS_BEFORE]
    try:
        # The guard of a server that was killed a moment ago may still be clearing up.
        wait_until(lambda: not regions_left() - before, 60, "the removal of shared memory")
    except AssertionError as error:
        print(f"\n{error}: {sorted(regions_left() - before)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)  # pytest-xdist is not in every environment
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return, for ``-n auto``, one process more than there are cores: tests of servers mostly wait."""
    if config.option.numprocesses != "auto":
        return None
    return (os.cpu_count() or 1) + 1


# Servers that are started once for all tests that only send them requests.
SHARED_SERVERS = ("cog_server", "paced_cog_server")
# Those of tests/compute: PyTorch takes seconds to import, so one process runs them.
COMPUTE = "tests that compute with PyTorch"
COMPUTE_DIRECTORY = ROOT / "tests/compute"
FIRST_GROUPS = (*SHARED_SERVERS, COMPUTE)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while the tests are collected, and later not among what was made for them."""
    with without_collections():
        result = yield
    gc.freeze()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that share a server in one process (``--dist loadgroup``); these begin."""
    groups = {item: group_of(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: groups[item] not in FIRST_GROUPS)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fails where pytest-xdist lost the groups: every process would start every server.

    Nor does each process import PyTorch, which takes seconds, just to collect the tests.
    """
    if getattr(session.config.option, "loadgroup", False):
        assert all("@" in item.nodeid for item in session.items), "update pytest and pytest-xdist"
        assert "torch" not in sys.modules, (
            "a test file imports PyTorch: tests/late.py does it later"
        )


def group_of(item: pytest.Item) -> str:
    """Return the shared server that a test asks, else its file, or itself if it starts its own.

    A mark of a file says that its tests need what another group has in its process.
    """
    if mark := item.get_closest_marker("xdist_group"):
        return str(mark.args[0])
    definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    if shared := [name for name in SHARED_SERVERS if name in definitions]:
        return shared[0]
    if item.path.parent == COMPUTE_DIRECTORY:
        return COMPUTE
    of_module = any(found[-1].scope == "module" for found in definitions.values())
    alone = "integration" in item.path.parts and not of_module
    return item.nodeid if alone else item.nodeid.partition("::")[0]


@pytest.fixture(scope="session")
def demo_model(pytestconfig: pytest.Config) -> Path:
    """The demo model that ships, or another one that is as good."""
    return Path(pytestconfig.getoption("--demo-model"))


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(str(demo_model))


@pytest.fixture(scope="module")
def fake_tensorrt_llm() -> Iterator[Any]:
    """The fake as the package tensorrt_llm, even where the real one is installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in loaded_tensorrt_llm():
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(str(ROOT / "tests/fakes"))
        yield importlib.import_module("tensorrt_llm")
        for name in loaded_tensorrt_llm():
            del sys.modules[name]


def loaded_tensorrt_llm() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]


DIRECTORY_NUMBERS = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a test. To number it, pytest's fixture would look at those of all tests before."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return tmp_path_factory.mktemp(f"{name}_{next(DIRECTORY_NUMBERS)}", numbered=False)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", default="auto", help="ENGINE of the servers with the demo model")
    parser.addoption("--demo-model", default=DIRECTORY, help="the demo model's directory")


@pytest.fixture(scope="session")
def made_adapters(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.adapters import make_adapter
    from tests.peft_reference import make_varied_adapter

    directory = tmp_path_factory.mktemp("adapters")
    make_adapter(demo_model, directory / "poet", seed=1)
    make_varied_adapter(demo_model, directory / "bard")
    return directory


@pytest.fixture
def adapters(made_adapters: Path, tmp_path: Path) -> Path:
    """A directory of two adapters, which a test may change."""
    shutil.copytree(made_adapters, tmp_path / "adapters")
    return tmp_path / "adapters"
