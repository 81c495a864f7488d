"""Hugging Face: its repositories, in its own cache."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from cog_triton.errors import ConfigurationError
from cog_triton.weights.files import is_full, require_files

UNUSED_FORMATS = ("original/*", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
"""Second copies of the weights that repositories on Hugging Face hold for programs other than ours."""

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""Files that a tokenizer does not need."""

_HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>\S+))?", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Return whether this has the form of an id on Hugging Face, org/name or org/name@revision."""
    return _HUB_ID.fullmatch(name) is not None


def fetch_tokenizer(name: str, token: str | None) -> Path:
    """Return the local directory of a tokenizer on Hugging Face; its model's weights are not fetched.

    Raises:
        ConfigurationError: there is nothing to return, with the reason and what to do.
    """
    return fetch_from_hub(name, token, progress=False, without=(*UNUSED_FORMATS, *WEIGHTS))


def fetch_from_hub(
    source: str, token: str | None, progress: bool, *, without: Sequence[str] = UNUSED_FORMATS
) -> Path:
    match = _HUB_ID.fullmatch(source)
    if not match:
        raise ConfigurationError(
            f"{source!r} is no file or directory that exists, and neither a URL nor a Hugging Face "
            "id (org/name or org/name@revision)"
        )
    # Imported here, because it takes a while and most deployments have their files in place.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # Its errors are OSErrors, ValueErrors and those of its HTTP library: requests before version 1,
    # httpx since.
    foreseen = (OSError, ValueError, *HfHubHTTPError.__bases__)
    try:
        with _hub_progress(progress):
            snapshot = snapshot_download(
                match["name"],
                revision=match["revision"],
                token=token,
                ignore_patterns=list(without),
            )
        return require_files(Path(snapshot))
    except cast("tuple[type[Exception], ...]", foreseen) as error:
        # Not from the error: nobody can tell whether its text has the token.
        raise ConfigurationError(hub_problem(error, source)) from None


def hub_problem(error: Exception, source: str) -> str:
    """Describe an error of huggingface_hub, and what to do about it."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{source} is gated: accept its terms on huggingface.co, and set a token (HF_TOKEN) of "
            "the account that did"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{source}: Hugging Face has no such revision; check what follows the @"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{source} is no directory that exists here, and Hugging Face has no such repository or "
            "shows it to others only; check the name, or set a token (HF_TOKEN) that may read it"
        )
    if status in (401, 403):
        return (
            f"Hugging Face refuses access to {source} (HTTP {status}); check the token (HF_TOKEN)"
        )
    if isinstance(error, errors.HFValidationError):
        return f"{source} is no valid Hugging Face id; write org/name or org/name@revision"
    if isinstance(error, OSError) and is_full(error):
        return f"no space left for {source} in the Hugging Face cache; free some, or set HF_HOME"
    # Before version 1 this is an HfHubHTTPError, though nothing answered.
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return (
            f"{source} is no directory that exists here, nor complete in the Hugging Face cache, and "
            "Hugging Face cannot be reached or is turned off (HF_HUB_OFFLINE); check the network, or "
            "name a local directory"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"Hugging Face answered HTTP {status} for {source}; try again later"
    return f"{source} could not be fetched from Hugging Face: {type(error).__name__}; try again"


@contextmanager
def _hub_progress(wanted: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if wanted or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
