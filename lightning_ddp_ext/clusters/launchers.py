"""The launchers srun, torchrun and mpirun, and the variables in which they give each process its rank."""

import os
import sys
from typing import NamedTuple

from lightning_ddp_ext.errors import BackendError, ClusterError


class Launcher(NamedTuple):
    """The variables in which a launcher gives a process its rank and the number of processes."""

    rank: str
    size: str


SRUN = Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
TORCHRUN = Launcher("RANK", "WORLD_SIZE")
_MPIRUN = (Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), Launcher("PMI_RANK", "PMI_SIZE"))

# The variables of launchers begin with these, besides those that any program may set.
PREFIXES = ("SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")

# torchrun sets it for every process.
TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
# Set by people and launchers that start the processes of each node by other means.
SET_BY_HAND = ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK")
# `srun --pty`: a shell for a person, whatever the number of tasks.
TERMINAL = "SLURM_PTY_PORT"


def launched_rank() -> int:
    """Return the rank that a launcher has given this process, 0 without a launcher."""
    names = [launcher.rank for launcher in _launchers()]
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), 0)


def find_launcher() -> str | None:
    """Return the variable in which a launcher gives a number of processes above one."""
    return next((name for name, number in _started_processes().items() if number not in ("0", "1")), None)


def in_sweep() -> bool:
    """Return True if this process runs a job of a sweep."""
    if "hydra" not in sys.modules:  # a program without Hydra does not pay for its import
        return False
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def is_started_alone() -> bool:
    """Return True if a launcher has started this process only."""
    return bool(_started_processes()) and find_launcher() is None


def _launchers() -> list[Launcher]:
    """Return the launchers that may have started this process; torchrun, which may run in a task of srun, is first."""
    return [one for one in (TORCHRUN, SRUN, *_MPIRUN) if one is not SRUN or TERMINAL not in os.environ]


def _started_processes() -> dict[str, str]:
    return {launcher.size: os.environ[launcher.size] for launcher in _launchers() if launcher.size in os.environ}


def check_mpirun(is_launched: bool) -> None:
    """Raise a BackendError if `mpirun` started several processes and Lightning has not recognised that."""
    for _, variable in _MPIRUN:
        value = os.environ.get(variable, "1")
        if not is_launched and value.isdecimal() and int(value) > 1:
            raise BackendError(
                f"`mpirun` started {value} processes (`{variable}={value}`), but without `mpi4py` they do not find each"
                " other, and each would train on its own. Install `mpi4py`."
            )


def check_num_nodes(of_trainer: int, of_cluster: int) -> None:
    """Raise a ClusterError if the Trainer and its cluster environment have different numbers of nodes."""
    if of_trainer != of_cluster:
        raise ClusterError(
            f"`num_nodes={of_trainer}` of the Trainer differs from `num_nodes={of_cluster}` of the cluster. Give both"
            " the number of nodes."
        )
