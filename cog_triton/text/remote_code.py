"""Python code that models and tokenizers bring, by ``auto_map``; it runs only with TRUST_REMOTE_CODE."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cog_triton.processes import locked


def was_refused(error: BaseException) -> bool:
    """Return True for the error of transformers that ``trust_remote_code`` was not set."""
    return "trust_remote_code" in str(error)


def refusal(what: str, name: str) -> str:
    """Return an error's text for a ``what``, "model" or "tokenizer", whose code is not trusted."""
    return (
        f"the {what} {name!r} brings Python code of its own and needs it, and that is not run unless it "
        "is trusted. Read its .py files, then set TRUST_REMOTE_CODE=1 (in a repository that "
        "fill_template.py fills: trust_remote_code:true), which runs them with all that this user may do"
    )


def brought_by(directory: Path) -> Path | None:
    """Return the file of a model's directory that names Python code of its own, or None."""
    for file in (directory / "config.json", directory / "tokenizer_config.json"):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or broken, which others report
            continue
        if isinstance(content, dict) and content.get("auto_map"):
            return file
    return None


@contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Lock the directory of the user's to which transformers copies code and imports it from.

    The predictor, preprocessing and postprocessing start together, and would read half-written copies.
    """
    from transformers.utils import HF_MODULES_CACHE

    directory = Path(HF_MODULES_CACHE)
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory, waiting=lambda: None):
        yield
