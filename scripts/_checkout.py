"""Makes the packages of this checkout importable: they need not be installed where a script runs.

A script imports this before it imports any of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT))
