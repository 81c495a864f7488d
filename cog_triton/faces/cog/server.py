"""Cog's HTTP server with what it lacks: ``python -m cog_triton.faces.cog.server``.

Takes the options of ``python -m cog.server.http``. Where Cog writes the command, as in an image, a line in
a .pth file calls ``prepare`` in the same process.
"""

from __future__ import annotations

import os
import resource
import runpy

from cog_triton.faces.cog import no_delay, worker

COG = "cog.server.http"
OPEN_FILES = 16_384


def main() -> None:
    """Runs Cog's server in this process."""
    prepare()
    runpy.run_module(COG, run_name="__main__", alter_sys=True)


def prepare() -> None:
    """To be called in the process that Cog's server is about to run in."""
    _allow_open_files()
    port = int(os.environ.get("PORT", "5000"))
    no_delay.send_at_once(port)
    worker.end_with_worker(port)


def _allow_open_files() -> None:
    """Lets this process and its children open enough files, as far as the system allows it.

    The usual limit is 1,024, and Cog's server takes a descriptor for each slot, used or not, beside those
    of its connections: 512 of each reach it.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


if __name__ == "__main__":
    main()
