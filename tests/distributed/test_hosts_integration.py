"""Two nodes, with a network between them and two that lead nowhere; see `hosts.py`.

Limits are far above what is measured, and far below the 50 s that gloo takes with a time limit of 10 s.
"""

import pytest

from tests.cli.test_doctor import CPU, WIDE, Printed

SOON = 20.0  # seconds
AT_ONCE = 5.0
TIMEOUT = 10.0


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


@pytest.mark.parametrize(
    ("flavour", "address"),
    [
        ("good", "node1"),
        ("debian", "node1"),
        ("debian", "10.77.0.1"),
        ("none", "10.77.0.1"),
        ("wrong", "10.77.0.1"),
        ("good", "fd00:77::1"),
    ],
)
def test_auto_finds_the_interface_that_connects_the_nodes(run, flavour, address):
    values = worked(run(address, flavour=flavour))
    for value in values:
        assert value["network"] == "gloo over node1: eth0 (10.77.0.1), rank 0; node2: eth0 (10.77.0.2), rank 1"
        assert value["GLOO_SOCKET_IFNAME"] == "eth0"
        assert value["NCCL_SOCKET_IFNAME"] == "=eth0"


@pytest.mark.parametrize(
    ("address", "settings", "chosen", "listening"),
    [
        ("node1", {"flavour": "debian", "places": (1, 1, 2, 2)}, "eth0", None),
        ("node1", {"flavour": "debian", "places": (1, 2, 1)}, "eth0", None),
        ("node2", {"flavour": "wrong", "places": (2, 2)}, "lo", "127.0.0.1"),  # one node
        ("node1", {}, "eth0", "10.77.0.1"),
        ("node1", {"flavour": "debian"}, "eth0", "10.77.0.1"),
        ("10.77.0.1", {"flavour": "wrong", "network_interface": "eth0"}, "eth0", None),
        ("node1", {"network_interface": None}, None, None),
    ],
)
def test_ranks_use_one_interface_and_rank_0_listens_on_its_address_only(run, address, settings, chosen, listening):
    values = worked(run(address, **settings))
    assert {value["GLOO_SOCKET_IFNAME"] for value in values} == {chosen}
    assert listening is None or values[0]["listening"] == [listening]


@pytest.mark.parametrize("flavour", ["good", "wrong"])
def test_hosts_without_ipv4_are_connected(hosts, run, flavour):
    ours = [f"addr del 10.77.0.{n}/24 dev eth0" for n in (1, 2)]
    for n, line in enumerate(ours, start=1):
        hosts.configure(n, line)
    try:
        values = worked(run("fd00:77::1", flavour=flavour))
    finally:
        for n, line in enumerate(ours, start=1):
            hosts.configure(n, line.replace("del", "add"))
    assert values[0]["network"] == "gloo over node1: eth0 (fd00:77::1), rank 0; node2: eth0 (fd00:77::2), rank 1"
    assert values[0]["listening"] == ["fd00:77::1"]


def test_another_port_than_the_clusters_and_a_file_are_used(run, ports, tmp_path):
    worked(run("198.51.100.1", flavour="wrong", init_method=f"tcp://10.77.0.1:{next(ports)}"))
    values = worked(run("198.51.100.1", flavour="none", init_method=f"file://{tmp_path}/meeting"))
    assert {value["GLOO_SOCKET_IFNAME"] for value in values} == {"eth0"}
    assert not list(tmp_path.iterdir())


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
        ("node1", {"network_interface": "lo"}, ["`network.interface=lo`"], AT_ONCE),
        ("node1", {"network_interface": "loopback"}, ["`network.interface=loopback`"], AT_ONCE),
    ],
)  # fmt: skip
def test_an_interface_that_does_not_connect_the_nodes_is_an_error_on_both(run, address, settings, parts, within):
    failed(run(address, **settings), "NetworkInterfaceError", *parts, within=within)


def test_an_interface_that_one_node_lacks_is_an_error_on_both(run):
    second = {"network_interface": "nosuch0", "delay": 5.0}  # rank 0 is there by then
    outcomes = run(network_interface="eth0", only_on_2=second, timeout=60)
    failed(outcomes, "NetworkInterfaceError", "interface `nosuch0` not found on node node2", within=SOON)


def test_a_main_address_without_a_route_is_named(run):
    outcomes = run("node1", flavour="wrong", timeout=2)
    failed(outcomes[1:], "RendezvousError", "node1:", "Network is unreachable", "Set the main address", within=SOON)
    failed(outcomes[:1], "RendezvousError", "rank 1 of 2 ranks did not join", within=SOON)


def test_an_unknown_main_address_is_named(run):
    outcomes = run("node1", flavour="none", timeout=2)
    failed(outcomes[1:], "RendezvousError", "node1:", "instead of `node1`", within=SOON)


def test_a_rank_0_that_never_starts_is_named(hosts, ports):
    settings = {"world_size": 2, "main_address": "10.77.0.1", "main_port": next(ports), "num_nodes": 2, "timeout": 2}
    outcomes = hosts.run("join", [(2, {**settings, "rank": 1})])
    failed(outcomes, "RendezvousError", f"10.77.0.1:{settings['main_port']}", "Connection refused", within=SOON)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_join"])
def test_the_trainer_runs_over_the_chosen_interface_and_listens_nowhere_else(hosts, ports, strategy):
    shared = {"num_nodes": 2, "main_address": "node1", "main_port": next(ports), "network_interface": "auto"}
    shared["strategy"] = strategy
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
