"""tritonserver as a process: find it, its command line, its guard, its ranks, its log.

    tritonserver.py   TritonServer: start, stop, health
    command.py        the command line of a server and of ranks under mpirun; ports
    installation.py   the server and its backends on this machine; its environment, without secrets
    devices.py        the GPUs of this machine, and the build of PyTorch
    guard.py          a separate program: runs a server, ends it with its starter, and clears up
    log.py            levels, ranks, and the reason of an end

May import ``settings``, ``errors`` and ``protocol``. After a change: pytest tests/unit/server
tests/integration/test_process.py tests/integration/test_ranks.py
"""
