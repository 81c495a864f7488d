"""Hugging Face: its repositories, in its own cache."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from cog_triton.errors import ConfigurationError

UNUSED_FORMATS = ("original/*", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
"""Second copies of the weights that repositories on Hugging Face hold for programs other than ours."""

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""Files that a tokenizer does not need."""

_HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>\S+))?", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Return whether this has the form of an id on Hugging Face, org/name or org/name@revision."""
    return _HUB_ID.fullmatch(name) is not None


def fetch_from_hub(source: str, token: str | None, without: tuple[str, ...] = ()) -> Path:
    """Return the local directory of a repository, less the files that match ``without``.

    Raises:
        ConfigurationError: there is nothing to return, with the reason and what to do.
    """
    match = _HUB_ID.fullmatch(source)
    if not match:
        raise ConfigurationError(
            f"{source!r} is no file or directory that exists, and neither a URL nor a Hugging Face "
            "id (org/name or org/name@revision)"
        )
    # Imported here, because it takes a while and most deployments have their files in place.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # The bases are those of its HTTP library: requests, httpx and httpx2, by its release.
    foreseen: tuple[type[Exception], ...] = (OSError, ValueError, *HfHubHTTPError.__bases__)
    try:
        snapshot = snapshot_download(
            match["name"],
            revision=match["revision"],
            token=token,
            ignore_patterns=[*UNUSED_FORMATS, *without],
        )
    except foreseen as error:
        # Without the error's own text, which may hold the token.
        raise ConfigurationError(_problem(error, source)) from None
    return Path(snapshot)


def _problem(error: Exception, source: str) -> str:
    from huggingface_hub import errors

    texts: list[tuple[type[Exception] | tuple[type[Exception], ...], str]] = [
        (
            errors.GatedRepoError,
            "is gated: accept its terms on huggingface.co, and set a token (HF_TOKEN) of the account "
            "that did",
        ),
        (errors.RevisionNotFoundError, "has no such revision; check what follows the @"),
        (
            errors.RepositoryNotFoundError,
            "is no directory that exists here, and Hugging Face has no such repository or shows it to "
            "others only; check the name, or set a token (HF_TOKEN) that may read it",
        ),
        (errors.HFValidationError, "is no valid Hugging Face id; write org/name@revision"),
        # Before version 1 these are HfHubHTTPErrors, though nothing answered.
        (
            (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled),
            "is no directory that exists here, nor complete in the Hugging Face cache, and Hugging "
            "Face cannot be reached or is turned off (HF_HUB_OFFLINE); check the network, or name a "
            "local directory",
        ),
    ]
    for kind, text in texts:
        if isinstance(error, kind):
            return f"{source} {text}"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code if error.response is not None else "?"
        advice = "check the token (HF_TOKEN)" if status in (401, 403) else "try again later"
        return f"Hugging Face answered HTTP {status} for {source}; {advice}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for {source} in the Hugging Face cache; free some, or set HF_HOME"
    return f"{source} could not be fetched from Hugging Face: {type(error).__name__}; try again"
