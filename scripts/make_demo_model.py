#!/usr/bin/env python3
"""Train the demo model anew, in place of the one that ships in cog_triton/demo.

It takes a minute or two on one core of this machine's CPU. Nothing is downloaded.

Examples:
    Train the one that ships, after a change of its corpus:

        python scripts/make_demo_model.py

    Train one somewhere else, and use it:

        python scripts/make_demo_model.py --output /tmp/demo
        python - <<'END'
        from transformers import pipeline
        ask = pipeline("text-generation", "/tmp/demo", return_full_text=False)
        print(ask("What is machine learning?")[0]["generated_text"])
        END
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from _checkout import ROOT

from tools.demo_model import DIRECTORY, DemoModelError, make_demo_model

# Every x86-64 processor has these kernels, so that machines differ as little as they can.
KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=DIRECTORY,
        help=f"directory of the model (default: {DIRECTORY.relative_to(ROOT)} of this repository)",
    )
    options = parser.parse_args(arguments)
    os.environ.update({name: os.environ.get(name, value) for name, value in KERNELS.items()})
    try:
        make_demo_model(options.output)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except ModuleNotFoundError as error:
        return _fail(f"Python package {error.name} is not installed", 1)
    except (DemoModelError, OSError) as error:
        return _fail(str(error), 1)
    print(f"{options.output}: the demo model is ready")
    return 0


def _fail(reason: str, status: int) -> int:
    print(f"No demo model was made: {reason}.", file=sys.stderr)
    return status


if __name__ == "__main__":
    # An exception lets the training remove its temporary directory; the default action would not.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
