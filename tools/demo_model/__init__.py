"""The demo model: a tiny language model that is trained on the spot, on any machine.

It answers the questions of :mod:`tools.demo_model.corpus` word for word, greets in six languages, and
says of nearly anything else that it does not know it, which is enough to try every step between a
request and its streamed text without a GPU or a download.

This module decides whether the model has to be built and puts it in place;
:mod:`tools.demo_model.train` builds it, and is imported only then, because PyTorch takes seconds to
import and an up-to-date model needs none of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from cog_triton.locks import locked

Builder = Callable[[Path], Mapping[str, object]]
"""Fills an empty directory with a model and returns what is worth recording about it."""

MANIFEST = "demo.json"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

_SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in (
        "conversation.yaml",
        "corpus.py",
        "corpus.yaml",
        "lessons.py",
        "prompts.py",
        "train.py",
        "unknown.yaml",
    )
)
_LIBRARIES = ("tokenizers", "torch", "transformers")


class DemoModelError(RuntimeError):
    """The demo model could not be trained to know its answers."""


def ensure_demo_model(output: Path, *, force: bool = False, build: Builder | None = None) -> bool:
    """Build the demo model in ``output`` unless the one there is up to date.

    ``output`` appears complete or not at all, whatever interrupts the build. A concurrent call for
    the same directory waits for the build under way and then uses its result.

    Args:
        output: the directory of the model, in Hugging Face format; missing parents are created.
        force: build even if the model is up to date.
        build: what to run instead of the training.

    Returns:
        Whether a model was built.

    Raises:
        DemoModelError: the training failed; nothing was changed.
        FileExistsError: ``output`` holds something other than a demo model; it is left as it is.
    """
    output = output.absolute()
    wanted = fingerprint(_SOURCES, library_versions())
    if not force and is_current(output, wanted):
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    with locked(output.parent, _waiting):
        if not force and is_current(output, wanted):
            return False
        _refuse_foreign(output)
        _build_and_publish(output, wanted, build or _train)
    return True


def fingerprint(sources: Iterable[Path], versions: Mapping[str, str]) -> str:
    """Return the SHA-256, in hexadecimal, of all that a built model depends on."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    digest.update(json.dumps(dict(versions), sort_keys=True).encode())
    return digest.hexdigest()


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that shape the model, without importing them."""
    return {library: version(library) for library in _LIBRARIES}


def is_current(output: Path, wanted: str) -> bool:
    """Tell whether ``output`` is a complete demo model with the fingerprint ``wanted``."""
    try:
        recorded = json.loads((output / MANIFEST).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return recorded == wanted and all((output / name).is_file() for name in MODEL_FILES)


def _train(directory: Path) -> Mapping[str, object]:
    from tools.demo_model.train import build_demo_model

    return build_demo_model(directory)


def _waiting() -> None:
    print("Waiting for another build of the demo model to end.", file=sys.stderr)


def _refuse_foreign(output: Path) -> None:
    is_directory = output.is_dir() and not output.is_symlink()
    if is_directory and ((output / MANIFEST).is_file() or not any(output.iterdir())):
        return
    if os.path.lexists(output):
        raise FileExistsError(f"{output} is not a demo model, so it will not be replaced")


def _build_and_publish(output: Path, wanted: str, build: Builder) -> None:
    prefix = f".{output.name}.build-"
    # Only a killed build leaves these behind, and the lock says that none is running.
    for leftover in output.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=prefix) as work:
        new = Path(work, "new")
        new.mkdir()
        manifest = {"fingerprint": wanted, "versions": library_versions(), **build(new)}
        text = json.dumps(manifest, indent=2) + "\n"
        (new / MANIFEST).write_text(text, encoding="utf-8")
        if output.exists():
            output.rename(Path(work, "old"))
        new.rename(output)
