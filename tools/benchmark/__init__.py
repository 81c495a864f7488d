"""A load generator for every layer of the stack, and a report of what it measured.

- ``targets`` are the ways to ask; ``load`` plans the requests; ``measuring`` puts all loads on all targets
  in turns, from processes of their own, and reads the ``processes`` of the ``servers`` meanwhile.
- ``report`` turns results into tables, goals, JSON and the HTML page.
- ``bench`` and ``engines`` are the commands, each with its goals: of the stack, which is ``make bench``,
  and of an embedded engine beside its library.
- ``grpc_clients`` compares this package's gRPC client with grpc.aio, by hand; ``malformed`` measures what a
  client of OpenAI's API notices of malformed requests and uploads by others.

It imports ``cog_triton`` and is never imported by it. After a change: ``pytest tests/unit/tools`` and
``tests/integration/test_benchmark.py``.
"""
