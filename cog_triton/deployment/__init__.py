"""One setup, from the settings to a warm tritonserver, and what keeps it running.

    deployment.py     Deployment: start, generate(), health, stop; metrics of queue and restarts
    running.py        a tritonserver that runs, and the supervisor that starts it again when it ends
    attached.py       the same on a Triton that runs already, whose ensemble may give text
    preparation.py    the engine to run, files in place, template variables, and their checks

May import everything but ``api`` and ``terminal``. After a change: pytest tests/unit/deployment
tests/integration/test_recovery.py
"""

from cog_triton.deployment.deployment import Deployment as Deployment
