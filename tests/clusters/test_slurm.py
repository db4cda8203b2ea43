"""Tasks and ports of a SLURM job, from its environment variables alone."""

import itertools

import pytest

from lightning_ddp_ext.clusters.environments import find_problems, step_port, summarize, tasks_per_node

# What SLURM 22.05 gives `sbatch --nodes=2 --ntasks-per-node=2`: to the script, and to the tasks that `srun` starts.
SCRIPT = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "2", "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "0", "SLURM_NODEID": "0",
}  # fmt: skip
TASK = {
    **SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3", "SLURM_NODEID": "1",
}  # fmt: skip


def changed(environ, **changes):
    """An environment with some variables changed, and without those that are None."""
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


def srun(tasks, per_node, spread=None, nodes=2, **changes):
    return changed(
        TASK, SLURM_NTASKS=str(tasks), SLURM_STEP_NUM_TASKS=str(tasks), SLURM_NNODES=str(nodes),
        SLURM_NTASKS_PER_NODE=None if per_node is None else str(per_node),
        SLURM_STEP_TASKS_PER_NODE=spread or f"{tasks // nodes}(x{nodes})", **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "num_nodes", "devices"),
    [
        ({}, 2, 2),
        (TASK, 2, 2),
        (srun(2, 1), 2, 1),
        # the tasks that were started, however they were asked for
        (srun(2, None), 2, 1),
        # a script or a shell on one node, whose processes Lightning starts
        (changed(SCRIPT, SLURM_NTASKS=None, SLURM_NTASKS_PER_NODE=None, SLURM_NNODES="1"), 1, 2),
        (changed(SCRIPT, SLURM_JOB_NAME="interactive", SLURM_PROCID=None), 1, 2),
        (srun(1, None, nodes=1, SLURM_JOB_NAME="bash"), 1, 2),
        # torchrun, once per node
        (srun(2, 1, TORCHELASTIC_RUN_ID="7"), 2, 8),
        # not a number
        (changed(TASK, SLURM_NNODES="two", SLURM_STEP_TASKS_PER_NODE="?"), 2, 2),
    ],
)
def test_tasks_that_fit_are_no_problem(environ, num_nodes, devices):
    assert find_problems(environ, num_nodes, devices) == []


@pytest.mark.parametrize(
    ("environ", "num_nodes", "devices", "parts"),
    [
        (
            srun(3, 2, "2,1"), 2, 2,
            ["`SLURM_NTASKS=3` (`SLURM_NTASKS_PER_NODE=2`)", "2 nodes x `devices=2` = 4 processes", "rank 3 is missing",
             "Set `--nodes=2 --ntasks-per-node=2`"],
        ),
        (srun(2, 1), 2, 4, ["`SLURM_NTASKS=2`", "= 8 processes: ranks 2 to 7 are missing", "--ntasks-per-node=4"]),
        (srun(4, 2), 2, 1, ["`SLURM_NTASKS=4`", "2 tasks too many", "--ntasks-per-node=1"]),
        (srun(4, None, "3,1"), 2, 2, ["`SLURM_STEP_TASKS_PER_NODE=3,1` puts 3 tasks on a node with `devices=2`"]),
        (TASK, 1, 2, ["`SLURM_NNODES=2` differs from `num_nodes=1`", "Set `num_nodes=2`"]),
        (srun(2, 1, SLURM_JOB_NAME="bash"), 2, 1, ["`SLURM_JOB_NAME=bash`", "2 tasks", "`--job-name=train`"]),
        (SCRIPT, 2, 2, ["`SLURM_JOB_ID=7`", "`SLURM_STEP_ID=`", "the only one of 4", "Put `srun` before"]),
        (changed(SCRIPT, SLURM_STEP_ID=str(0xFFFFFFFB)), 2, 2, ["`SLURM_STEP_ID=4294967291`", "Put `srun` before"]),
    ],
)  # fmt: skip
def test_tasks_that_do_not_fit_are_named_once_with_variables_and_a_remedy(environ, num_nodes, devices, parts):
    (problem,) = find_problems(environ, num_nodes, devices)
    for part in parts:
        assert part in problem
    assert problem.endswith(".")


def test_problems_are_counted_tasks_per_node_read_and_a_job_summarized():
    assert len(find_problems(srun(2, 1, SLURM_JOB_NAME="bash"), 1, 2)) == 3
    for text, counts in {"1": [1], "2(x2)": [2, 2], "2(x2),1": [2, 2, 1], "": [], "2(x2": []}.items():
        assert tasks_per_node(text) == counts
    assert summarize({}) is None
    assert summarize(TASK).startswith("job 7, `SLURM_JOB_NAME=train`, `SLURM_NNODES=2`, `SLURM_NTASKS=4`")


def test_the_port_is_lightnings_in_the_first_step_and_another_one_in_near_steps_restarts_and_jobs():
    assert [step_port({"SLURM_JOB_ID": job}) for job in ("4711", "1234567")] == [19711, 19567]
    near = [
        {"SLURM_JOB_ID": str(4711 + job), "SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": str(restarts)}
        for job, step, restarts in itertools.product(range(5), range(3), range(3))
    ]
    assert len(set(map(step_port, near))) == len(near)
