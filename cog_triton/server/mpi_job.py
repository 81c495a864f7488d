"""Runs a command as if it had not been started by mpirun or srun.

    python mpi_job.py tritonserver --model-repository=…

The LLM API's workers are started by MPI_Comm_spawn, from the Python stub of each model. A stub that has
the variables of mpirun takes itself for the one process of the job. With two models there are two of
them, which abort or hang (measured with Open MPI 4.1.4). NVIDIA's LLM API model deletes such variables
before it imports TensorRT-LLM. The C++ backend needs them.

This imports only the standard library, so that it starts quickly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

# Variables of Open MPI 4 and 5 and PMIx that name the job of a process. Without OMPI_MCA_ess a process that
# has no other still looks for its mpirun.
_JOB = (
    *(
        "OMPI_APP_CTX_",
        "OMPI_COMMAND",
        "OMPI_COMM_WORLD_",
        "OMPI_FILE_LOCATION",
        "OMPI_FIRST_RANKS",
    ),
    *("OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_NUM_APP_CTX", "OMPI_UNIVERSE_SIZE"),
    *("ORTE_", "PMIX_", "PMI_"),
)
# Those that begin the same and name no job.
_CONFIGURATION = ("OMPI_MCA_orte_tmpdir_base", "PMIX_MCA_")


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that name an MPI job."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_CONFIGURATION) or not name.startswith(_JOB)
    }


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], without_job(os.environ))
