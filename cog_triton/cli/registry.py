"""The commands of cog-triton: a name, a line of help, and the module that has the options and the code."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cog_triton import ROOT


class CommandModule(Protocol):
    """What the module of a command defines.

    A module may also define ``variables(options)``, which returns the environment variables that its
    options set.
    """

    DESCRIPTION: str

    class Options(argparse.Namespace):
        """The parsed options, with their types."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def run(self, options: Any) -> int | None:
        """Do the work and return the exit status; None is 0."""


@dataclass(frozen=True)
class Command:
    """A command by its name. Its module is imported when the command is called, and no earlier."""

    name: str
    module: str
    summary: str
    failure_status: int = 1  # of an error of configuration

    def load(self) -> CommandModule:
        module: Any = importlib.import_module(self.module)
        return module  # type: ignore[no-any-return]

    def variables(self, options: argparse.Namespace) -> Mapping[str, str | None]:
        """Return the environment variables that the options set; None leaves one as it is."""
        function = getattr(self.load(), "variables", None)
        found: Mapping[str, str | None] = {} if function is None else function(options)
        return found


PACKAGE = (
    Command(
        name="predict",
        module="cog_triton.cli.predict",
        summary="Answer one prompt in the terminal, and stop",
    ),
    Command(
        name="serve",
        module="cog_triton.cli.serve",
        summary="Serve Cog's and Replicate's APIs",
    ),
    Command(
        name="openai",
        module="cog_triton.cli.openai",
        summary="Serve OpenAI's and Anthropic's APIs and a chat page",
    ),
    Command(
        name="batch",
        module="cog_triton.cli.batch",
        summary="Answer a file of requests, one JSON object per line",
    ),
    Command(
        name="worker",
        module="cog_triton.cli.worker",
        summary="Serve the model as an NVIDIA Dynamo worker",
    ),
    Command(
        name="scale",
        module="cog_triton.cli.scale",
        summary="Run NVIDIA Dynamo's frontend and workers on this machine",
    ),
    Command(
        name="adapter",
        module="cog_triton.cli.adapter",
        summary="Add, list and remove LoRA adapters, even while a server runs",
    ),
    Command(
        name="fill-template",
        module="cog_triton.cli.fill_template",
        summary="Fill in the variables of a Triton model's config.pbtxt",
        failure_status=2,
    ),
    Command(
        name="launch",
        module="cog_triton.cli.launch",
        summary="Run tritonserver on a filled model repository",
        failure_status=2,
    ),
    Command(
        name="doctor",
        module="cog_triton.cli.doctor",
        summary="Report what this machine has for serving a model, and how to add what is missing",
    ),
    Command(
        name="completion",
        module="cog_triton.cli.completion",
        summary="Print a shell script that completes commands and options",
    ),
)


def checkout_commands() -> tuple[Command, ...]:
    """Return the commands of a checkout's tools, which a wheel lacks."""
    if not (ROOT / "tools" / "commands.py").is_file():
        return ()
    import_from_root()
    found: tuple[Command, ...] = importlib.import_module("tools.commands").COMMANDS
    return found


def import_from_root() -> None:
    """Let ``predict.py``, and in a checkout ``tools``, be imported from any directory."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))


def load_commands() -> dict[str, Command]:
    """Return each command by its name."""
    import_from_root()
    return {command.name: command for command in (*PACKAGE, *checkout_commands())}
