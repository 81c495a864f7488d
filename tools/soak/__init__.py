"""A soak: real servers under load, parts of them killed, and every answer compared.

``run.py`` starts the servers one after another; ``load.py`` keeps streams on one; ``watch.py`` samples its
processes, kills parts and finds what is left; ``report.py`` judges. The ways to ask are the benchmark's.
After a change run ``tests/unit/tools/test_soak.py`` and ``tests/integration/test_soak.py``.
"""
