"""``cog-triton adapter``: LoRA adapters in LORA_DIR, also while a server runs."""

import argparse

from cog_triton.cli.options import Variables
from cog_triton.errors import ConfigurationError

DESCRIPTION = """
    cog-triton adapter add sql org/llama-sql-lora
    cog-triton adapter add sql https://example.com/sql.tar
    cog-triton adapter add sql ./my-adapter
    cog-triton adapter list
    cog-triton adapter remove sql

A running server with the same LORA_DIR loads an adapter when the first request names it; no restart is
needed. `add` replaces an adapter of the same name. SOURCE is a directory, a tar file, the URL of a tar
file, or a Hugging Face id, optionally with a revision. HF_TOKEN and WEIGHTS_CACHE apply.
"""


class Options(argparse.Namespace):
    action: str
    name: str | None
    source: str | None
    lora_dir: str | None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=["add", "list", "remove"], help="add NAME SOURCE, list, or remove NAME"
    )
    parser.add_argument("name", nargs="?", help="name of the adapter")
    parser.add_argument(
        "source", nargs="?", help="directory, tar file, URL or Hugging Face id of the adapter"
    )
    parser.add_argument("--lora-dir", help="directory of the adapters; default: $LORA_DIR")


def variables(options: Options) -> Variables:
    return {"LORA_DIR": options.lora_dir}


def run(options: Options) -> None:
    from cog_triton.adapters.directory import adapter_names, place_adapter, remove_adapter
    from cog_triton.deployment.model_files import fetched
    from cog_triton.settings import read_settings

    settings = read_settings()
    if settings.lora_dir is None:
        raise ConfigurationError("no directory of adapters: set LORA_DIR or pass --lora-dir")
    match options.action, options.name, options.source:
        case "add", str(name), str(source):
            place_adapter(name, fetched(settings, source), settings.lora_dir)
        case "remove", str(name), None:
            remove_adapter(name, settings.lora_dir)
        case "list", None, None:
            for name in adapter_names(settings.lora_dir):
                print(name)
        case _:
            raise ConfigurationError("usage: adapter add NAME SOURCE | list | remove NAME")
