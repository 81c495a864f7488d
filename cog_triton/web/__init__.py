"""HTTP of every port that this project opens.

server.py has the limits of requests and uvicorn behind them; origin.py says which web pages may send
requests, and by which names of a host.

Imports nothing else of the package. After a change: pytest tests/unit/web tests/integration/test_limits.py
"""

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Refusal(Exception):
    """The answer to a request that is not served."""

    status: int
    detail: Any
    retry_after: int | None = None
