"""`lightning-ddp-ext doctor` on one host, and under torchrun."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.cli.doctor_programs import CPU, is_healthy, play_doctor
from tests.support.processes import run_processes

SOON = 30.0  # seconds; a situation whose problem is known at once takes one or two


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All situations in one launch, which imports everything once."""
    unset = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))  # nobody has launched it
    folder = str(tmp_path_factory.mktemp("doctor"))
    (played,) = run_processes(play_doctor, 1, folder, env=unset, timeout=290)
    return played


def ended(outcome, code):
    """What the process wrote to standard output."""
    assert not outcome["timed_out"], outcome["output"]
    assert outcome["value"] is not None, outcome["output"]
    assert outcome["value"]["code"] == code, outcome["output"]
    return outcome["value"]["stdout"]


def refused(outcome, *parts):
    found = json.loads(ended(outcome, 1))
    assert not found["healthy"]
    assert found["verdict"].startswith("Not healthy: ")
    assert outcome["seconds"] < SOON
    for part in parts:
        assert part in found["verdict"]
    return found


def test_one_host_is_healthy_with_two_local_ranks_and_nothing_but_json_is_printed(outcomes):
    found = json.loads(ended(outcomes["healthy"], 0))
    is_healthy(found, [[0, 1]])
    assert found["backend"] == "gloo"
    (host,) = found["hosts"]
    assert host["interfaces"][host["rendezvous_interface"]][0] == "127.0.0.1"
    assert {"Python", "torch", "lightning", "lightning-ddp-ext"} == set(host["versions"])
    assert "ranks on 1 host add up" in found["verdict"]


def test_a_table_and_one_line_are_printed_for_people(outcomes):
    *table, verdict = ended(outcomes["table"], 0).splitlines()
    assert verdict.startswith("Healthy: 2 ranks on 1 host")
    printed = "\n".join(table)
    for row in ("settings", "backend", "interfaces", "versions", "rendezvous", "network", "all-reduce"):
        assert re.search(rf"│ {row} +│.*│ ok", printed), printed
    assert re.search(r"gloo over \S+: lo \(", printed), printed
    assert "1 KiB" in printed
    assert "failed" not in printed


def test_a_strategy_of_one_process_needs_no_network(outcomes):
    found = json.loads(ended(outcomes["one process"], 0))
    assert found["healthy"]
    assert found["backend"] is None
    assert found["all_reduce"] == []


def test_a_port_of_another_program_is_named_with_the_program(outcomes):
    found = refused(outcomes["taken port"], "already in use by `", "(process ", "Choose another port")
    assert found["problems"][0]["check"] == "rendezvous"


def test_in_a_job_of_slurm_ranks_meet_at_another_port_as_in_training(outcomes):
    outcome = outcomes["taken port of SLURM"]
    is_healthy(json.loads(ended(outcome, 0)), [[0, 1]])
    assert "is taken: the ranks meet at port" in outcome["output"]


def test_ranks_that_do_not_come_are_named_within_the_limit(outcomes):
    refused(outcomes["missing rank"], "rank 1 of 2 ranks did not join in time", "Check that they have been started")


def test_an_interface_that_the_host_lacks_is_named(outcomes):
    found = refused(outcomes["missing interface"], "`nosuch0` not found on host", "available: lo")
    assert len(found["problems"]) == 1  # though two ranks have found it
    assert found["world_size"] == 2


def test_a_missing_back_end_is_named_in_the_table(outcomes):
    printed = ended(outcomes["missing backend"], 1)
    assert re.search(r"│ backend +│.*│ failed", printed), printed
    assert "no backend `mpi`; available: gloo" in printed.splitlines()[-1]


def test_a_mistyped_setting_is_answered_as_training_does(outcomes):
    refused(outcomes["mistyped"], "`strategy.bucket` is not a setting", "Valid: ")


def test_a_job_of_slurm_that_does_not_fit_is_named_once(outcomes):
    found = refused(outcomes["SLURM"], "`SLURM_NTASKS=3`", "rank 3 is missing", "--ntasks-per-node=2")
    assert found["slurm"].startswith("job 7")
    assert ended(outcomes["SLURM, rank 1"], 0) == ""  # launchers end all ranks when one fails
    assert "SLURM_NTASKS" not in outcomes["SLURM, rank 1"]["output"]


@pytest.mark.slow
def test_the_ranks_of_torchrun_are_healthy_and_print_one_document(tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lightning_ddp_ext",
        "doctor", "strategy=ddp", CPU, "--json",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    is_healthy(found, [[0, 1]])
    assert found["environment"] == "TorchElasticEnvironment"
    assert not list(tmp_path.iterdir())
