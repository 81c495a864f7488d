#!/usr/bin/env python3
"""Compare an engine with Hugging Face's generate(), as the guides' summarize.py does: ROUGE, token ids,
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
    """Run the command; return its exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from cog_triton.errors import CogTritonError
    from tools.accuracy import compare, texts

    options = compare.parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        report = compare.compare(options, os.environ)
    except (texts.DataError, CogTritonError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(compare.table(report))
    if options.json is None:
        print(json.dumps(report))
    else:
        options.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
    for failure in report["failures"]:
        print(f"not accurate enough: {failure}", file=sys.stderr)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
