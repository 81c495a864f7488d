"""The demo model: a tiny language model that ships in ``cog_triton/demo``, and its training.

It answers the questions of :mod:`tools.demo_model.corpus` word for word, greets in six languages, and
says of nearly anything else that it does not know it, which is enough to try every step between a
request and its streamed text without a GPU or a download.

This module puts a model in place; :mod:`tools.demo_model.train` trains it, and is imported only then,
because PyTorch takes seconds to import.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cog_triton

Builder = Callable[[Path], Mapping[str, object]]
"""Fills an empty directory with a model and returns what is worth recording about it."""

DIRECTORY = Path(cog_triton.__file__).with_name("demo")
MANIFEST = "demo.json"
_LIBRARIES = ("tokenizers", "torch", "transformers")


class DemoModelError(RuntimeError):
    """The demo model could not be trained to know its answers."""


def make_demo_model(output: Path, build: Builder | None = None) -> None:
    """Train the demo model, and replace the one in ``output``.

    ``output`` appears complete or not at all, whatever interrupts the training.

    Args:
        output: the directory of the model, in Hugging Face format; missing parents are created.
        build: what to run instead of the training.

    Raises:
        DemoModelError: the training failed; nothing was changed.
        FileExistsError: ``output`` holds something other than a demo model; it is left as it is.
    """
    output = output.absolute()
    _refuse_foreign(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as work:
        new = Path(work, "new")
        new.mkdir()
        recorded = (build or _train)(new)
        text = json.dumps(manifest(new, recorded), indent=2) + "\n"
        (new / MANIFEST).write_text(text, encoding="utf-8")
        if output.exists():
            output.rename(Path(work, "old"))
        new.rename(output)


def manifest(directory: Path, recorded: Mapping[str, object]) -> dict[str, Any]:
    """Describe the model in a directory: where it comes from, and the SHA-256 of each of its files."""
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    return {
        **recorded,
        "versions": {library: version(library) for library in _LIBRARIES},
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }


def fingerprint(settings: Mapping[str, object]) -> str:
    """Return the SHA-256, in hexadecimal, of the corpus and the settings of a training."""
    from tools.demo_model.prompts import KNOWN, UNKNOWN

    corpus = [KNOWN, UNKNOWN.model_dump()]
    text = json.dumps([corpus, dict(settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _train(directory: Path) -> Mapping[str, object]:
    from tools.demo_model.train import build_demo_model

    return build_demo_model(directory)


def _refuse_foreign(output: Path) -> None:
    is_directory = output.is_dir() and not output.is_symlink()
    if is_directory and ((output / MANIFEST).is_file() or not any(output.iterdir())):
        return
    if os.path.lexists(output):
        raise FileExistsError(f"{output} is not a demo model, so it will not be replaced")
