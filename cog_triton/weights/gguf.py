"""A GGUF file, converted once to a directory of safetensors and a tokenizer, which every engine reads.

The conversion runs in a process of its own, since it loads PyTorch and the model.
"""

import hashlib
import importlib.util
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.errors import ConfigurationError
from cog_triton.processes import locked
from cog_triton.weights.gguf_details import Details, UnreadableDetailError, read_details

logger = logging.getLogger(__name__)
progress = logging.getLogger("cog_triton.progress")

SUFFIX = ".gguf"
# A change of this number converts the files in the cache again.
_REVISION = 2
MAGIC = b"GGUF"
NAMES_SHOWN = 3
_CONVERTED = "model"
_UNFINISHED = "unfinished-"
# Files of the same format that are no models: encoders of images, and statistics for quantization.
_NO_MODEL = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
_PROGRESS = re.compile(r"(?P<done>\d+) of (?P<total>\d+) bytes")
_WRITING = "writing"
# The time between two lines on the progress of a conversion. In a log file, each of them stays.
TERMINAL_SECONDS = 0.5
PIPE_SECONDS = 10.0
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that a path is, or that is the only model in it; None if there is none.

    A file without the suffix is recognized by its first bytes: Ollama names its files after their hashes.
    """
    if path.is_file():
        if path.suffix.lower() != SUFFIX and not has_magic(path):
            return None
        refuse_split(str(path), [path.name])
        return path
    if not path.is_dir() or any(any(path.glob(pattern)) for pattern in _OTHER_WEIGHTS):
        return None
    files = sorted(
        file for file in path.iterdir() if file.suffix.lower() == SUFFIX and is_model(file.name)
    )
    names = [file.name for file in files]
    refuse_split(str(path), names)
    if len(files) > 1:
        raise ConfigurationError(
            f"{path} contains several GGUF files ({', '.join(names)}); set MODEL to one of them"
        )
    return files[0] if files else None


def has_magic(file: Path) -> bool:
    """Return whether a file can be read and begins as GGUF files do."""
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC
    return False


def is_model(name: str) -> bool:
    """Return whether a GGUF file is a model's, by its name."""
    return not _NO_MODEL.search(PurePosixPath(name).name)


def is_split(name: str) -> bool:
    """Return whether a GGUF file is one of several parts of a model, by its name."""
    part = _PART.search(name)
    return part is not None and int(part["count"]) > 1


def refuse_split(source: str, names: Sequence[str]) -> None:
    """Raise ConfigurationError if one of the files is a part of a model; transformers reads whole ones."""
    for name in names:
        if is_split(name):
            raise ConfigurationError(
                f"{source}: {name} is one part of a split GGUF model, which is not supported; merge the "
                "parts with llama.cpp's `llama-gguf-split --merge`"
            )


def converted(file: Path, cache: Path, dtype: str = "auto") -> Path:
    """Return the directory that a GGUF file is converted to, or raise ConfigurationError.

    Args:
        dtype: the type of the weights; with "auto", transformers chooses it.
    """
    if not has_magic(file):
        raise ConfigurationError(f"{file} is not a GGUF file or cannot be read")
    # In the cache of Hugging Face, this is a file without a name.
    original = file.resolve()
    status = original.stat()
    identity = f"gguf {_REVISION} {original} {status.st_size} {status.st_mtime_ns}"
    if dtype != "auto":
        identity += f" {dtype}"
    entry = cache.expanduser().absolute() / hashlib.sha256(identity.encode()).hexdigest()
    entry.mkdir(parents=True, exist_ok=True)
    with locked(entry, lambda: logger.info("waiting for another process to convert %s", file)):
        model = entry / _CONVERTED
        if model.is_dir():
            return model
        for left in entry.glob(f"{_UNFINISHED}*"):
            if left.is_symlink():
                left.unlink()
            else:
                shutil.rmtree(left, ignore_errors=True)
        unfinished = entry / f"{_UNFINISHED}{uuid.uuid4().hex[:12]}"
        try:
            _convert_in_process(file, unfinished, dtype)
            unfinished.rename(model)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.with_name(f"{unfinished.name}{SUFFIX}").unlink(missing_ok=True)
        return model


