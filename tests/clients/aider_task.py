"""aider, whose command this runs with no connection outside this machine."""

import sys

import common
from aider.main import main

status = main(sys.argv[1:])
print(f"outside: {common.outside}")
sys.exit(status)
