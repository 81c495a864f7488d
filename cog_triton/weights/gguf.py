"""A GGUF file, converted once to a directory of safetensors and a tokenizer, which every engine reads.

The conversion runs in a process of its own, since it loads PyTorch and the model.
"""

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from cog_triton.errors import ConfigurationError
from cog_triton.processes import locked

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_CONVERTED, _UNFINISHED = "model", "unfinished-"


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that a path is, or that is the only model in it; None if there is none."""
    if path.is_file():
        return path if path.suffix.lower() == SUFFIX else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigurationError(f"{path} holds several GGUF files ({names}); name one of them")
    return files[0] if files else None


def converted(file: Path, cache: Path) -> Path:
    """Return the directory that a GGUF file is converted to, or raise ConfigurationError."""
    file = file.resolve()
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ConfigurationError(f"{file} is not a GGUF file")
    status = file.stat()
    identity = f"gguf {file} {status.st_size} {status.st_mtime_ns}"
    entry = cache.expanduser().absolute() / hashlib.sha256(identity.encode()).hexdigest()
    entry.mkdir(parents=True, exist_ok=True)
    with locked(entry, lambda: logger.info("waiting for another process to convert %s", file)):
        model = entry / _CONVERTED
        if model.is_dir():
            return model
        for left in entry.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        unfinished = entry / f"{_UNFINISHED}{uuid.uuid4().hex[:12]}"
        try:
            _convert_in_process(file, unfinished)
            unfinished.rename(model)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return model


def _convert_in_process(file: Path, directory: Path) -> None:
    missing = [name for name in ("torch", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{file} is a GGUF file, which takes the packages torch, transformers and gguf to read: "
            f"{' and '.join(missing)} cannot be imported (pip install 'cog-triton[local]')"
        )
    logger.info("converting %s, once, which may take minutes", file.name)
    command = [sys.executable, "-m", "cog_triton.weights.gguf", str(file), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigurationError(f"{file} could not be converted by transformers: {lines[-1]}")


def convert(file: Path, directory: Path) -> None:
    """Write a GGUF file's model as safetensors, with its tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype="auto")
    # The weights are plain numbers now.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**where).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
