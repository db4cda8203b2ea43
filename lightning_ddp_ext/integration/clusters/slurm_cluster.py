"""Jobs of SLURM whose tasks are the processes of a run: what does not fit is refused before anybody waits for it."""

import os
import signal

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from typing_extensions import override

from lightning_ddp_ext.errors import ClusterError
from lightning_ddp_ext.network.slurm_arithmetic import find_problems
from lightning_ddp_ext.network.slurm_ports import candidate_ports, lightnings_port

_JOB = "SLURM_JOB_ID"
_RANK = "SLURM_PROCID"
_PORT = "MASTER_PORT"
# Whoever sets one of these starts the processes of each node by other means.
SET_BY_HAND = ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK")
# `srun --pty`: a shell for a person, whatever the number of tasks.
TERMINAL = "SLURM_PTY_PORT"


class CheckedSLURMEnvironment(SLURMEnvironment):
    """Lightning's `SLURMEnvironment`, which makes sure that `srun` has started one task for each device of every node.

    Lightning compares the numbers only in part, and some mistakes end in a run that waits for processes that nobody
    starts, or in several runs of one process each. Here they are errors at the start. `--ntasks`, which Lightning
    refuses, is compared as well. Pass it to the Trainer, `Trainer(plugins=[CheckedSLURMEnvironment()], num_nodes=2)`.

    Strategies of this package meet at the next of a few ports if the first one is taken, see `candidate_ports`.

    Args:
        num_nodes: Number of nodes, to be compared with that of the Trainer; None for any.
        auto_requeue: Whether a job that gets the signal saves a checkpoint and is put into the queue again.
        requeue_signal: The signal, its name or `signal.Signals`.

    Attributes:
        uses_gpus: Whether devices are GPUs, of which SLURM may show a task only its own. Strategies of this package say
            so when they know.

    Raises:
        ClusterError: If this is no process of a SLURM job, or `srun` has not started it.
        ValueError: If there is no such signal.
    """

    def __init__(
        self,
        *,
        num_nodes: int | None = None,
        auto_requeue: bool = True,
        requeue_signal: str | signal.Signals = "SIGUSR1",
    ) -> None:
        # Lightning's constructor only sets these two and checks what is checked here in another way.
        super(SLURMEnvironment, self).__init__()
        self.auto_requeue = auto_requeue
        self.requeue_signal = _find_signal(requeue_signal)
        self.uses_gpus = True
        self._num_nodes = num_nodes
        if _JOB not in os.environ:
            raise ClusterError(
                f"`CheckedSLURMEnvironment` was chosen, but this is no process of a SLURM job (`{_JOB}` is not set)."
                " Leave out `cluster=slurm`, or start the command by `srun`."
            )
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ClusterError(
                "torchrun has started this process, and numbers its processes otherwise than SLURM its tasks. Leave out"
                " `cluster=slurm`."
            )
        if _RANK not in os.environ:
            raise ClusterError(
                f"this process is in the allocation `{_JOB}={os.environ[_JOB]}`, but `srun` has not started it"
                f" (`{_RANK}` is not set). Put `srun` before the command."
            )

    @property
    @override
    def main_address(self) -> str:
        # A step may leave out the first node of its job.
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
        return os.environ.get("MASTER_ADDR") or self.resolve_root_node_address(nodes)

    @property
    @override
    def main_port(self) -> int:
        chosen = os.environ.get(_PORT)
        return candidate_ports(os.environ)[0] if chosen is None else int(chosen)

    @override
    def world_size(self) -> int:
        return int(os.environ.get("SLURM_NTASKS", 1))  # a script without `--ntasks` is one process

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if self._num_nodes not in (None, num_nodes):
            raise ClusterError(
                f"`num_nodes={num_nodes}` of the Trainer differs from `num_nodes={self._num_nodes}` of the cluster."
                " Give both the number of nodes."
            )
        _refuse(find_problems(os.environ, num_nodes, num_devices, uses_gpus=self.uses_gpus))
        if self.world_size() != num_nodes * num_devices:
            raise ClusterError(
                f"{_rank()}`SLURM_NTASKS={self.world_size()}` differs from `num_nodes={num_nodes}` x"
                f" `devices={num_devices}`, and SLURM's tasks are the processes of the run. Put `srun` before the"
                " command, or leave out `cluster=slurm` where something else starts the processes."
            )


def check_tasks(environment: ClusterEnvironment | None, *, num_nodes: int, devices: int, uses_gpus: bool) -> None:
    """Refuse a run in a SLURM job whose tasks are not its processes; outside of SLURM, do nothing.

    Where Lightning has not taken the job for SLURM's, only what cannot be meant is refused: a run of several nodes in
    which every process takes itself for the first, and several tasks that would each start a run of the size of all of
    them together.

    Args:
        environment: What the Trainer has chosen or been given.
        num_nodes: Nodes of the run.
        devices: Devices of each node.
        uses_gpus: Whether the devices are GPUs.

    Raises:
        ClusterError: If the tasks do not fit.
    """
    if isinstance(environment, CheckedSLURMEnvironment):
        environment.uses_gpus = uses_gpus  # Lightning asks again when it starts the run
        environment.validate_settings(devices, num_nodes)
    elif isinstance(environment, SLURMEnvironment) or (
        type(environment) is LightningEnvironment and _is_silent_mistake(num_nodes, devices)
    ):
        _refuse(find_problems(os.environ, num_nodes, devices, uses_gpus=uses_gpus))


def meeting_ports(environment: ClusterEnvironment) -> list[int]:
    """List the ports that rank 0 of a run tries one after the other.

    Args:
        environment: What the Trainer has chosen or been given.

    Returns:
        The ports; only that of the environment outside of SLURM, and where somebody has set `MASTER_PORT`.
    """
    port = environment.main_port
    if isinstance(environment, SLURMEnvironment) and _JOB in os.environ:
        candidates = candidate_ports(os.environ)
        # Lightning itself puts its port into the environment.
        if port in (candidates[0], lightnings_port(os.environ)):
            return candidates
    return [port]


def _is_silent_mistake(num_nodes: int, devices: int) -> bool:
    if any(variable in os.environ for variable in (*SET_BY_HAND, _PORT)):
        return False
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return num_nodes > 1 or (TERMINAL not in os.environ and int(tasks) == devices > 1)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ClusterError(f"{_rank()}{' Also, '.join(problems)}")


def _rank() -> str:
    rank = os.environ.get(_RANK)
    return "" if rank is None else f"rank {rank}: "


def _find_signal(chosen: str | signal.Signals) -> signal.Signals:
    if isinstance(chosen, signal.Signals):
        return chosen
    try:
        return signal.Signals[chosen]
    except KeyError:
        raise ValueError(f"`requeue_signal={chosen}` is no signal. Use `SIGUSR1`.") from None
