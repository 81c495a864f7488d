"""Cog's server with what it lacks: the front on the public port, and Replicate's HTTP API.

In the process of Cog's server:

    server.py             the start: the front on a thread, Cog's server behind it
    front.py              the application on the public port
    passage.py            checks of requests before Cog's server gets them
    cog_server.py         a request to Cog's server, and its reply
    answer.py             a reply, with the predictor's texts merged into it
    predictions.py        the predictions that run
    prediction_files.py   their directories, in a ``private_directory.py``
    inner_port.py         the port of Cog's server, which only the front reaches
    health.py             /health/live and /health/ready
    lifetime.py           the end: of the worker, of running predictions
    replicate/            Replicate's API

In the predictor's process: ``live_stream.py``. Between both: ``messages.py``.

Imports web, server, settings and errors. After a change: pytest tests/unit/api
tests/integration/test_front.py test_cog_server.py test_replicate.py
"""