def _convert_in_process(file: Path, directory: Path, dtype: str) -> None:
    """Convert a GGUF file in another process, or raise ConfigurationError with its reason."""
    missing = [name for name in ("torch", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"reading the GGUF file {file} requires {' and '.join(missing)}, which cannot be imported; "
            "pip install 'cog-triton[local]'"
        )
    logger.info("converting %s; this happens once and can take minutes", file.name)
    command = [sys.executable, "-m", "cog_triton.weights.gguf", str(file), str(directory), dtype]
    # Its errors go to a file: a pipe that nobody reads could fill up and stop it.
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        with process:
            assert process.stdout is not None
            log_progress(file.name, process.stdout)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if process.returncode != 0:
        reason = lines[-1] if lines else f"exit status {process.returncode}"
        raise ConfigurationError(f"transformers could not convert {file}: {reason}")


def log_progress(name: str, lines: Iterable[str]) -> None:
    """Log how far a conversion is, now and then: its process prints the bytes read, and the file's."""
    interval = TERMINAL_SECONDS if sys.stderr.isatty() else PIPE_SECONDS
    last = time.monotonic()
    for line in lines:
        if line.strip() == _WRITING:
            progress.info("converting %s: writing the weights", name)
        numbers = _PROGRESS.fullmatch(line.strip())
        if numbers is None or time.monotonic() - last < interval:
            continue
        last = time.monotonic()
        done = tqdm.format_sizeof(int(numbers["done"]))
        total = tqdm.format_sizeof(int(numbers["total"]))
        progress.info("converting %s: %sB of %sB read", name, done, total)


@contextmanager
def _printed_progress(total: int) -> Iterator[None]:
    """Print how many bytes of a file's weights transformers has read, after each tensor."""
    import gguf

    package: Any = gguf
    dequantize = package.dequantize
    done = 0

    def dequantize_and_print(data: Any, *arguments: Any) -> Any:
        nonlocal done
        weights = dequantize(data, *arguments)
        done += data.nbytes
        print(f"{done} of {total} bytes", flush=True)
        return weights

    package.dequantize = dequantize_and_print
    try:
        yield
    finally:
        package.dequantize = dequantize


def convert(file: Path, directory: Path, dtype: str) -> None:
    """Write a GGUF file's model as safetensors, with its tokenizer and chat template."""
    total = check_whole(file)
    try:
        details = read_details(file)
    except UnreadableDetailError as error:
        sys.exit(f"{error}, which transformers would ignore; use the original checkpoint instead")
    # Here, because it takes seconds.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers knows the file by its suffix.
    link = directory.with_name(f"{directory.name}{SUFFIX}")
    link.symlink_to(file.resolve())
    with _printed_progress(total):
        model, report = AutoModelForCausalLM.from_pretrained(
            str(link.parent), gguf_file=link.name, dtype=dtype, output_loading_info=True
        )
    _check_weights(model, report, details)
    # The weights are plain numbers now.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if details.rope is not None:
        scale_rope(model.config, details.rope)
    if details.end_tokens:
        model.generation_config.eos_token_id = list(details.end_tokens)
    print(_WRITING, flush=True)
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(str(link.parent), gguf_file=link.name)
    tokenizer.save_pretrained(directory)


def scale_rope(config: Any, rope: Mapping[str, Any]) -> None:
    """Have a configuration scale the rotary embedding; the frequencies are not saved with a model."""
    parameters = dict(config.rope_parameters or {})
    if "full_attention" in parameters:
        # Layers with a sliding window have other parameters, which are never scaled.
        parameters["full_attention"] = {**parameters["full_attention"], **rope}
    else:
        parameters.update(rope)
    config.rope_parameters = parameters
    original = rope.get("original_max_position_embeddings")
    if original is not None and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original


def _check_weights(model: Any, report: Mapping[str, Any], details: Details) -> None:
    """Exit with the reason if the file does not fill the model, or has weights that are ignored."""
    missing = sorted(report["missing_keys"])
    if missing:
        names = ", ".join(missing[:NAMES_SHOWN])
        more = ", …" if len(missing) > NAMES_SHOWN else ""
        sys.exit(f"it lacks {len(missing)} of the model's weights: {names}{more}")
    if details.has_biases and not any(name.endswith(".bias") for name in model.state_dict()):
        sys.exit(
            f"it contains biases, which transformers ignores in {model.config.model_type} models"
        )


def check_whole(file: Path) -> int:
    """Return the bytes of a file's weights; exit with the reason if it is cut short or damaged."""
    import gguf

    try:
        # It looks at the place of every tensor.
        reader = gguf.GGUFReader(file)
    except (ValueError, LookupError, OverflowError, MemoryError) as error:
        sys.exit(f"it is truncated or damaged ({error})")
    return sum(int(tensor.n_bytes) for tensor in reader.tensors)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
