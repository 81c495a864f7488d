"""One stream interface to a running Triton, and its two transports.

May import ``errors``, and ``wire`` for the names of what it asks. ``token_ids`` is past the ensemble.
After a change: pytest tests/unit/client tests/integration/test_generation.py
"""
