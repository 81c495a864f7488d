"""Tool calls: found in a model's text while it streams, and enforced by a guide.

Knows no I/O. After a change: pytest tests/unit/faces/openai/test_tools.py
"""
