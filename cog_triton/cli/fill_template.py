"""The variables of one config.pbtxt, by the command line of NVIDIA's fill_template.py."""

import argparse
import logging
import re
import sys
from pathlib import Path

from cog_triton.errors import ConfigurationError, TemplateError
from cog_triton.processes import write_whole
from cog_triton.repository.fill import fill_model, read_template
from cog_triton.repository.variables import VARIABLES


def fill_template(options: argparse.Namespace) -> None:
    """Fill a template, and print it or write it to its file."""
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    values = parse_substitutions(options.substitutions)
    template = read_template(options.file)
    if "${" not in template:
        raise TemplateError(f"{options.file}: no ${{…}} in it, it was filled already")
    filled = fill_model(model_of(template, options.file), template, values)
    if options.in_place:
        write_whole(options.file.resolve(), filled)
    else:
        sys.stdout.write(filled)


def parse_substitutions(arguments: list[str]) -> dict[str, str]:
    r"""Return the values in ``name:value,name:value``, or raise ConfigurationError.

    A line that is continued with a backslash and an indent comes here as several arguments.
    """
    values = {}
    for argument in arguments:
        # The continuations that a shell leaves inside of single quotes go first.
        text = re.sub(r"(\\[^\n])|\\\n", lambda match: match[1] or "", argument)
        for part in re.findall(r"(?:\\.|[^,])+", text, re.DOTALL):
            if not part.strip():
                continue
            if not (found := re.fullmatch(r"((?:\\.|[^:\\])*):(.*)", part, re.DOTALL)):
                raise ConfigurationError(f"expected name:value, got {part.strip()!r}")
            values[found[1].strip()] = re.sub(r"\\([,:\\])", r"\1", found[2].strip())
    return values


def model_of(template: str, path: Path) -> str:
    """Return the model that a template belongs to: its ``name``, else the directory that it is in."""
    candidates = re.findall(r'^name\s*:\s*"([^"]*)"', template, re.MULTILINE)[:1]
    candidates.append(path.resolve().parent.name)
    if found := [name for name in candidates if name in VARIABLES]:
        return str(found[0])
    known, names = ", ".join(sorted(VARIABLES)), " or ".join(candidates)
    raise TemplateError(f"{path}: no model is called {names}; known are {known}")
