"""HTTP of every port that this project opens: the limits of requests, and uvicorn behind them.

Imports nothing else of the package. After a change: pytest tests/unit/web tests/integration/test_limits.py
"""
