"""What Cog's server needs beyond its documentation. Each file says when it can be deleted.

May import nothing else of the package, but for ``server``, which puts the front before Cog's server. After
a change: pytest tests/unit/faces tests/integration/test_cog_server.py tests/integration/test_front.py
"""
