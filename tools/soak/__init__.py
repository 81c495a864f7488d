"""A soak: a real server under load for minutes or hours, parts of it killed, and every answer checked.

``run.py`` goes through the phases of ``plan.py``. In each, a worker (``worker.py``) starts a server as a
deployment does and puts streams on its faces (``faces.py``, ``streams.py``), while the process that started
the worker samples what belongs to it (``watch.py``) and, with chaos, kills parts of it (``chaos.py``).
``judge.py`` says whether what is promised was kept. May import tools.benchmark and all of cog_triton. After
a change run ``tests/unit/tools/test_soak.py`` and ``tests/integration/test_soak.py``.
"""
