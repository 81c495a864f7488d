#!/usr/bin/env python3
r"""Fill the variables of one config.pbtxt, with the command line of NVIDIA's fill_template.py.

Examples:
  python3 scripts/fill_template.py triton_model_repo/ensemble/config.pbtxt triton_max_batch_size:64
  python3 scripts/fill_template.py -i my_repo/preprocessing/config.pbtxt \
      tokenizer_dir:/models/llama,triton_max_batch_size:64,preprocessing_instance_count:1
  python3 scripts/fill_template.py -i my_repo/tensorrt_llm/config.pbtxt \
      'triton_backend:tensorrtllm,engine_dir:/models/engine,gpu_device_ids:0\,1'

A value ends at the next comma; write \, for a comma in it and \\ for a backslash before one. The
first colon ends the variable's name, so further ones need no backslash. An empty value is none. Of
a variable given twice the last value counts. Variables that are not given have their defaults, see
docs/configuration.md. Work on a copy of triton_model_repo: the predictor fills that one into a
directory of its own at every start.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import _checkout  # noqa: F401

from cog_triton.errors import ConfigurationError, TemplateError
from cog_triton.repository.fill import fill_model, read_template
from cog_triton.repository.variables import VARIABLES


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 2 with the reason on standard error."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        filled = fill(arguments.file, parse_substitutions(arguments.substitutions))
        if arguments.in_place:
            replace(arguments.file, filled)
        else:
            sys.stdout.write(filled)
    except (ConfigurationError, OSError) as error:
        reason = error.message if isinstance(error, ConfigurationError) else error
        print(f"fill_template.py: {reason}", file=sys.stderr)
        return 2
    return 0


def fill(file: Path, substitutions: dict[str, str]) -> str:
    """The filled text of a template file.

    Raises:
        TemplateError: the file is no template, or a value is missing, unknown or not valid.
        OSError: the file cannot be read.
    """
    template = read_template(file)
    if "${" not in template:
        raise TemplateError(f"{file}: no ${{…}} in it, it was filled already")
    return fill_model(_model_of(template, file), template, substitutions)


def parse_substitutions(arguments: list[str]) -> dict[str, str]:
    r"""The values in ``name:value,name:value``, an argument or several.

    Several, because a line continued with a backslash and an indent reaches us as several.

    Raises:
        ConfigurationError: for a part without a colon.
    """
    values = {}
    lines = (_join_lines(argument) for argument in arguments)
    for part in (part for line in lines for part in _split(line, ",")):
        if not part.strip():
            continue
        name, *value = _split(part, ":", 1)
        if not value:
            raise ConfigurationError(f"expected name:value, got {part.strip()!r}")
        values[name.strip()] = _unescape(value[0].strip())
    return values


def replace(file: Path, text: str) -> None:
    """Writes a file in one step: whoever reads it sees the old or the new text.

    Raises:
        OSError: the directory cannot be written to.
    """
    file = file.resolve()
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as temporary:
            temporary.write(text)
        shutil.copymode(file, name)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _model_of(template: str, path: Path) -> str:
    """Return the model that a template belongs to: its ``name``, else the directory that it is in."""
    candidates: list[str] = re.findall(r'^name\s*:\s*"([^"]*)"', template, re.MULTILINE)[:1]
    candidates.append(path.resolve().parent.name)
    for candidate in candidates:
        if candidate in VARIABLES:
            return candidate
    raise TemplateError(
        f"{path}: no model is called {' or '.join(candidates)}; known are {', '.join(sorted(VARIABLES))}"
    )


def _split(text: str, separator: str, most: int = 0) -> list[str]:
    """The text split at the separators that have no backslash before them."""
    parts: list[str] = []
    start = 0
    for match in re.finditer(r"\\.|" + separator, text, re.DOTALL):
        if match.group() == separator and not (most and len(parts) == most):
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _join_lines(text: str) -> str:
    """The text without the continuations that a shell leaves inside of single quotes."""
    return re.sub(r"(\\[^\n])|\\\n", lambda match: match[1] or "", text)


def _unescape(text: str) -> str:
    return re.sub(r"\\([,:\\])", r"\1", text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-i",
        "--in-place",
        "--in_place",
        action="store_true",
        help="write the file; without it the result is printed",
    )
    parser.add_argument("file", type=Path, help="a config.pbtxt with variables in it")
    parser.add_argument("substitutions", nargs="+", metavar="name:value,…", help="the values")
    return parser


if __name__ == "__main__":
    sys.exit(main())
