"""Compare an engine with Hugging Face's ``generate()`` on the same model and the same texts.

    texts.py     texts with their references, cut to prompts
    sides.py     prompts completed greedily: by the engine, wherever it runs, and by Hugging Face here
    compare.py   the figures of both sides, and whether they are good enough

Nothing that serves imports this. It needs the extra ``eval``. After a change:
``pytest tests/unit/tools/test_accuracy.py tests/integration/test_accuracy.py``.
"""
