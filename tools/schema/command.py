"""``cog-triton make-schema``: the schema of a streaming predictor and a training."""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

DESCRIPTION = """
Without this file, Cog's server answers requests for a stream with 406 and checks no inputs. `cog build`
writes it into the image; `cog-triton serve` writes it to the current directory.
"""


class Options(argparse.Namespace):
    output: Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(".cog", "openapi_schema.json"),
        help="default: %(default)s",
    )


def run(options: Options) -> None:
    """Write the schema, in the skeleton of openapi.yaml."""
    import yaml
    from cog._inspector import create_predictor

    from cog_triton.processes import write_whole

    skeleton = yaml.safe_load(Path(__file__).with_name("openapi.yaml").read_text(encoding="utf-8"))
    schemas = skeleton.pop("schemas")
    # Cog's server reads those of the training instead when it trains.
    for prefix, source in (("", ("predict", "Predictor")), ("Training", ("train", "train"))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # predict() is the name we keep
            info = create_predictor(*source)
        fields = sorted(info.inputs.values(), key=lambda field: field.order)
        inputs = {field.name: property_of(field) for field in fields}
        schemas[f"{prefix}Input"] = {
            "title": f"{prefix}Input",
            "type": "object",
            "properties": inputs,
            "required": [n for n, p in inputs.items() if not {"default", "nullable"} & p.keys()],
        }
        schemas[f"{prefix}Output"] = {**info.output.json_type(), "title": f"{prefix}Output"}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    schema = {**skeleton, "components": {"schemas": schemas}}
    write_whole(options.output, json.dumps(schema, indent=2) + "\n")


def property_of(field: Any) -> dict[str, Any]:
    limits = {"minimum": field.ge, "maximum": field.le}
    if field.type.primitive.name == "INTEGER":
        # Cog makes a float of a limit, which rounds the largest integer of its server up.
        limits = {k: None if v is None else min(int(v), 2**64 - 1) for k, v in limits.items()}
    given = {
        **field.type.json_type(),
        **limits,
        "title": field.name.replace("_", " ").title(),
        "x-order": field.order,
        "description": field.description or None,
        "default": field.default,
        "nullable": str(field.type.repetition.name).startswith("OPTIONAL") or None,
    }
    return {name: value for name, value in given.items() if value is not None}
