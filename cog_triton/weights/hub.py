"""Repositories of Hugging Face, in its own cache; of one with GGUF files, one of them."""

import errno
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cog_triton.errors import ConfigurationError
from cog_triton.redaction import keep_urls_out_of_logs, shown_url
from cog_triton.weights import gguf

logger = logging.getLogger(__name__)

# Second copies of the weights that repositories on Hugging Face hold for programs other than ours.
UNUSED_FORMATS = ("original/*", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
# Files that a tokenizer does not need.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
# org/name, and as other programs have it: hf.co/ before it, :Q4_K_M or /FILE.gguf behind it.
HUB_ID = re.compile(
    r"""
    (hf\.co/ | huggingface\.co/)?
    (?P<name>[\w-][\w.-]*/[\w-][\w.-]*)
    (:(?P<quantization>[\w.-]+) | /(?P<file>[\w./ +-]+\.gguf))?
    (@(?P<revision>\S+))?
    """,
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
# The file that llama.cpp and Ollama take where a repository has several and none is named.
USUAL_QUANTIZATION = "Q4_K_M"
_NOT_IN_THE_CACHE = (
    "is neither a local directory nor complete in the Hugging Face cache, and Hugging Face is unreachable"
    " or turned off (HF_HUB_OFFLINE); check the network, or use a local directory"
)
# What is wrong with a repository, by the name of huggingface_hub's error.
_PROBLEMS = {
    "GatedRepoError": (
        "is gated: accept its terms on huggingface.co, and set HF_TOKEN to a token of the same account"
    ),
    "RevisionNotFoundError": "has no such revision; check what follows the @",
    "RepositoryNotFoundError": (
        "is not a local directory, and its Hugging Face repository does not exist or is private; check"
        " the name, or set HF_TOKEN to a token with access"
    ),
    "HFValidationError": "is not a valid Hugging Face id; use org/name or org/name@revision",
    "LocalEntryNotFoundError": _NOT_IN_THE_CACHE,
    "OfflineModeIsEnabled": _NOT_IN_THE_CACHE,
}


def fetch_from_hub(source: str, token: str | None, without: tuple[str, ...] = ()) -> Path:
    """Return the local directory of a repository, or its GGUF file.

    A GGUF file is returned if the source names one, or if there are no other weights.

    Args:
        source: org/name, org/name:QUANTIZATION or org/name/FILE.gguf, and @REVISION behind it.
        token: access token; the one that ``hf auth login`` keeps when None.
        without: patterns of files that are not needed, for a tokenizer say. With any, the directory is
            returned, and no GGUF file is looked for.
    """
    match = HUB_ID.fullmatch(source)
    if match is None:
        raise ConfigurationError(
            f"{shown_url(source)!r} is not a local file or directory, a URL, or a Hugging Face id "
            "(org/name or org/name@revision)"
        )
    keep_urls_out_of_logs()
    repository = _Repository(match["name"], match["revision"], token)
    wanted = None if without else match["quantization"] or match["file"]
    with _described_problems(source):
        if wanted is None:
            snapshot = repository.snapshot(ignored=[*UNUSED_FORMATS, *without])
            if without or _holds_weights(snapshot):
                return snapshot
        else:
            snapshot = repository.snapshot(only=["config.json"])
        files = repository.gguf_files(snapshot)
        if not files and wanted is None:
            return snapshot
        file = choose_gguf(source, files, wanted)
        logger.info("using %s from %s", file, repository.name)
        snapshot = repository.snapshot(only=[file])
    if not (snapshot / file).is_file():
        raise ConfigurationError(
            f"{file} of {source} is not in the Hugging Face cache and cannot be downloaded now"
        )
    return snapshot / file


@dataclass(frozen=True)
class _Repository:
    """A repository on Hugging Face, at a revision."""

    name: str
    revision: str | None
    token: str | None

    def snapshot(self, only: list[str] | None = None, ignored: list[str] | None = None) -> Path:
        """Return the directory of its files in the cache, downloaded if need be.

        Args:
            only: patterns of the files that are wanted; None for all.
            ignored: patterns of files that are not wanted.
        """
        # Here, because it takes a while and most deployments have their files in place.
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self.name,
                revision=self.revision,
                token=self.token,
                allow_patterns=only,
                ignore_patterns=ignored,
            )
        )

    def gguf_files(self, snapshot: Path) -> list[str]:
        """Return the names of its GGUF files; those in the cache if the hub cannot be asked."""
        from huggingface_hub import HfApi

        try:
            names = HfApi().list_repo_files(self.name, revision=self.revision, token=self.token)
        except Exception:
            # The snapshot was found: the hub is turned off or cannot be reached.
            names = [
                str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()
            ]
        return [file for file in names if file.lower().endswith(gguf.SUFFIX)]


