"""Replicate's HTTP API for the one model that runs here, as Replicate's clients use it.

    routes.py      the routes of predictions and models
    prediction.py  a prediction: read from Cog's server as a stream of events, shown in Replicate's form
    creation.py    the body of a request that begins a prediction
    files.py       uploaded files, and their routes
    kept.py        what is kept for a while: bounded by number and by size
    replies.py     paths, responses and errors in Replicate's form

Imports the modules beside it that know Cog's server. After a change: pytest tests/unit/api
tests/integration/test_replicate.py
"""
