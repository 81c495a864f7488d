"""A request before it reaches the engine: its parameters and their bounds, structured output, the queue.

Imports only ``errors`` and ``protocol``. After a change run tests/unit/request.
"""
