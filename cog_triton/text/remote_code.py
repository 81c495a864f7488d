"""Models and tokenizers that bring Python code of their own, by ``auto_map`` in their configuration.

It is run only if ``TRUST_REMOTE_CODE`` allows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cog_triton.processes import locked


def was_refused(error: BaseException) -> bool:
    """Whether an error of transformers is that ``trust_remote_code`` was not set."""
    return "trust_remote_code" in str(error)


def refusal(what: str, name: str) -> str:
    """What to do about a model or tokenizer whose code is not trusted.

    Args:
        what: "model" or "tokenizer".
    """
    return (
        f"the {what} {name!r} brings Python code of its own and needs it, and that is not run unless it "
        "is trusted. Read its .py files, then set TRUST_REMOTE_CODE=1 (in a repository that "
        "fill_template.py fills: trust_remote_code:true), which runs them with all that this user may do"
    )


def brought_by(directory: Path) -> Path | None:
    """The file of a model's directory that names Python code of its own, or None."""
    for name in ("config.json", "tokenizer_config.json"):
        try:
            content = json.loads((directory / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or broken, which others will say
            continue
        if isinstance(content, dict) and content.get("auto_map"):
            return directory / name
    return None


@contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Held while code is loaded.

    Transformers copies it into a directory of the user's and imports it there. The predictor,
    preprocessing and postprocessing start together, and would read each other's half-written copies.
    """
    from transformers.utils import HF_MODULES_CACHE

    directory = Path(HF_MODULES_CACHE)
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory, waiting=lambda: None):
        yield
