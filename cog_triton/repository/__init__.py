"""Templates and values in, a filled and checked model repository out.

May import ``errors`` and ``protocol``. After a change: pytest tests/unit/repository
"""
