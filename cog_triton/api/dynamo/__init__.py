"""NVIDIA Dynamo: a deployment as one of its workers, token ids in and token ids out.

    worker.py    the engine that Dynamo drives: start, answers, errors, the end; what it tells the others
    convert.py   Dynamo's request to a ``Request``, a ``Chunk`` to Dynamo's
    scale.py     a frontend and workers on one machine

Imports deployment, generation and terminal. Nothing else in the package knows Dynamo.
After a change: pytest tests/unit/api/test_dynamo.py, and make test-dynamo
"""
