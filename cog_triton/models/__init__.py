"""The models in Triton's Python stubs, one a file; those in triton_model_repo/ import them.

May import ``engines``, ``client``, ``text`` and ``request``. After a change: pytest tests/unit/models
tests/integration/test_ensemble.py and test_outputs.py
"""
