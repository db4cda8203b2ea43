"""Jobs of SLURM whose tasks are the processes of a run: what does not fit is refused before anybody waits for it."""

import os
import re
import signal
from collections.abc import Mapping

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from typing_extensions import override

from lightning_ddp_ext.errors import ClusterError

# Lightning does not take a job of these names for one of SLURM's, so that people can start processes by other means.
_HIDING_NAMES = ("bash", "interactive")
# Larger numbers are no steps of tasks but the batch script, an interactive shell and the like; see slurm.h.
_LAST_STEP = 0xFFFFFFF0
# All that `srun --gpus-per-task=1` says, if the batch script did not ask for it: `gpu:per_task:1`.
_BINDING, _OF_TASK = "SLURMD_TRES_BIND", "gpu:per_task:"
# What `--gpu-bind` says, as `none`, `verbose,none` or `gpu:none`: with it every task sees all GPUs of its node.
_BINDINGS, _UNBOUND = ("SLURM_GPU_BIND", _BINDING), "none"
_SUMMARIZED = ("SLURM_JOB_NAME", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")


def find_problems(environ: Mapping[str, str], num_nodes: int, devices: int, *, uses_gpus: bool = True) -> list[str]:
    """Compare what SLURM says it has started with what a run needs: one task per device on every node.

    Args:
        environ: The environment of this process.
        num_nodes: Nodes of the run, the Trainer's `num_nodes`.
        devices: Devices of each node, the Trainer's `devices` as a number.
        uses_gpus: Whether the devices are GPUs, of which SLURM may show a task only its own.

    Returns:
        What is wrong, one text per problem, each with the variables, their values and a remedy. Empty if nothing is,
        outside of SLURM, and where torchrun has started the processes.
    """
    if "SLURM_JOB_ID" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return []
    tasks = _number(environ, "SLURM_NTASKS")
    name = environ.get("SLURM_JOB_NAME", "")
    hidden = name in _HIDING_NAMES
    problems = []
    if not _is_task(environ):
        if num_nodes > 1 or (tasks is not None and not hidden and devices > 1):
            problems.append(_explain_missing_srun(environ, num_nodes * devices))
        if hidden:
            return problems
    elif hidden:
        of_step = _number(environ, "SLURM_STEP_NUM_TASKS") or tasks or 1
        if of_step == 1 and num_nodes == 1:
            return []  # a shell: Lightning starts the processes of this node by itself
        problems.append(
            f"`SLURM_JOB_NAME={name}` keeps Lightning from taking the job for SLURM's: each of the {of_step} tasks"
            " would train on its own. Give the job another name, `--job-name=train`."
        )
    if tasks is None:
        return problems
    found = [
        _check_nodes(environ, num_nodes),
        _check_tasks(environ, tasks, num_nodes, devices),
        _check_gpus(environ, devices) if uses_gpus else None,
    ]
    return [*problems, *(problem for problem in found if problem)]


def summarize(environ: Mapping[str, str]) -> str | None:
    """Say what SLURM has started.

    Args:
        environ: The environment of this process.

    Returns:
        One line for people, or None outside of SLURM.
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    parts = [f"job {environ['SLURM_JOB_ID']}"]
    parts += [f"`{name}={environ[name]}`" for name in _SUMMARIZED if name in environ]
    return ", ".join(parts)


def tasks_per_node(text: str) -> list[int]:
    """Read how many tasks each node has, as SLURM writes it.

    Args:
        text: The value of `SLURM_TASKS_PER_NODE` or `SLURM_STEP_TASKS_PER_NODE`.

    Returns:
        One number per node; empty if it cannot be read.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        read = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if read is None:
            return []
        counts += [int(read[1])] * int(read[2] or 1)
    return counts


def _is_task(environ: Mapping[str, str]) -> bool:
    """Tell whether `srun` has started this process, rather than a batch script or a shell inside of an allocation."""
    step = _number(environ, "SLURM_STEP_ID")
    return step is not None and step < _LAST_STEP and "SLURM_PROCID" in environ


def _explain_missing_srun(environ: Mapping[str, str], processes: int) -> str:
    return (
        f"this process is in the allocation `SLURM_JOB_ID={environ['SLURM_JOB_ID']}`, but `srun` has not started it"
        f" (`SLURM_STEP_ID={environ.get('SLURM_STEP_ID', '')}`), so that it is the only one of {processes}."
        " Put `srun` before the command."
    )


def _check_nodes(environ: Mapping[str, str], num_nodes: int) -> str | None:
    nodes = _number(environ, "SLURM_NNODES")
    if nodes is None or nodes == num_nodes:
        return None
    return f"`SLURM_NNODES={nodes}` differs from `num_nodes={num_nodes}`. Set `num_nodes={nodes}`."


def _check_tasks(environ: Mapping[str, str], tasks: int, num_nodes: int, devices: int) -> str | None:
    # A wrong number of nodes is a problem of its own, and not repeated here.
    nodes = _number(environ, "SLURM_NNODES") or num_nodes
    wanted = nodes * devices
    asked = _number(environ, "SLURM_NTASKS_PER_NODE")
    remedy = f"Set `--nodes={nodes} --ntasks-per-node={devices}`."
    if tasks != wanted:
        per_node = "" if asked is None else f" (`SLURM_NTASKS_PER_NODE={asked}`)"
        return (
            f"`SLURM_NTASKS={tasks}`{per_node} differs from {_plural(nodes, 'node')} x `devices={devices}` ="
            f" {_plural(wanted, 'process', 'processes')}: {_explain_difference(tasks, wanted)}. {remedy}"
        )
    if asked is not None and asked != devices:
        return f"`SLURM_NTASKS_PER_NODE={asked}` differs from `devices={devices}`. {remedy}"
    variable = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    uneven = [count for count in tasks_per_node(environ.get(variable, "")) if count != devices]
    if uneven:
        return (
            f"`{variable}={environ[variable]}` puts {_plural(uneven[0], 'task')} on a node with `devices={devices}`."
            f" {remedy}"
        )
    if asked is None and tasks > 1:
        return f"`SLURM_NTASKS={tasks}` without `SLURM_NTASKS_PER_NODE`, which Lightning asks for. {remedy}"
    return None


def _explain_difference(tasks: int, wanted: int) -> str:
    if tasks > wanted:
        return f"{_plural(tasks - wanted, 'task')} too many"
    first, last = tasks, wanted - 1
    return f"rank {first} is missing" if first == last else f"ranks {first} to {last} are missing"


def _check_gpus(environ: Mapping[str, str], devices: int) -> str | None:
    name = "SLURM_GPUS_PER_TASK"
    if name not in environ and _OF_TASK in environ.get(_BINDING, ""):
        name = _BINDING
    text = environ.get(name, "")
    of_task = text.rpartition(":")[2]  # with the model of the GPU, `a100:1`
    is_unbound = any(re.split("[:,]", environ.get(binding, ""))[-1] == _UNBOUND for binding in _BINDINGS)
    if is_unbound or not of_task.isdecimal() or int(of_task) >= devices:
        return None
    return (
        f"`{name}={text}` shows each task {_plural(int(of_task), 'GPU')}, with the index 0, and"
        f" `devices={devices}` looks for {devices}. Replace `--gpus-per-task` by `--gpus-per-node={devices}`."
    )


def _plural(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


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
