"""What every HTTP port of this project has in common: limits on requests, before anything accumulates.

limits.py has no I/O; server.py runs an ASGI application behind it. Imports nothing else of the package.
After a change: pytest tests/unit/web tests/unit/faces/test_front.py tests/integration/test_limits.py
"""
