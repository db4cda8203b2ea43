"""Two nodes, with a network between them and two that lead nowhere; see `hosts.py`.

Limits are far above what is measured, and far below the 50 s that gloo takes with a time limit of 10 s.
"""

import itertools

import pytest

from tests.cli.test_doctor import CPU, WIDE, Printed
from tests.conftest import skip
from tests.distributed.hosts import Hosts, reason_to_skip

SOON = 20.0  # seconds
AT_ONCE = 5.0
TIMEOUT = 10.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    reason = reason_to_skip()
    if reason:
        skip(f"no hosts of network namespaces: {reason}")
    made = Hosts(2, tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def ports():
    """Ports of the hosts that no test has used yet; nothing else runs there."""
    return itertools.count(29500)


@pytest.fixture
def run(hosts, ports):
    """Run `join` on ranks of nodes 1 and 2, with settings for all ranks or for node 2 alone."""

    def run(address="node1", *, flavour="good", places=(1, 2), only_on_2=None, **settings):
        shared = {
            "world_size": len(places), "main_address": address, "main_port": next(ports), "timeout": TIMEOUT,
            "num_nodes": len(set(places)), "network_interface": "auto", **settings,
        }  # fmt: skip
        own = {2: only_on_2 or {}}
        ranks = [(node, {**shared, "rank": rank, **own.get(node, {})}) for rank, node in enumerate(places)]
        return hosts.run("join", ranks, flavour=flavour, limit=40)

    return run


def worked(outcomes):
    total = sum(range(1, len(outcomes) + 1))
    for outcome in outcomes:
        assert not outcome.error, outcome.output
        assert not outcome.timed_out, outcome.output
        assert outcome.value["sum"] == total
    return [outcome.value for outcome in outcomes]


def failed(outcomes, kind, *parts, within):
    for outcome in outcomes:
        assert outcome.error.startswith(f"{kind}: "), outcome.error or outcome.output
        assert outcome.seconds < within
        for part in parts:
            assert part in outcome.error


BOTH = "gloo: rank 0 on node1 over eth0 (10.77.0.1); rank 1 on node2 over eth0 (10.77.0.2)"


@pytest.mark.parametrize(
    ("address", "settings", "expected"),  # parts of the result of rank 0
    [
        ("node1", {}, {"network": BOTH, "listening": ["10.77.0.1"], "NCCL_SOCKET_IFNAME": "=eth0"}),
        ("node1", {"flavour": "debian"}, {"network": BOTH, "listening": ["10.77.0.1"]}),
        ("10.77.0.1", {"flavour": "none"}, {"network": BOTH}),
        ("10.77.0.1", {"flavour": "wrong"}, {"network": BOTH}),
        ("fd00:77::1", {}, {"network": BOTH}),
        ("node1", {"flavour": "debian", "places": (1, 2, 1)}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("node2", {"flavour": "wrong", "places": (2, 2)}, {"GLOO_SOCKET_IFNAME": "lo", "listening": ["127.0.0.1"]}),
        ("10.77.0.1", {"flavour": "wrong", "network_interface": "eth0"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("node1", {"network_interface": None}, {"GLOO_SOCKET_IFNAME": None}),
    ],
)
def test_ranks_use_the_interface_that_connects_them_and_rank_0_listens_on_its_address_only(
    run, address, settings, expected
):
    values = worked(run(address, **settings))
    assert expected.items() <= values[0].items()
    assert len({(value["network"], value["GLOO_SOCKET_IFNAME"]) for value in values}) == 1


def test_hosts_without_ipv4_are_connected(hosts, run):
    ours = [f"addr del 10.77.0.{n}/24 dev eth0" for n in (1, 2)]
    for n, line in enumerate(ours, start=1):
        hosts.configure(n, line)
    try:
        values = worked(run("fd00:77::1"))
    finally:
        for n, line in enumerate(ours, start=1):
            hosts.configure(n, line.replace("del", "add"))
    assert (
        values[0]["network"] == "gloo: rank 0 on node1 over eth0 (fd00:77::1); rank 1 on node2 over eth0 (fd00:77::2)"
    )
    assert values[0]["listening"] == ["fd00:77::1"]


def test_another_port_than_the_clusters_and_a_file_are_used(run, ports, tmp_path):
    worked(run("198.51.100.1", flavour="wrong", init_method=f"tcp://10.77.0.1:{next(ports)}"))
    values = worked(run("198.51.100.1", flavour="none", init_method=f"file://{tmp_path}/meeting"))
    assert {value["GLOO_SOCKET_IFNAME"] for value in values} == {"eth0"}


LOOPBACK = ["Set `network.interface` to `auto`"]


@pytest.mark.parametrize(
    ("address", "settings", "parts", "within"),
    [
        ("node1", {"env": {"GLOO_SOCKET_IFNAME": "eth1"}}, ["`eth1`"], SOON),  # the user's choice, under `auto`
        ("node1", {"flavour": "debian", "network_interface": None}, ["127.0.1.1", *LOOPBACK], SOON),
        (
            "10.77.0.1", {"flavour": "wrong", "network_interface": None},
            ["10.88.1.1", "10.88.2.1", "Network is unreachable"], SOON,
        ),
        (
            "node1", {"network_interface": "eth1"},
            ["`eth1`", "node1", "node2", "10.88.1.1", "Network is unreachable"], SOON,
        ),
        ("node1", {"network_interface": "eth2"}, ["`eth2`", "node1", "node2", "10.99.0.1", "No route to host"], SOON),
        ("node1", {"network_interface": "nosuch0"}, ["`nosuch0` not found on node node", "eth1 (10.88."], AT_ONCE),
        ("node1", {"network_interface": "loopback"}, ["`network.interface=loopback`"], AT_ONCE),
    ],
)  # fmt: skip
def test_an_interface_that_does_not_connect_the_nodes_is_an_error_on_both(run, address, settings, parts, within):
    failed(run(address, **settings), "NetworkInterfaceError", *parts, within=within)


@pytest.mark.slow
def test_an_interface_that_one_node_lacks_is_an_error_on_both(run):
    second = {"network_interface": "nosuch0", "delay": 5.0}  # rank 0 is there by then
    outcomes = run(network_interface="eth0", only_on_2=second, timeout=60)
    failed(outcomes, "NetworkInterfaceError", "interface `nosuch0` not found on node node2", within=SOON)


@pytest.mark.slow
def test_a_main_address_that_is_unknown_or_without_a_route_is_named(run):
    outcomes = run("node1", flavour="wrong", timeout=2)
    failed(outcomes[1:], "RendezvousError", "node1:", "Network is unreachable", "Set the main address", within=SOON)
    failed(outcomes[:1], "RendezvousError", "rank 1 of 2 ranks did not join", within=SOON)
    outcomes = run("node1", flavour="none", timeout=2)
    failed(outcomes[1:], "RendezvousError", "node1:", "instead of `node1`", within=SOON)


def test_the_trainer_runs_over_the_chosen_interface_and_listens_nowhere_else(hosts, ports):
    shared = {"num_nodes": 2, "main_address": "node1", "main_port": next(ports), "network_interface": "auto"}
    shared["strategy"] = "ddp_join"
    outcomes = hosts.run("train", [(n, {**shared, "node_rank": n - 1}) for n in (1, 2)], flavour="debian", limit=60)
    values = [outcome.value for outcome in outcomes]
    assert all(values), "\n".join(outcome.output for outcome in outcomes)
    assert [value["rank"] for value in values] == [0, 1]
    assert [value["steps"] for value in values] == [2, 2]
    assert values[0]["weight"] == values[1]["weight"]
    for value, address in zip(values, ("10.77.0.1", "10.77.0.2"), strict=True):
        assert value["listening"] == [address]
        assert value["connected"] == [address]


@pytest.fixture
def diagnose(hosts, ports, tmp_path):
    """Run doctor on nodes 1 and 2, one rank each."""

    def run(*arguments):
        port = next(ports)
        ranks = []
        for rank in range(2):
            shared = [
                "--timeout=8", "strategy=ddp_join", "trainer.devices=1", CPU, "cluster=manual",
                "cluster.num_nodes=2", f"cluster.node_rank={rank}", "cluster.main_address=10.77.0.1",
                f"cluster.main_port={port}",
            ]  # fmt: skip
            ranks.append((rank + 1, {"arguments": [*shared, *arguments], "folder": str(tmp_path), "env": WIDE}))
        outcomes = hosts.run("diagnose", ranks, flavour="debian", limit=90)
        for outcome in outcomes:
            assert outcome.value is not None, outcome.output
        return outcomes

    return run


def test_two_nodes_are_healthy_and_listed_with_their_interfaces(diagnose):
    outcomes = diagnose("network=auto")
    assert [outcome.value["code"] for outcome in outcomes] == [0, 0], outcomes[0].output
    found = Printed.parse(outcomes[0].value["stdout"])
    found.check_healthy("node1 (rank 0): lo 127.0.0.1", "node2 (rank 1, via eth0): lo 127.0.0.1")
    for node in found.rows["nodes"][0].splitlines():
        assert all(f"; {name} 10." in node for name in ("eth0", "eth1", "eth2"))
    network = "gloo: rank 0 on node1 over eth0 (10.77.0.1); rank 1 on node2 over eth0 (10.77.0.2)"
    assert found.rows["network"][0] == network
    assert outcomes[1].value["stdout"] == ""


def test_an_interface_that_leads_nowhere_is_named_with_the_one_that_leads_to_rank_0(diagnose):
    outcomes = diagnose("network=interface", "network.interface=eth1")
    # A launcher that ends all ranks when one fails must not stop rank 0 before it has printed.
    assert [outcome.value["code"] for outcome in outcomes] == [1, 0], outcomes[1].output
    assert outcomes[1].value["stdout"] == ""
    found = Printed.parse(outcomes[0].value["stdout"])
    assert found.failed == ["network"]
    for part in ("node node1", "node node2", "`eth1`", "Network is unreachable", "Rank 0 was reached over `eth0`."):
        assert part in found.verdict
    assert "node2 (rank 1" in found.rows["nodes"][0]
