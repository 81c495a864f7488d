"""One stream interface to a running Triton, and its two transports.

May import ``errors``, ``repository.derived`` for the names of what it asks, and ``models.tensors``.
After a change: pytest tests/unit/client tests/integration/test_generation.py
"""
