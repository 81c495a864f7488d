#!/usr/bin/env python3
"""Compares an engine with Hugging Face's generate(), as the guides' summarize.py does: ROUGE, token ids,
log probabilities, speed. See docs/accuracy.md.

    python scripts/summarize.py --hf_model_dir cog_triton/demo --eval_task question_answering \\
        --dataset_dir examples/summarize/demo.jsonl --batch_size 8 --check_accuracy
    python scripts/summarize.py --engine_dir ./phi-engine --hf_model_dir ./Phi-3-mini-4k-instruct \\
        --batch_size 1 --test_trt_llm --test_hf --data_type fp16 --check_accuracy \\
        --tensorrt_llm_rouge1_threshold=20

The exit status is 0, 1 when the engine is not accurate enough, and 2 when nothing could be compared.
The last line on standard output is the report as JSON, unless --json names a file for it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

import _checkout  # noqa: F401


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from tools.accuracy.cli import parse

    options = parse(argv)
    from cog_triton.errors import CogTritonError
    from tools.accuracy.data import DataError
    from tools.accuracy.run import compare

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        report = compare(options, os.environ)
    except (DataError, CogTritonError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(report.table())
    text = json.dumps(report.as_json())
    if options.json_file is None:
        print(text)
    else:
        options.json_file.write_text(text + "\n", encoding="utf-8")
    failures = report.failures()
    for failure in failures:
        print(f"not accurate enough: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
