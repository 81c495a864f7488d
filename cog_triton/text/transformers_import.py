"""Imports transformers in less time.

When it is imported, transformers reads its 1,600 files to learn which module has which name, once for
itself and once for ``transformers.models``: each takes half a second of a processor, in each process.
The list depends on the installed files alone, so this module keeps it in a file of the user's cache.
"""

import hashlib
import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from cog_triton.processes import write_whole

LISTING_MODULE = "transformers.utils.import_utils"
CACHE = Path("~/.cache/cog-triton/transformers")
_INSTALLED = frozenset(("site-packages", "dist-packages"))

# The modules and their names, by the backends that they need.
Listing = dict[frozenset[str], dict[str, set[str]]]


def list_models_once() -> None:
    """Import transformers, and let it read its files for the names of models once, not at each import."""
    list_models_once_imported()
    import transformers  # noqa: F401


def list_models_once_imported() -> None:
    """Let transformers, when it is imported, read its files for the names of models once."""
    if LISTING_MODULE in sys.modules:
        _patch(sys.modules[LISTING_MODULE])
    elif not any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchingFinder())


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Patches the module of transformers that reads the files before anything calls it."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != LISTING_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            _patch(module)

        loader.exec_module = execute_and_patch
        return spec


def _patch(import_utils: Any) -> None:
    """Let the function that lists a directory's modules keep the list of all models."""
    original: Callable[..., Listing] | None = getattr(import_utils, "define_import_structure", None)
    if original is None or hasattr(original, "lists_once"):
        return
    directory = Path(import_utils.__file__).parents[1] / "models"

    # transformers calls this with its directory of models and the prefix "models", and later with the path
    # of a file in it and no prefix. It adds to the results.
    def define_import_structure(module_path: Any, prefix: str | None = None) -> Listing:
        path = Path(module_path)
        if path != directory and (path.parent != directory or not path.suffix):
            # Old releases have no prefix.
            return original(module_path) if prefix is None else original(module_path, prefix)
        listing = models_listing(directory, original)
        if prefix is None:
            return listing
        return {
            backends: {f"{prefix}.{module}": names for module, names in modules.items()}
            for backends, modules in listing.items()
        }

    define_import_structure.lists_once = True  # type: ignore[attr-defined]
    import_utils.define_import_structure = define_import_structure


def models_listing(
    directory: Path, read: Callable[[Path], Listing], cache: Path | None = None
) -> Listing:
    """Return what ``read`` returns for a directory, from the cache if the directory is unchanged.

    Only an installed package is kept there: in a checkout, a file may change and its directory not.
    """
    if not _INSTALLED.intersection(directory.parts):
        return read(directory)
    cache = CACHE.expanduser() if cache is None else cache
    file = cache / f"{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}.json"
    state = _state(directory)
    with suppress(OSError, ValueError, LookupError, TypeError):
        content = json.loads(file.read_bytes())
        if content["state"] == state:
            return _decoded(content["modules"])
    listing = read(directory)
    # The home directory may be read-only or absent.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"state": state, "modules": _encoded(listing)}))
    return listing


def _state(directory: Path) -> str:
    """Return what changes with a directory and those in it: an installation changes them all."""
    directories = sorted(path for path in directory.iterdir() if path.is_dir())
    times = [path.stat().st_mtime_ns for path in (directory, *directories)]
    return hashlib.sha256(json.dumps(times).encode()).hexdigest()


def _encoded(listing: Listing) -> list[Any]:
    return [
        [sorted(backends), {module: sorted(names) for module, names in modules.items()}]
        for backends, modules in listing.items()
    ]


def _decoded(content: Sequence[tuple[Sequence[str], Mapping[str, Sequence[str]]]]) -> Listing:
    return {
        frozenset(backends): {module: set(names) for module, names in modules.items()}
        for backends, modules in content
    }
