#!/usr/bin/env python3
"""Writes .cog/openapi_schema.json from predict.py and train.py, as `cog build` does.

Without that file Cog's server answers requests for a stream with 406 and checks no inputs. `cog build`
writes it into an image; this is for every other way to run.

    python scripts/make_schema.py
    python scripts/make_schema.py --output /src/.cog/openapi_schema.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from _checkout import ROOT

from cog_triton.faces.cog.rules import openapi_schema


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / ".cog" / "openapi_schema.json")
    arguments = parser.parse_args(argv)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    schema = openapi_schema("predict", "Predictor", "train")
    # In one step: a second server may be starting, and reading it.
    whole = arguments.output.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(schema, indent=2) + "\n")
    whole.replace(arguments.output)


if __name__ == "__main__":
    main()
