"""`lightning-ddp-ext doctor` on one node, and under torchrun."""

import os
import subprocess
import sys

import pytest

from tests.cli.doctor_programs import CPU, WIDE, Printed, play_doctor
from tests.support.processes import run_processes

SOON = 30.0  # seconds; a situation whose problem is known at once takes one or two


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All situations in one launch, which imports everything once."""
    unset = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))  # not launched
    folder = str(tmp_path_factory.mktemp("doctor"))
    (played,) = run_processes(play_doctor, 1, folder, env=unset, timeout=290)
    return played


def ended(outcome, code):
    """What the process wrote to standard output."""
    assert not outcome["timed_out"], outcome["output"]
    assert outcome["value"] is not None, outcome["output"]
    assert outcome["value"]["code"] == code, outcome["output"]
    return outcome["value"]["stdout"]


def rejected(outcome, step, *parts):
    found = Printed.parse(ended(outcome, 1))
    assert found.verdict.startswith("Not healthy: ")
    assert found.failed == [step]
    assert outcome["seconds"] < SOON
    for part in parts:
        assert part in found.verdict
    return found


def test_one_node_is_healthy_with_two_local_ranks(outcomes):
    found = Printed.parse(ended(outcomes["healthy"], 0))
    found.check_healthy("(ranks 0, 1): lo 127.0.0.1")
    assert "Healthy: 2 ranks on 1 node add up" in found.verdict


def test_each_step_has_a_row(outcomes):
    found = Printed.parse(ended(outcomes["table"], 0))
    assert list(found.rows) == ["settings", "nodes", "backend", "rendezvous", "network", "versions", "all-reduce"]
    text = {step: text for step, (text, _) in found.rows.items()}
    assert "strategy=ddp_join, 2 ranks on 1 node" in text["settings"]
    assert text["backend"] == "gloo"
    assert text["rendezvous"].startswith("127.0.0.1:")
    assert text["network"].startswith("gloo over ")
    assert ": lo (" in text["network"]
    for name in ("Python", "torch", "lightning", "lightning-ddp-ext"):
        assert f"{name} " in text["versions"]
    found.check_healthy("(ranks 0, 1): lo 127.0.0.1")


def test_a_strategy_of_one_process_needs_no_network(outcomes):
    found = Printed.parse(ended(outcomes["one process"], 0))
    assert "needs no network" in found.verdict
    assert not {"backend", "rendezvous", "network", "all-reduce"} & set(found.rows)


def test_a_port_of_another_program_is_named_with_the_program(outcomes):
    rejected(outcomes["taken port"], "rendezvous", "already in use by `", "(process ", "Choose another port")


def test_in_a_slurm_job_ranks_meet_at_another_port_as_in_training(outcomes):
    outcome = outcomes["taken port of SLURM"]
    Printed.parse(ended(outcome, 0)).check_healthy("(ranks 0, 1)")
    assert "is in use: the ranks meet at port" in outcome["output"]


def test_missing_ranks_are_named_within_the_limit(outcomes):
    message = "rank 1 of 2 ranks did not join in time. Check that they have been started"
    rejected(outcomes["missing rank"], "rendezvous", message)


def test_a_missing_interface_is_named_once_though_two_ranks_lack_it(outcomes):
    found = rejected(outcomes["missing interface"], "network", "`nosuch0` not found on node", "available: lo")
    assert found.verdict.count("nosuch0") == 1
    assert "2 ranks" in found.rows["settings"][0]


def test_a_missing_backend_is_named(outcomes):
    rejected(outcomes["missing backend"], "backend", "no backend `mpi`; available: gloo")


def test_a_mistyped_setting_has_the_error_of_training(outcomes):
    rejected(outcomes["mistyped"], "settings", "`strategy.bucket` is not a setting", "Valid: ")


def test_a_slurm_job_that_does_not_fit_is_named_once(outcomes):
    found = rejected(outcomes["SLURM"], "SLURM", "`SLURM_NTASKS=3`", "rank 3 is missing", "--ntasks-per-node=2")
    assert found.rows["SLURM"][0].startswith("job 7")
    assert ended(outcomes["SLURM, rank 1"], 0) == ""  # launchers end all ranks when one fails
    assert "SLURM_NTASKS" not in outcomes["SLURM, rank 1"]["output"]


@pytest.mark.slow
def test_the_ranks_of_torchrun_are_healthy_and_print_one_table(tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lightning_ddp_ext",
        "doctor", "strategy=ddp", CPU,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **WIDE, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Printed.parse(done.stdout)
    found.check_healthy("(ranks 0, 1)")
    assert "known from TorchElasticEnvironment" in found.rows["settings"][0]
    assert not list(tmp_path.iterdir())
