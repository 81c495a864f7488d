"""The lives of tritonserver: find it, its command line, its guard, its ranks, its log.

May import ``settings`` and ``errors``. After a change: pytest tests/unit/server
tests/integration/test_process.py tests/integration/test_ranks.py
"""
