#!/usr/bin/env python3
"""LoRA adapters in LORA_DIR, also while a server runs."""

from __future__ import annotations

import argparse

import _checkout

from cog_triton.adapters.directory import adapter_names, place_adapter, remove_adapter
from cog_triton.deployment.preparation import fetched
from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings


def main(options: argparse.Namespace) -> None:
    settings = read_settings()
    if settings.lora_dir is None:
        raise ConfigurationError("set LORA_DIR, or give --lora-dir")
    match options.action, options.name, options.source:
        case "add", str(name), str(source):
            place_adapter(name, fetched(settings, source), settings.lora_dir)
        case "remove", str(name), None:
            remove_adapter(name, settings.lora_dir)
        case "list", None, None:
            print("".join(f"{name}\n" for name in adapter_names(settings.lora_dir)), end="")
        case _:
            raise ConfigurationError("write add NAME SOURCE, list, or remove NAME")


if __name__ == "__main__":
    _checkout.run("adapter")
