"""The log of the commands that serve in this process, in the form that ``cog-triton serve`` has."""

import logging
import os
import sys


def set_up_log() -> None:
    """Write short lines to a terminal, and objects of JSON where LOG_FORMAT=json.

    Elsewhere, keep Python's format with levels and names, which programs may already read.
    """
    from cog_triton.settings import read_settings
    from cog_triton.terminal.serving import Report

    settings = read_settings()
    as_json = settings.log_format == "json"
    if not as_json and not sys.stderr.isatty():
        return
    report = Report(sys.stderr, os.environ, machine=as_json)
    level = settings.log_level.upper()
    report.setLevel(level)
    logging.basicConfig(level=level, handlers=[report])
