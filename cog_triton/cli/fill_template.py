"""``cog-triton fill-template``: the variables of one config.pbtxt, by NVIDIA's command line."""

import argparse
import logging
import re
import sys
from pathlib import Path

from cog_triton.errors import ConfigurationError, TemplateError

DESCRIPTION = r"""
It has the command line of NVIDIA's fill_template.py.

    cog-triton fill-template triton_model_repo/ensemble/config.pbtxt triton_max_batch_size:64
    cog-triton fill-template -i my_repo/preprocessing/config.pbtxt \
        tokenizer_dir:/models/llama,triton_max_batch_size:64,preprocessing_instance_count:1
    cog-triton fill-template -i my_repo/tensorrt_llm/config.pbtxt \
        'triton_backend:tensorrtllm,engine_dir:/models/engine,gpu_device_ids:0\,1'

A comma ends a value; write \, for a literal comma and \\ for a backslash before a comma. The first
colon ends the variable's name; later colons need no escape. An empty value unsets the variable. If a
variable appears twice, the last value wins. Variables that you leave out get the defaults listed in
triton_model_repo/README.md. Work on a copy of triton_model_repo: the predictor fills these templates
into a separate directory at every start.
"""


class Options(argparse.Namespace):
    file: Path
    substitutions: list[str]
    in_place: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i",
        "--in-place",
        "--in_place",
        action="store_true",
        help="change the file instead of printing the result",
    )
    parser.add_argument("file", type=Path, help="config.pbtxt that contains variables")
    parser.add_argument(
        "substitutions", nargs="+", metavar="name:value,…", help="values of the variables"
    )


def run(options: Options) -> None:
    """Fill a template, and print it or write it to its file."""
    from cog_triton.processes import write_whole
    from cog_triton.repository.fill import fill_model, read_template

    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    values = parse_substitutions(options.substitutions)
    template = read_template(options.file)
    if "${" not in template:
        raise TemplateError(f"{options.file}: contains no ${{…}} variables; it was filled already")
    filled = fill_model(model_of(template, options.file), template, values)
    if options.in_place:
        write_whole(options.file.resolve(), filled)
    else:
        sys.stdout.write(filled)


def parse_substitutions(arguments: list[str]) -> dict[str, str]:
    r"""Return the values in ``name:value,name:value``, or raise ConfigurationError.

    A shell passes a line that is continued with a backslash and an indent as several arguments.
    """
    values = {}
    for argument in arguments:
        # Inside single quotes, a shell keeps a backslash with its line break: both are removed here.
        text = re.sub(r"(\\[^\n])|\\\n", lambda match: match[1] or "", argument)
        for part in re.findall(r"(?:\\.|[^,])+", text, re.DOTALL):
            if not part.strip():
                continue
            found = re.fullmatch(r"((?:\\.|[^:\\])*):(.*)", part, re.DOTALL)
            if found is None:
                raise ConfigurationError(f"expected name:value, got {part.strip()!r}")
            values[found[1].strip()] = re.sub(r"\\([,:\\])", r"\1", found[2].strip())
    return values


def model_of(template: str, path: Path) -> str:
    """Return the model that a template belongs to: its ``name``, else the directory that it is in."""
    from cog_triton.repository.variables import VARIABLES

    candidates = re.findall(r'^name\s*:\s*"([^"]*)"', template, re.MULTILINE)[:1]
    candidates.append(path.resolve().parent.name)
    for name in candidates:
        if name in VARIABLES:
            return str(name)
    names = " or ".join(candidates)
    known = ", ".join(sorted(VARIABLES))
    raise TemplateError(f"{path}: unknown model {names}; the known models are {known}")
