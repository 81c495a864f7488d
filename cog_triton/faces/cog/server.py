"""Cog's HTTP server with what it lacks: ``python -m cog_triton.faces.cog.server``.

Takes the options of ``python -m cog.server.http``. Where Cog writes the command, as in an image, a line in
a .pth file calls ``prepare`` in the same process.
"""

from __future__ import annotations

import os
import runpy

from cog_triton.faces.cog import no_delay, worker

COG = "cog.server.http"


def main() -> None:
    """Runs Cog's server in this process."""
    prepare()
    runpy.run_module(COG, run_name="__main__", alter_sys=True)


def prepare() -> None:
    """To be called in the process that Cog's server is about to run in."""
    port = int(os.environ.get("PORT", "5000"))
    no_delay.send_at_once(port)
    worker.end_with_worker(port)


if __name__ == "__main__":
    main()
