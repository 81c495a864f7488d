"""The tar that is served from: the engine, its tokenizer, and how they were made.

::

    build.yaml      the configuration, versions and times
    build.log       the steps' output
    engine/         rank0.engine …, config.json              ENGINE_DIR
    tokenizer/      tokenizer.json, tokenizer_config.json …  TOKENIZER

The tokenizer has a directory of its own because both have a config.json: the engine's, and the model's,
without which transformers does not know some tokenizers' class.
"""

from __future__ import annotations

import os
import secrets
import tarfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from cog_triton.errors import ConfigurationError

VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model*", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt", "tekken.json", "*.tiktoken"),
)
"""One of these is in every tokenizer."""
TOKENIZER_FILES = (
    *VOCABULARIES,
    *("added_tokens.json", "additional_chat_templates/*.jinja", "chat_template.jinja"),
    *("chat_template.json", "config.json", "generation_config.json", "merges.txt"),
    *("special_tokens_map.json", "tokenization_*.py", "tokenizer_config.json"),
)
Member = tuple[str, Path]
"""A name in the tar, and the file."""


def tokenizer_files(directory: Path) -> list[Member]:
    """Return the files of a model's directory that its tokenizer is made of.

    Raises:
        ConfigurationError: there is no tokenizer in it.
    """
    names = [
        str(file.relative_to(directory))
        for pattern in ("*", "additional_chat_templates/*")
        for file in sorted(directory.glob(pattern))
        if file.is_file()
    ]
    if not any(fnmatchcase(name, pattern) for name in names for pattern in VOCABULARIES):
        raise ConfigurationError(
            f"{directory} has no tokenizer (none of {', '.join(VOCABULARIES)}): name one with "
            "tokenizer in the build configuration"
        )
    kept = [n for n in names if any(fnmatchcase(n, pattern) for pattern in TOKENIZER_FILES)]
    return [(f"tokenizer/{name}", directory / name) for name in kept]


def write_tar(output: Path, members: Iterable[Member]) -> None:
    """Write the tar; ``output`` is complete, or what it was.

    Raises:
        OSError: a file cannot be read, or the tar not be written.
    """
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        # The target of a symbolic link is packed: Hugging Face's cache is made of links.
        with temporary.open("xb") as file:
            with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
                for name, path in members:
                    tar.add(path, name, recursive=False, filter=_anonymous)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(output)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out the builder's account, which means nothing on another machine."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    member.mtime = int(member.mtime)  # a fraction takes a header of its own
    return member
