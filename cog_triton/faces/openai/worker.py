"""One of several processes that serve: ``python -m cog_triton.faces.openai.worker``; see ``processes``."""

from __future__ import annotations

import sys

from cog_triton.faces.openai.processes import run_worker

if __name__ == "__main__":
    run_worker(sys.argv[1])
