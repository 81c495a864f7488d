"""Compares an engine with Hugging Face's ``generate()`` on the same model and the same texts.

One comparison: ``data`` reads texts with their references, ``prompts`` makes prompts of them, ``engine``
has them completed by the engine that is under test, wherever it runs, and ``reference`` by Hugging Face
in this process. ``metrics`` makes figures of both, ``report`` shows them and says whether they are good
enough; ``cli`` is the command line and ``run`` the order of it all.

Nothing that serves imports this. It needs the extra ``eval``. After a change:
``pytest tests/unit/tools/test_accuracy.py tests/integration/test_accuracy.py``.
"""
