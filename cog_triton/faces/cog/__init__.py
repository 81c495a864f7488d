"""What Cog's server needs beyond its documentation. Each file says when it can be deleted.

May import nothing else of the package. After a change: pytest tests/unit/faces
tests/integration/test_cog_server.py
"""
