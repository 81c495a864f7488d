"""Code of the models in Triton's stubs, called by the thin models of triton_model_repo/.

Tensors to plain values, one call, plain values to tensors. May import ``engines``, ``text``
and ``wire``.
After a change: pytest tests/unit/models tests/integration/test_ensemble.py and test_outputs.py
"""
