"""Templates and values in, a filled and checked model repository out.

May import ``errors`` and the names of ``models``. After a change: pytest tests/unit/repository
"""
