"""`lightning-ddp-ext doctor` on two hosts, one rank each, with a network between them and two that lead nowhere."""

import json

import pytest

from tests.cli.doctor_programs import CPU, is_healthy


@pytest.fixture
def diagnose(hosts, ports, tmp_path):
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


def refused_by_rank_0(outcomes, other_code=0):
    # A launcher that ends all ranks when one fails must not take the word from rank 0.
    assert [outcome.value["code"] for outcome in outcomes] == [1, other_code]
    assert outcomes[1].value["stdout"] == ""
    return json.loads(outcomes[0].value["stdout"])


def test_two_hosts_are_healthy_and_their_clocks_are_compared(diagnose):
    outcomes = diagnose("network=auto")
    assert [outcome.value["code"] for outcome in outcomes] == [0, 0], outcomes[0].output
    found = json.loads(outcomes[0].value["stdout"])
    is_healthy(found, [[0], [1]])
    first, second = found["hosts"]
    assert second["rendezvous_interface"] == "eth0"
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
    found = refused_by_rank_0(diagnose("network=auto", only_on_2=["network=interface", "network.interface=nosuch0"]))
    assert "`nosuch0` not found on host node2" in found["verdict"]
    assert [host["host"] for host in found["hosts"]] == ["node1", "node2"]


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named(hosts, diagnose):
    route = "unreachable 10.77.0.1/32"
    hosts.configure(2, f"route add {route}")
    try:
        outcomes = diagnose("network=auto")
    finally:
        hosts.configure(2, f"route del {route}")
    found = refused_by_rank_0(outcomes, other_code=1)
    assert "rank 1 of 2 ranks did not join in time" in found["verdict"]
    assert "rank 1 on host node2 could not connect to rank 0 at 10.77.0.1" in outcomes[1].output
    assert "No route to host" in outcomes[1].output
