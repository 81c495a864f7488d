"""The output of ``make serve`` and ``make predict`` in a terminal or a pipe, and Ctrl-C there.

May import settings, errors and server. After a change: pytest tests/unit/faces/test_terminal.py
tests/integration/test_terminal.py
"""
