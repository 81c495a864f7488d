"""One setup, from the settings to a warm tritonserver, and what keeps it running.

    deployment.py          Deployment: start, generate(), health, stop; metrics of queue and restarts
    running.py             a tritonserver that runs, and the supervisor that starts it again when it ends
    restart_policy.py      the rules by which it does so
    attached.py            the same on a Triton that runs already, whose ensemble may give text
    engine_choice.py       the engine to run, and what keeps one from running here
    model_files.py         the model's files, put in place, and its names
    file_checks.py         checks of those files; checkpoint.py has those of weights, and
                           transformers_checks.py those for the transformers engine
    model_defaults.py      the end tokens and sampling parameters that the files name
    template_variables.py  the variables of Triton's models
    announcement.py        the line that says what is served

May import everything but ``api`` and ``terminal``. After a change: pytest tests/unit/deployment
tests/integration/test_recovery.py
"""

from cog_triton.deployment.deployment import Deployment as Deployment
