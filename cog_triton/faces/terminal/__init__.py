"""What someone sees who starts this in a terminal, and how Ctrl-C ends it.

May import settings and server. After a change: pytest tests/unit/faces tests/integration/test_terminal.py
"""
