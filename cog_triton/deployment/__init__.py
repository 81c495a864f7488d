"""One setup, from the settings to a warm tritonserver, and what keeps it running.

    deployment.py     Deployment: start, generate(), health, stop; metrics of queue and restarts
    running.py        a tritonserver that runs, and the supervisor that starts it again when it ends
    preparation.py    files in place, adapters, template variables
    engine_choice.py  the engine to run, and its checks before a start

May import everything but ``faces``. After a change: pytest tests/unit/deployment
tests/integration/test_recovery.py
"""

from cog_triton.deployment.deployment import Deployment

__all__ = ["Deployment"]
