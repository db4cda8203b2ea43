"""`lightning-ddp-ext doctor` on two nodes, one rank each, with a network between them and two that lead nowhere."""

import pytest

from tests.cli.doctor_programs import CPU, WIDE, Printed


@pytest.fixture
def diagnose(hosts, ports, tmp_path):
    """Run doctor on nodes 1 and 2, one rank each, with overrides for both or for node 2 alone."""

    def run(*arguments, only_on_2=()):
        port = next(ports)
        ranks = []
        for rank in range(2):
            shared = [
                "--timeout=8", "strategy=ddp_join", "trainer.devices=1", CPU, "cluster=manual",
                "cluster.num_nodes=2", f"cluster.node_rank={rank}", "cluster.main_address=10.77.0.1",
                f"cluster.main_port={port}",
            ]  # fmt: skip
            own = only_on_2 if only_on_2 and rank == 1 else arguments
            ranks.append((rank + 1, {"arguments": [*shared, *own], "folder": str(tmp_path), "env": WIDE}))
        outcomes = hosts.run("diagnose", ranks, flavour="debian", limit=90)
        for outcome in outcomes:
            assert outcome.value is not None, outcome.output
        return outcomes

    return run


def rejected_by_rank_0(outcomes, step, other_code=0):
    # A launcher that ends all ranks when one fails must not stop rank 0 before it has printed.
    assert [outcome.value["code"] for outcome in outcomes] == [1, other_code], outcomes[1].output
    assert outcomes[1].value["stdout"] == ""
    found = Printed.parse(outcomes[0].value["stdout"])
    assert found.failed == [step]
    return found


def test_two_nodes_are_healthy_and_listed_with_their_interfaces(diagnose):
    outcomes = diagnose("network=auto")
    assert [outcome.value["code"] for outcome in outcomes] == [0, 0], outcomes[0].output
    found = Printed.parse(outcomes[0].value["stdout"])
    found.check_healthy("node1 (rank 0): lo 127.0.0.1", "node2 (rank 1, via eth0): lo 127.0.0.1")
    for node in found.rows["nodes"][0].splitlines():
        assert all(f"; {name} 10." in node for name in ("eth0", "eth1", "eth2"))
    network = "gloo over node1: eth0 (10.77.0.1), rank 0; node2: eth0 (10.77.0.2), rank 1"
    assert found.rows["network"][0] == network
    assert outcomes[1].value["stdout"] == ""


def test_an_interface_that_leads_nowhere_is_named_with_the_one_that_leads_to_rank_0(diagnose):
    found = rejected_by_rank_0(diagnose("network=interface", "network.interface=eth1"), "network")
    for part in ("node node1", "node node2", "`eth1`", "Network is unreachable", "Rank 0 was reached over `eth0`."):
        assert part in found.verdict
    assert "node2 (rank 1" in found.rows["nodes"][0]


def test_an_interface_that_another_node_lacks_is_named_by_rank_0(diagnose):
    only_on_2 = ["network=interface", "network.interface=nosuch0"]
    found = rejected_by_rank_0(diagnose("network=auto", only_on_2=only_on_2), "network")
    assert "`nosuch0` not found on node node2" in found.verdict
    assert [line.split()[0] for line in found.rows["nodes"][0].splitlines()] == ["node1", "node2"]


@pytest.mark.slow
def test_a_node_that_is_cut_off_is_named(hosts, diagnose):
    route = "unreachable 10.77.0.1/32"
    hosts.configure(2, f"route add {route}")
    try:
        outcomes = diagnose("network=auto")
    finally:
        hosts.configure(2, f"route del {route}")
    found = rejected_by_rank_0(outcomes, "rendezvous", other_code=1)
    assert "rank 1 of 2 ranks did not join in time" in found.verdict
    assert "rank 1 on node node2 could not connect to rank 0 at 10.77.0.1" in outcomes[1].output
    assert "No route to host" in outcomes[1].output
