"""A load generator for every layer of the stack, and a report of what it measured.

- ``load`` plans the requests; a ``generator`` is a process that sends them to one of the ``targets``.
- ``servers`` starts what is measured; ``measure`` puts all loads on all targets, one after another or in
  turns, compares them, and reads the ``processes`` of the servers meanwhile.
- ``report`` makes figures, tables and promises of it, and ``page`` the HTML page.
- ``cli`` runs it for a command line. Two sets of measurements have promises: ``suite``, which is ``make
  bench``, and ``engines``, an embedded engine beside its library.

It imports ``cog_triton`` and is never imported by it. After a change: ``pytest tests/unit/tools`` and
``tests/integration/test_benchmark.py``.
"""
