"""Cluster environments: SLURM jobs, checked against the processes of a run, and nodes that are started by hand."""

import os
import re
import signal
from collections.abc import Mapping

from typing_extensions import override

from lightning_ddp_ext._lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning_ddp_ext._validation import check_host, check_integer
from lightning_ddp_ext.clusters.launchers import SET_BY_HAND, SRUN, TERMINAL, TORCHRUN_ID, check_num_nodes
from lightning_ddp_ext.errors import ClusterError

_JOB = "SLURM_JOB_ID"
_PORT = "MASTER_PORT"

# Lightning ignores SLURM in jobs of these names, so that people can start processes by other means.
_HIDING_NAMES = ("bash", "interactive")
# Larger numbers stand for the batch script, an interactive shell and the like; see slurm.h.
_LAST_STEP = 0xFFFFFFF0
_SUMMARIZED = ("SLURM_JOB_NAME", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")

# Lightning's range of ports, below the range that systems take ports for outgoing connections from.
_FIRST, _COUNT = 15000, 10000
# Jobs with neighbouring numbers, which share nodes, and their first steps and restarts do not get the same port.
_PER_STEP, _PER_RESTART = 37, 307


def find_problems(environ: Mapping[str, str], num_nodes: int, devices: int) -> list[str]:
    """Return how SLURM's tasks differ from one per device on every node, with remedies; none under torchrun."""
    if _JOB not in environ or TORCHRUN_ID in environ:
        return []
    tasks = _number(environ, "SLURM_NTASKS")
    name = environ.get("SLURM_JOB_NAME", "")
    is_hidden = name in _HIDING_NAMES
    problems, step = [], _number(environ, "SLURM_STEP_ID")
    if step is None or step >= _LAST_STEP or SRUN.rank not in environ:  # a batch script, or a shell in an allocation
        if num_nodes > 1 or (tasks is not None and not is_hidden and devices > 1):
            problems.append(
                f"this process is in the allocation `{_JOB}={environ[_JOB]}`, but `srun` has not started it"
                f" (`SLURM_STEP_ID={environ.get('SLURM_STEP_ID', '')}`), so that it is the only one of"
                f" {num_nodes * devices}. Put `srun` before the command."
            )
        if is_hidden:
            return problems
    elif is_hidden:
        of_step = _number(environ, SRUN.size) or tasks or 1
        if of_step == 1 and num_nodes == 1:
            return []  # a shell: Lightning starts the processes of this node by itself
        problems.append(
            f"`SLURM_JOB_NAME={name}` keeps Lightning from recognising a SLURM job: each of the {of_step} tasks"
            " would train on its own. Give the job another name, `--job-name=train`."
        )
    if tasks is not None:
        nodes = _number(environ, "SLURM_NNODES") or num_nodes
        if nodes != num_nodes:
            problems.append(f"`SLURM_NNODES={nodes}` differs from `num_nodes={num_nodes}`. Set `num_nodes={nodes}`.")
        # A wrong number of nodes is not repeated as a wrong number of tasks.
        problems += _check_tasks(environ, tasks, nodes, devices)
    return problems


def summarize(environ: Mapping[str, str]) -> str | None:
    """Return the number and the tasks of the SLURM job in one line for people, or None outside of SLURM."""
    if _JOB not in environ:
        return None
    return ", ".join(
        [f"job {environ[_JOB]}", *(f"`{name}={environ[name]}`" for name in _SUMMARIZED if name in environ)]
    )


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node, [2, 2, 2, 1] for SLURM's "2(x3),1"; none if the text is malformed."""
    counts: list[int] = []
    for part in text.split(","):
        read = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if read is None:
            return []
        counts += [int(read[1])] * int(read[2] or 1)
    return counts


def _check_tasks(environ: Mapping[str, str], tasks: int, nodes: int, devices: int) -> list[str]:
    wanted = nodes * devices
    remedy = f"Set `--nodes={nodes} --ntasks-per-node={devices}`."
    if tasks != wanted:
        missing = f"rank {tasks} is missing" if tasks == wanted - 1 else f"ranks {tasks} to {wanted - 1} are missing"
        difference = f"{_plural(tasks - wanted, 'task')} too many" if tasks > wanted else missing
        asked = _number(environ, "SLURM_NTASKS_PER_NODE")
        per_node = "" if asked is None else f" (`SLURM_NTASKS_PER_NODE={asked}`)"
        return [
            f"`SLURM_NTASKS={tasks}`{per_node} differs from {_plural(nodes, 'node')} x `devices={devices}` ="
            f" {_plural(wanted, 'process', 'processes')}: {difference}. {remedy}"
        ]
    variable = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    uneven = [count for count in tasks_per_node(environ.get(variable, "")) if count != devices]
    return [
        f"`{variable}={environ[variable]}` puts {_plural(count, 'task')} on a node with `devices={devices}`. {remedy}"
        for count in uneven[:1]
    ]


def _plural(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


def step_port(environ: Mapping[str, str]) -> int:
    """Return the port at which all ranks of a SLURM step meet; for the first step of a job it is Lightning's."""
    step, restarts = (int(environ.get(name, 0)) for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    return _FIRST + (int(environ[_JOB]) + step * _PER_STEP + restarts * _PER_RESTART) % _COUNT


class CheckedSLURMEnvironment(SLURMEnvironment):
    """Lightning's `SLURMEnvironment` that requires one task for each device of every node.

    Lightning compares the numbers only in part. Some mistakes end in a run that waits for processes that never start,
    or in several runs of one process each; here they are errors at the start. `--ntasks` without `--ntasks-per-node`,
    which Lightning rejects, is accepted. Pass it to the Trainer,
    `Trainer(plugins=[CheckedSLURMEnvironment()], num_nodes=2)`.

    Args:
        num_nodes: Number of nodes, to be compared with the Trainer's; None for any.
        auto_requeue: Whether a job that gets the signal saves a checkpoint and is put into the queue again.
        requeue_signal: The signal, its name or `signal.Signals`.

    Raises:
        ClusterError: If this process is not in a SLURM job, or `srun` has not started it.
        ValueError: If there is no such signal.
    """

    def __init__(
        self,
        *,
        num_nodes: int | None = None,
        auto_requeue: bool = True,
        requeue_signal: str | signal.Signals = "SIGUSR1",
    ) -> None:
        # Lightning's constructor only sets these two and makes checks that `find_problems` replaces.
        super(SLURMEnvironment, self).__init__()
        self.auto_requeue = auto_requeue
        self.requeue_signal = _find_signal(requeue_signal)
        self._num_nodes = num_nodes
        if _JOB not in os.environ:
            raise ClusterError(
                f"`CheckedSLURMEnvironment` was chosen, but this process is not in a SLURM job (`{_JOB}` is not set)."
                " Leave out `cluster=slurm`, or start the command by `srun`."
            )
        if TORCHRUN_ID in os.environ:
            raise ClusterError(
                "torchrun has started this process, and its ranks differ from SLURM's. Leave out `cluster=slurm`."
            )
        check_has_rank(self)

    @property
    @override
    def main_address(self) -> str:
        # The nodes of a step may exclude the first node of its job.
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
        return os.environ.get("MASTER_ADDR") or self.resolve_root_node_address(nodes)

    @property
    @override
    def main_port(self) -> int:
        chosen = os.environ.get(_PORT)
        return step_port(os.environ) if chosen is None else int(chosen)

    @override
    def world_size(self) -> int:
        return int(os.environ.get("SLURM_NTASKS", 1))  # a script without `--ntasks` is one process

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if self._num_nodes is not None:
            check_num_nodes(num_nodes, self._num_nodes)
        _raise_problems(num_nodes, num_devices)
        if self.world_size() != num_nodes * num_devices:
            raise ClusterError(
                f"{_rank_prefix()}`SLURM_NTASKS={self.world_size()}` differs from `num_nodes={num_nodes}` x"
                f" `devices={num_devices}`, and SLURM's tasks are the processes of the run. Put `srun` before the"
                " command, or leave out `cluster=slurm` if something else starts the processes."
            )


def check_has_rank(environment: ClusterEnvironment | None) -> None:
    """Raise a ClusterError in a shell of `salloc`, where Lightning would look for a rank; a batch script has one."""
    if isinstance(environment, SLURMEnvironment) and _JOB in os.environ and SRUN.rank not in os.environ:
        raise ClusterError(
            f"this process is in the allocation `{_JOB}={os.environ[_JOB]}`, but `srun` has not started it"
            f" (`{SRUN.rank}` is not set). Put `srun` before the command."
        )


def check_tasks(
    environment: ClusterEnvironment | None, *, num_nodes: int, devices: int, has_address: bool = False
) -> None:
    """Raise a ClusterError if several nodes have no address, or the tasks of a SLURM job are not the processes.

    If Lightning has not recognised the job, only two silent mistakes are errors: several nodes on which each process
    is the first, and several tasks that would each start the whole run.
    """
    if isinstance(environment, CheckedSLURMEnvironment):
        environment.validate_settings(devices, num_nodes)
    elif isinstance(environment, SLURMEnvironment) or (
        type(environment) is LightningEnvironment and _is_silent_mistake(num_nodes, devices)
    ):
        _raise_problems(num_nodes, devices)
    is_plain = type(environment) is LightningEnvironment
    if num_nodes > 1 and is_plain and not has_address and not os.environ.get("MASTER_ADDR"):
        raise ClusterError(
            f"`num_nodes={num_nodes}`, but neither a launcher nor a plugin gives the rank of this node and the address"
            " of the first. Pass `plugins=[ManualEnvironment(...)]` (`cluster=manual` in the command), or start the"
            " processes with a launcher such as `torchrun`."
        )


def rendezvous_port(environment: ClusterEnvironment) -> int:
    """Return the port at which ranks meet; in a SLURM job without `MASTER_PORT` of the user, `step_port`."""
    port = environment.main_port
    is_job = isinstance(environment, SLURMEnvironment) and _JOB in os.environ
    # Lightning puts its port into the environment by itself.
    is_lightnings = is_job and port == _FIRST + int(os.environ[_JOB]) % _COUNT
    return step_port(os.environ) if is_lightnings else port


def _is_silent_mistake(num_nodes: int, devices: int) -> bool:
    if any(variable in os.environ for variable in (*SET_BY_HAND, _PORT)):
        return False
    tasks = os.environ.get(SRUN.size, "1")
    return num_nodes > 1 or (TERMINAL not in os.environ and int(tasks) == devices > 1)


def _raise_problems(num_nodes: int, devices: int) -> None:
    problems = find_problems(os.environ, num_nodes, devices)
    if problems:
        raise ClusterError(f"{_rank_prefix()}{' Also, '.join(problems)}")


def _rank_prefix() -> str:
    rank = os.environ.get(SRUN.rank)
    return "" if rank is None else f"rank {rank}: "


def _find_signal(chosen: str | signal.Signals) -> signal.Signals:
    if isinstance(chosen, signal.Signals):
        return chosen
    try:
        return signal.Signals[chosen]
    except KeyError:
        raise ValueError(f"`requeue_signal={chosen}` is not a signal. Use `SIGUSR1`.") from None


_LAST_PORT = 2**16 - 1
_MOST_NODES = 2**16


def local_environment(num_nodes: int = 1) -> ClusterEnvironment:
    """Return the environment that the Trainer finds by itself; `num_nodes` is for its argument of this name."""
    kinds = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
    return next((kind() for kind in kinds if kind.detect()), LightningEnvironment())


class ManualEnvironment(LightningEnvironment):
    """Position of a node in a run that somebody starts by hand, once on every node.

    Lightning starts the processes of each node, as on a single one. Pass it to the Trainer,
    `Trainer(plugins=[ManualEnvironment(...)], num_nodes=2)`.

    Args:
        num_nodes: Number of nodes.
        node_rank: The number of this node, 0 for the one that others connect to.
        main_address: Name or address of node 0.
        main_port: A free port there, the same on all nodes.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range, or the address is malformed.
    """

    def __init__(self, *, num_nodes: int, node_rank: int, main_address: str, main_port: int = 29500) -> None:
        super().__init__()
        check_integer("num_nodes", num_nodes, least=1, most=_MOST_NODES, remedy="Use the number of nodes.")
        check_integer("node_rank", node_rank, most=num_nodes - 1, remedy="Number the nodes from 0.")
        check_host("main_address", main_address, "Use a name or an address of the node with `node_rank=0`.")
        check_integer("main_port", main_port, least=1, most=_LAST_PORT, remedy="Use 29500 if unsure.")
        self._num_nodes = num_nodes
        self._node_rank = node_rank
        self._address = main_address
        self._port = main_port

    @property
    @override
    def main_address(self) -> str:
        return self._address

    @property
    @override
    def main_port(self) -> int:
        return self._port

    @override
    def node_rank(self) -> int:
        return self._node_rank

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        check_num_nodes(num_nodes, self._num_nodes)
