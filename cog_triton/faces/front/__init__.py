"""What stands on the public port, before Cog's server: checks, health routes, a bounded end.

Knows neither the predictor nor the settings, and Cog's server by its HTTP alone. After a change: pytest
tests/unit/faces/test_front.py tests/integration/test_front.py
"""
