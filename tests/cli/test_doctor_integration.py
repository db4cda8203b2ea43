"""`lightning-ddp-ext doctor` on one host, under torchrun, and on two hosts of network namespaces."""

import json
import os
import re
import subprocess
import sys

import pytest

from lightning_ddp_ext.network.bandwidth import SIZES
from lightning_ddp_ext.testing import run_processes
from tests.cli.doctor_programs import CPU, play_doctor
from tests.network.conftest import hosts, ports  # noqa: F401  fixtures

SOON = 30.0  # seconds; a situation whose problem is known at once takes one or two


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All situations in one launch, which imports everything once."""
    (played,) = run_processes(play_doctor, 1, str(tmp_path_factory.mktemp("doctor")), timeout=280)
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


def is_healthy(found, ranks_of_hosts):
    assert found["healthy"], found["verdict"]
    assert found["problems"] == []
    assert [host["ranks"] for host in found["hosts"]] == ranks_of_hosts
    assert found["world_size"] == sum(map(len, ranks_of_hosts))
    sizes = [row["size"] for row in found["all_reduce"]]
    assert sizes == list(SIZES)[: len(sizes)]
    assert all(row["bus_bandwidth"] > 0 for row in found["all_reduce"])


def test_one_host_is_healthy_with_two_local_ranks_and_nothing_but_json_is_printed(outcomes):
    found = json.loads(ended(outcomes["healthy"], 0))
    is_healthy(found, [[0, 1]])
    assert found["backend"] == "gloo"
    (host,) = found["hosts"]
    assert host["interfaces"][host["meeting_interface"]][0] == "127.0.0.1"
    assert {"Python", "torch", "lightning", "lightning-ddp-ext"} == set(host["versions"])
    assert "ranks on 1 host add up" in found["verdict"]


def test_a_table_and_one_line_are_printed_for_people(outcomes):
    *table, verdict = ended(outcomes["table"], 0).splitlines()
    assert verdict.startswith("Healthy: 2 ranks on 1 host")
    printed = "\n".join(table)
    for row in ("settings", "back-end", "interfaces", "versions", "rendezvous", "network", "all-reduce"):
        assert re.search(rf"│ {row} +│.*│ ok", printed), printed
    assert "gloo over lo" not in printed.partition("network")[0]
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


def test_ranks_that_do_not_come_are_named_within_the_limit(outcomes):
    refused(outcomes["missing rank"], "rank 1 of 2 ranks did not join in time", "Check that they have been started")


def test_an_interface_that_the_host_lacks_is_named(outcomes):
    found = refused(outcomes["missing interface"], "`nosuch0` not found on host", "available: lo")
    assert len(found["problems"]) == 1  # though two ranks have found it
    assert found["world_size"] == 2


def test_a_missing_back_end_is_named_in_the_table(outcomes):
    printed = ended(outcomes["missing back-end"], 1)
    assert re.search(r"│ back-end +│.*│ failed", printed), printed
    assert "no back-end `mpi`; available: gloo" in printed.splitlines()[-1]


def test_a_mistyped_setting_is_answered_as_training_does(outcomes):
    refused(outcomes["mistyped"], "`strategy.bucket` is not a setting", "Valid: ")


def test_a_job_of_slurm_that_does_not_fit_is_named_once(outcomes):
    found = refused(outcomes["SLURM"], "`SLURM_NTASKS=3`", "rank 3 is missing", "--ntasks-per-node=2")
    assert found["slurm"].startswith("job 7")
    assert ended(outcomes["SLURM, rank 1"], 1) == ""
    assert "SLURM_NTASKS" not in outcomes["SLURM, rank 1"]["output"]


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


@pytest.fixture
def diagnose(hosts, ports, tmp_path):  # noqa: F811
    """Run doctor on hosts 1 and 2, one rank each; keyword arguments are overrides of a host."""

    def run(*arguments, flavour="debian", only_on_2=()):
        port = next(ports)
        ranks = []
        for rank in range(2):
            shared = [
                "--json", "--timeout=8", "strategy=ddp_join", "trainer.devices=1", CPU, "cluster=manual",
                "cluster.num_nodes=2", f"cluster.node_rank={rank}", "cluster.main_address=10.77.0.1",
                f"cluster.main_port={port}",
            ]  # fmt: skip
            own = only_on_2 if only_on_2 and rank == 1 else arguments
            ranks.append((rank + 1, {"arguments": [*shared, *own], "folder": str(tmp_path)}))
        outcomes = hosts.run("diagnose", ranks, flavour=flavour, limit=90)
        for outcome in outcomes:
            assert outcome.value is not None, outcome.output
        return outcomes

    return run


def refused_by_rank_0(outcomes):
    assert [outcome.value["code"] for outcome in outcomes] == [1, 1]
    assert outcomes[1].value["stdout"] == ""
    return json.loads(outcomes[0].value["stdout"])


def test_two_hosts_are_healthy_and_their_clocks_are_compared(diagnose):
    outcomes = diagnose("network=auto")
    assert [outcome.value["code"] for outcome in outcomes] == [0, 0], outcomes[0].output
    found = json.loads(outcomes[0].value["stdout"])
    is_healthy(found, [[0], [1]])
    first, second = found["hosts"]
    assert second["meeting_interface"] == "eth0"
    assert set(second["interfaces"]) == {"lo", "eth0", "eth1", "eth2"}
    assert first["clock_offset"] is None
    assert abs(second["clock_offset"]) <= second["clock_uncertainty"] + 1e-3  # it is the same clock
    assert found["network"] == "gloo over node1: eth0 (10.77.0.1), rank 0; node2: eth0 (10.77.0.2), rank 1"
    assert outcomes[1].value["stdout"] == ""


def test_an_interface_that_leads_nowhere_is_named_with_the_one_that_leads_to_rank_0(diagnose):
    found = refused_by_rank_0(diagnose("network=interface", "network.interface=eth1"))
    for part in ("host node1", "host node2", "`eth1`", "Network is unreachable", "Rank 0 was reached over `eth0`."):
        assert part in found["verdict"]
    assert [problem["check"] for problem in found["problems"]] == ["network"]


def test_an_interface_that_another_host_lacks_is_named_by_rank_0(diagnose):
    found = refused_by_rank_0(
        diagnose("network=auto", only_on_2=["network=interface", "network.interface=nosuch0"])
    )
    assert "`nosuch0` not found on host node2" in found["verdict"]
    assert [host["host"] for host in found["hosts"]] == ["node1", "node2"]


def test_a_host_that_is_cut_off_is_named(hosts, diagnose):  # noqa: F811
    route = "unreachable 10.77.0.1/32"
    hosts.configure(2, f"route add {route}")
    try:
        outcomes = diagnose("network=auto")
    finally:
        hosts.configure(2, f"route del {route}")
    found = refused_by_rank_0(outcomes)
    assert "rank 1 of 2 ranks did not join in time" in found["verdict"]
    assert "rank 1 on host node2 could not connect to rank 0 at 10.77.0.1" in outcomes[1].output
    assert "No route to host" in outcomes[1].output
