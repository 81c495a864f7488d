#!/usr/bin/env python3
"""Add LoRA adapters to LORA_DIR, list and remove them, also while a server runs.

Examples:
  python3 scripts/adapter.py add sql org/llama-sql-lora
  python3 scripts/adapter.py add sql https://example.com/sql.tar
  python3 scripts/adapter.py add sql ./my-adapter
  python3 scripts/adapter.py list
  python3 scripts/adapter.py remove sql

A server that has LORA_DIR finds an adapter with the next request that names it. A source is what
COG_WEIGHTS may be: a directory, a tar file, its URL, or a Hugging Face id with a revision or without.
HF_TOKEN and WEIGHTS_CACHE are as in docs/configuration.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import _checkout  # noqa: F401

from cog_triton.adapters.directory import adapter_names, place_adapter, remove_adapter
from cog_triton.deployment.preparation import fetched
from cog_triton.errors import ConfigurationError
from cog_triton.settings import Settings, read_settings


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 with one line that says what is wrong."""
    arguments = parser().parse_args(argv)
    try:
        settings = read_settings(os.environ)
        run(arguments, settings, directory_of(arguments, settings))
    except (ConfigurationError, OSError) as error:
        print(f"adapter {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lora-dir", type=Path, help="directory of adapters (default: LORA_DIR)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="add|list|remove")
    add = commands.add_parser(
        "add", help="copy an adapter to LORA_DIR, in place of one of its name"
    )
    add.add_argument("name")
    add.add_argument("source", help="directory, tar file, URL or Hugging Face id")
    commands.add_parser("list", help="print the names of the adapters")
    commands.add_parser("remove", help="delete an adapter").add_argument("name")
    return parser


def directory_of(arguments: argparse.Namespace, settings: Settings) -> Path:
    """The directory of adapters.

    Raises:
        ConfigurationError: nothing names one.
    """
    directory: Path | None = arguments.lora_dir or settings.lora_dir
    if directory is None:
        raise ConfigurationError("set LORA_DIR, or give --lora-dir")
    return directory


def run(arguments: argparse.Namespace, settings: Settings, directory: Path) -> None:
    """Does what was asked for.

    Raises:
        ConfigurationError, OSError: it cannot be done.
    """
    if arguments.command == "add":
        place_adapter(arguments.name, fetched(settings, arguments.source), directory)
    elif arguments.command == "remove":
        remove_adapter(arguments.name, directory)
    else:
        for name in adapter_names(directory):
            print(name)


if __name__ == "__main__":
    sys.exit(main())
