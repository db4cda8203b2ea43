"""Whether SLURM has started the processes that a run needs; only from the environment, so that nobody is waited for."""

import re
from collections.abc import Mapping

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
