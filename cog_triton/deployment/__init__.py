"""One setup, from the settings to a warm tritonserver, and what keeps it running.

    deployment.py     Deployment: start, generate(), health, stop
    running.py        a tritonserver that runs: its client, its health, its end
    supervisor.py     starts the server again when it ends
    preparation.py    files in place, adapters, template variables
    engine_choice.py  the engine to run, and its checks before a start
    metrics.py        queue and restarts in Prometheus' format

May import everything but ``faces``. After a change: pytest tests/unit/deployment
tests/integration/test_recovery.py
"""

from cog_triton.deployment.deployment import Deployment

__all__ = ["Deployment"]