def choose_gguf(source: str, files: Sequence[str], wanted: str | None) -> str:
    """Return the GGUF file of a repository that is to be served, or raise ConfigurationError.

    Args:
        wanted: a file, or a part of its name, mostly its quantization; in upper or lower case.
    """
    models = sorted(file for file in files if gguf.is_model(file))
    fitting = models
    if wanted is not None:
        fitting = [file for file in models if file.lower() == wanted.lower()]
        fitting = fitting or [file for file in models if _is_part(wanted, file)]
    elif len(models) > 1:
        fitting = [file for file in models if _is_part(USUAL_QUANTIZATION, file)]
    whole = [file for file in models if not gguf.is_split(file)]
    gguf.refuse_split(source, fitting if whole else models)
    if len(fitting) == 1:
        return fitting[0]
    if not models:
        raise ConfigurationError(f"{source} contains no GGUF file of a model")
    repository = source.partition("@")[0]
    if wanted is None:
        problem = f"{source} has several GGUF files, but no single {USUAL_QUANTIZATION} file"
    else:
        repository = repository[: -len(wanted) - 1]
        problem = f"{source} matches {'several GGUF files' if fitting else 'no GGUF file'}"
    raise ConfigurationError(
        f"{problem}; use {repository}/FILE, where FILE is one of {', '.join(fitting or whole)}"
    )


def _is_part(wanted: str, file: str) -> bool:
    """Return whether a file's name has a word, between other words or directories."""
    pattern = rf"(^|[-._/]){re.escape(wanted)}([-./]|$)"
    return re.search(pattern, file, re.IGNORECASE) is not None


def _holds_weights(directory: Path) -> bool:
    return any(any(directory.glob(pattern)) for pattern in WEIGHTS)


@contextmanager
def _described_problems(source: str) -> Iterator[None]:
    """Raise a ConfigurationError in place of what the hub's library raises."""
    from huggingface_hub import errors

    # The bases are those of its HTTP library: requests, httpx and httpx2, by its release.
    foreseen: tuple[type[Exception], ...] = (OSError, ValueError, *errors.HfHubHTTPError.__bases__)
    try:
        yield
    except foreseen as error:
        # The text of the error may contain the token.
        kinds = [kind.__name__ for kind in type(error).__mro__]
        known = next((_PROBLEMS[kind] for kind in kinds if kind in _PROBLEMS), None)
        # Before version 1 that of an offline cache is an HfHubHTTPError too, though nothing answered.
        if known is not None:
            problem = f"{source} {known}"
        elif isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code if error.response is not None else "?"
            advice = "check the token (HF_TOKEN)" if status in (401, 403) else "try again later"
            problem = f"Hugging Face answered HTTP {status} for {source}; {advice}"
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = (
                f"not enough disk space for {source} in the Hugging Face cache; free some space, or set "
                "HF_HOME to another disk"
            )
        else:
            problem = f"{source} could not be fetched from Hugging Face: {kinds[0]}; try again"
        raise ConfigurationError(problem) from None
