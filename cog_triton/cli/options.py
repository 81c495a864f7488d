"""Options that several commands have, and the types of options."""

import argparse
import os
from collections.abc import Mapping

Variables = Mapping[str, str | None]


def environment_default(variable: str, default: str) -> str:
    """Return the value of an environment variable that is no setting of a deployment, such as HOST."""
    return os.environ.get(variable) or default


def positive_integer(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def port_number(text: str) -> int:
    """Return a port; 0 lets the system choose a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def add_host(parser: argparse.ArgumentParser, *, short: str | None = None) -> None:
    flags = ["--host"] if short is None else [short, "--host"]
    parser.add_argument(
        *flags,
        default=environment_default("HOST", "127.0.0.1"),
        help="address to listen on; default: $HOST, or 127.0.0.1",
    )


def add_port(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "-p", "--port", type=port_number, help=f"port to listen on; default: $PORT, or {default}"
    )


def port_of(option: int | None, default: int) -> int:
    """Return the port of --port, else that of PORT, else the default, or raise ConfigurationError."""
    if option is not None:
        return option
    text = environment_default("PORT", str(default))
    try:
        return port_number(text)
    except argparse.ArgumentTypeError:
        from cog_triton.errors import ConfigurationError

        raise ConfigurationError(f"PORT={text} is not a port from 0 to 65535") from None


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="directory, tar file, URL, GGUF file or Hugging Face id; default: $MODEL",
    )


def add_served_model_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model in OpenAI's API; may be repeated; default: $SERVED_MODEL_NAME",
    )


def add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="log everything (like LOG_LEVEL=debug)"
    )


def model_variables(model: str | None) -> Variables:
    """Return the settings of a command's --model."""
    if model is None:
        return {}
    # COG_WEIGHTS would go before the model that the command line names.
    return {"MODEL": model, "COG_WEIGHTS": ""}


def served_model_variables(names: list[str] | None) -> Variables:
    return {"SERVED_MODEL_NAME": None if names is None else ",".join(names)}


def verbose_variables(verbose: bool) -> Variables:
    return {"LOG_LEVEL": "debug" if verbose else None}


def set_variables(variables: Variables) -> None:
    """Set variables of this process, which those that it starts inherit.

    None leaves a variable as it is, and an empty text unsets it.
    """
    for name, value in variables.items():
        if value is None:
            continue
        if value == "":
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def check_device() -> None:
    """Raise ConfigurationError at once if DEVICE cannot be used here: a start would take long to notice."""
    from cog_triton.errors import ConfigurationError
    from cog_triton.server.devices import early_problem
    from cog_triton.settings import read_settings

    problem = early_problem(read_settings())
    if problem is not None:
        raise ConfigurationError(problem)
