"""Where the ranks of a SLURM step meet: ports that each of them can work out by itself, and a name for the step."""

from collections.abc import Mapping

# Lightning uses these; below the range that systems take ports for outgoing connections from.
_FIRST, _COUNT = 15000, 10000
_TRIED = 4
# Jobs with neighbouring numbers, which share nodes, and their first steps and restarts do not meet again.
_PER_STEP, _PER_RESTART, _NEXT = 37, 307, 2503


def lightnings_port(environ: Mapping[str, str]) -> int:
    """Return the port that Lightning derives from a job's number, and where ours begin.

    Args:
        environ: The environment of a process of a SLURM job.

    Returns:
        The port.
    """
    return _FIRST + int(environ["SLURM_JOB_ID"]) % _COUNT


def candidate_ports(environ: Mapping[str, str]) -> list[int]:
    """List the ports that rank 0 of a step tries one after the other, and where the others look for it.

    Two jobs on one node, two steps of a job, or what a killed one has left behind may want the same port.

    Args:
        environ: The environment of a process of a SLURM job.

    Returns:
        The ports, the same on all ranks of a step. The first one of a job's first step is Lightning's.

    Example:
        >>> candidate_ports({"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0"})
        [16234, 18737, 21240, 23743]
    """
    step, restarts = (int(environ.get(name, 0)) for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    start = int(environ["SLURM_JOB_ID"]) + step * _PER_STEP + restarts * _PER_RESTART
    return [_FIRST + (start + number * _NEXT) % _COUNT for number in range(_TRIED)]


def step_name(environ: Mapping[str, str]) -> str:
    """Name a step, so that its ranks know their store among those of others.

    Args:
        environ: The environment of a process of a SLURM job.

    Returns:
        The name, the same on all ranks of a step, and another one after a requeue.
    """
    parts = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(environ.get(part, "0") for part in parts)
