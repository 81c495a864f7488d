"""Starts the embedded engine without importing what a model on a CPU never uses.

When transformers is imported, it marks functions for torch.compile and looks for torch.distributed. This
imports PyTorch's compiler and its distributed tensors: 2 of the 7 seconds of processor time that a start of
the demo model took. The engine compiles nothing and runs in one process, so it goes without them.

PyTorch itself imports functions in Python that compute the shapes of results, for the compiler and for
tensors without data. With them, a model that is created without data imports SymPy: a second in all. The
kernels in C++ know the shapes that nearly all models need, so a start tries without those functions first.
"""

import importlib
import importlib.abc
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from cog_triton.engines.base import Engine
from cog_triton.processes import without_collections
from cog_triton.text.transformers_import import list_models_once

logger = logging.getLogger(__name__)

COMPILER = "torch._dynamo"
SHAPES = "torch._meta_registrations"


def create_transformers_engine(parameters: Mapping[str, str]) -> Engine:
    """Load the model that the tensorrt_llm model's parameters name, and start an engine on it."""
    let_waiting_threads_sleep()
    if not may_do_without_compiler(parameters):
        complete_torch()
        return _create(parameters)
    import_torch_without_shapes()
    try:
        with without_compiler():
            return _create(parameters)
    except RuntimeError as error:
        # NotImplementedError is one: an operation has no kernel for shapes.
        if SHAPES in sys.modules:
            raise
        logger.info("loading the model again, with all of PyTorch: %s", error)
        complete_torch()
        return _create(parameters)


def let_waiting_threads_sleep() -> None:
    """Make the threads of PyTorch's operations sleep while they wait for each other, unless told otherwise.

    By default they spin. A server shares its processors with its clients and with other servers; where
    there are fewer processors than threads, steps of a model then take ten times longer.
    OpenMP reads the variable as PyTorch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _create(parameters: Mapping[str, str]) -> Engine:
    with without_collections():
        list_models_once()
        # This imports transformers' models.
        module = importlib.import_module("cog_triton.engines.transformers")
    engine: Engine = module.create_transformers_engine(parameters)
    return engine


def may_do_without_compiler(parameters: Mapping[str, str]) -> bool:
    """Return whether a plain checkpoint runs on the CPU here.

    Libraries of quantizations and of adapters, kernels for GPUs and code that a model brings may use the
    compiler.
    """
    if parameters.get("trust_remote_code") == "true" or parameters.get("lora_prefetch_dir"):
        return False
    try:
        config = json.loads(Path(parameters["model"], "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    if "quantization_config" in config:
        return False
    device = parameters.get("device", "auto")
    if device == "auto":
        import_torch_without_shapes()
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device == "cpu"


def import_torch_without_shapes() -> None:
    """Import PyTorch without the functions that compute shapes; they come with its compiler."""
    if "torch" in sys.modules:
        return
    stand_in = ModuleType(SHAPES)
    sys.modules[SHAPES] = stand_in
    try:
        with without_collections():
            import torch
    finally:
        del sys.modules[SHAPES]
    if getattr(torch, "_meta_registrations", None) is stand_in:
        del torch._meta_registrations
        sys.meta_path.insert(0, _ShapesBeforeCompiler())


def complete_torch() -> None:
    """Import what ``import_torch_without_shapes`` left out, if it did."""
    for finder in [each for each in sys.meta_path if isinstance(each, _ShapesBeforeCompiler)]:
        sys.meta_path.remove(finder)
        importlib.import_module(SHAPES)


class _ShapesBeforeCompiler(importlib.abc.MetaPathFinder):
    """Imports the functions that compute shapes before the compiler, which needs them."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == COMPILER:
            complete_torch()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import transformers and load a model without torch.compile and torch.distributed.

    What is imported meanwhile takes no notice of the compiler. Afterwards, it can be imported as ever.
    """
    import torch

    if COMPILER in sys.modules:
        yield
        return
    disable = torch.compiler.disable
    is_available = torch.distributed.is_available
    stand_in = _compiler_stand_in(Path(torch.__file__).with_name("_dynamo"))
    patched: Any = torch
    sys.modules[COMPILER] = stand_in
    patched.compiler.disable = _as_it_is
    # Transformers looks once.
    patched.distributed.is_available = lambda: False
    try:
        yield
    finally:
        patched.compiler.disable = disable
        patched.distributed.is_available = is_available
        if sys.modules.get(COMPILER) is stand_in:
            del sys.modules[COMPILER]


def _compiler_stand_in(directory: Path) -> ModuleType:
    """Return a module in place of torch._dynamo: its modules are the real ones, its marks do nothing."""

    class StandIn(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _as_it_is

    stand_in = StandIn(COMPILER)
    stand_in.__path__ = [str(directory)]
    return stand_in


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return a function unchanged, as a decorator with options or without."""
    if function is None:
        return lambda decorated: decorated
    return function
