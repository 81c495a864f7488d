"""The demo model: a tiny language model that ships in ``cog_triton/demo``, and its training.

It answers the questions of corpus.yaml word for word, greets in six languages, and says of nearly
anything else that it does not know it.

    corpus.py    the YAML files → answers with their prompts
    lessons.py   prompts and answers → token ids, and what an epoch shows of them
    train.py     the model; imported only here, as PyTorch takes seconds to import
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import cog_triton
from tools.command_line import begin

DIRECTORY = Path(cog_triton.__file__).with_name("demo")
MANIFEST = "demo.json"


class DemoModelError(RuntimeError):
    """The demo model could not be trained to know its answers."""


def main(output: Path | None) -> int:
    """Train the demo model on this machine; return 1 if it does not know its answers."""
    begin()  # the training removes its temporary directory
    # Every x86-64 processor has these kernels, so that machines differ as little as they can.
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "default")
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "SSE41")
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
    output = output or DIRECTORY
    try:
        make_demo_model(output)
    except DemoModelError as error:
        print(f"error: no demo model was made: {error}", file=sys.stderr)
        return 1
    print(f"{output}: the demo model is ready")
    return 0


def make_demo_model(
    output: Path, build: Callable[[Path], Mapping[str, object]] | None = None
) -> None:
    """Train the demo model, and replace the one in ``output``, which is complete or as it was.

    ``build`` fills an empty directory with a model and returns what is to be recorded about it.

    Raises:
        DemoModelError: the training failed.
        FileExistsError: ``output`` holds something other than a demo model.
    """
    if build is None:
        from tools.demo_model import train

        build = train.build_demo_model
    output = output.absolute()
    if output.is_symlink() or (output.exists() and not (output / MANIFEST).is_file()):
        raise FileExistsError(f"{output} is not a demo model, so it will not be replaced")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as work:
        new = Path(work, "new")
        new.mkdir()
        versions = {name: version(name) for name in ("torch", "transformers")}
        record = {**build(new), "versions": versions, "files": checksums(new)}
        (new / MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if output.exists():
            output.rename(Path(work, "old"))
        new.rename(output)


def checksums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a model."""
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
