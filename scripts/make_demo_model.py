#!/usr/bin/env python3
"""Make the demo model, or do nothing if it is there and up to date.

The model is trained on this machine's CPU, in about half a minute. Nothing is downloaded.

Examples:
    Make it in models/demo of this repository:

        python scripts/make_demo_model.py

    Make it anew, somewhere else:

        python scripts/make_demo_model.py --output /tmp/demo --force

    Use it:

        python - <<'END'
        from transformers import pipeline
        ask = pipeline("text-generation", "models/demo", return_full_text=False)
        print(ask("What is machine learning?")[0]["generated_text"])
        END
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from _checkout import ROOT

from tools.demo_model import DemoModelError, ensure_demo_model


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "models" / "demo",
        help="directory of the model (default: models/demo of this repository)",
    )
    parser.add_argument("--force", action="store_true", help="train even if it is up to date")
    options = parser.parse_args(arguments)
    try:
        built = ensure_demo_model(options.output, force=options.force)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except ModuleNotFoundError as error:
        return _fail(f"Python package {error.name} is not installed", 1)
    except (DemoModelError, OSError) as error:
        return _fail(str(error), 1)
    print(f"{options.output}: {'the demo model is ready' if built else 'up to date'}")
    return 0


def _fail(reason: str, status: int) -> int:
    print(f"No demo model was made: {reason}.", file=sys.stderr)
    return status


if __name__ == "__main__":
    # An exception lets the build remove its temporary directory; the default action would not.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
