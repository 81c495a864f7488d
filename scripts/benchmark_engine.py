#!/usr/bin/env python3
"""Compare an embedded engine with its library: ``cog-triton bench-engine`` of a checkout.

    python scripts/benchmark_engine.py --threads 1
    echo "load_format: dummy" > dummy.yaml
    python scripts/benchmark_engine.py --engine vllm --vllm-config dummy.yaml --shape 8b \\
        --dtype bfloat16 --device cuda --streams 1 16 64 256 --output-tokens 128
    python scripts/benchmark_engine.py --engine vllm --contestants openai vllm-serve \\
        --vllm-config dummy.yaml --shape 8b --dtype bfloat16 --device cuda --streams 64 256

The last line is the report as JSON, which is also written to artifacts/engine/.
"""

import sys

import _checkout  # noqa: F401

from tools.benchmark.engines import main

if __name__ == "__main__":
    sys.exit(main())
