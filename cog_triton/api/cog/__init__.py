"""Cog's server with what it lacks: the front on the public port, and Replicate's HTTP API.

``live_stream`` runs in the predictor's process. Imports web, server, settings and errors. After a change:
pytest tests/unit/api tests/integration/test_front.py test_cog_server.py test_replicate.py
"""
