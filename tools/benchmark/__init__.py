"""A load generator for every layer of the stack, and a report of what it measured.

- ``load`` plans the requests. ``measure`` starts the generators, which are processes of their own
  (``worker``) that speak one target's protocol (``drivers``, by ``driver``), and samples the processes of
  the servers meanwhile (``processes``).
- ``servers`` starts what is measured; ``turns`` puts all loads on all targets, one after another or in
  turns, and compares them.
- ``report`` makes figures of what came back, a table and CSV. ``html`` makes the page, of what ``reading``
  finds in them and of ``plots``, which ``figures`` draws.
- ``cli`` runs it all for the command line of ``options``. Two sets of measurements have promises
  (``checks``): ``suite``, which is ``make bench``, and ``engine_comparison``, on a ``random_model``.

It imports ``cog_triton`` and is never imported by it. After a change: ``pytest tests/unit/tools`` and
``tests/integration/test_benchmark.py``.
"""
