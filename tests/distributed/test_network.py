import os

import pytest

from lightning_ddp_ext.distributed import network
from lightning_ddp_ext.distributed.network import (
    address_towards,
    check_gloo_variable,
    check_interface,
    default_gloo_interface,
    find_interface,
    interface_addresses,
    interface_with,
    is_loopback,
    pin_interface,
    resolve,
    unpin_interface,
)
from lightning_ddp_ext.errors import NetworkInterfaceError

GLOO, NCCL = VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    yield
    unpin_interface()


@pytest.fixture
def invented(monkeypatch):
    """Interfaces that this machine does not have."""
    found = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2", "fd00::2"], "ib0": ["fe80::1%ib0"], "down0": []}
    monkeypatch.setattr(network, "interface_addresses", lambda: found)


def loopback():
    return next(name for name, addresses in interface_addresses().items() if "127.0.0.1" in addresses)


def values():
    return [os.environ.get(variable) for variable in VARIABLES]


def test_the_loopback_interface_is_found_and_is_an_error_for_several_nodes():
    for name in ("loopback", loopback()):
        found = find_interface(name)
        assert (found.name, found.addresses, found.is_loopback) == (loopback(), ("127.0.0.1",), True)
        with pytest.raises(NetworkInterfaceError, match="which other nodes cannot reach, and the run has 3 of them"):
            check_interface(name, num_nodes=3)


@pytest.mark.usefixtures("invented")
def test_an_interface_that_is_missing_or_has_no_address_is_an_error_that_lists_the_others():
    for name, message in (
        ("nosuch0", r"`nosuch0` not found on node .*eth0 \(10\.0\.0\.2, fd00::2\).*Set `network.interface` to one"),
        ("", r"no interface named on node .*Set `network.interface`"),
        ("down0", "interface `down0` has no address on node"),
    ):
        with pytest.raises(NetworkInterfaceError, match=message):
            check_interface(name)


@pytest.mark.usefixtures("invented")
def test_an_interface_is_found_by_any_of_its_addresses_and_has_the_one_that_gloo_takes():
    assert interface_with("fd00::2") == interface_with("10.0.0.2") == network.Interface("eth0", ("10.0.0.2",))
    assert interface_with("fe80::1").name == "ib0"
    assert interface_with("10.0.0.3") is None


def test_addresses_are_resolved_and_routed():
    assert [is_loopback(address) for address in ("127.0.1.1", "::1", "10.0.0.1")] == [True, True, False]
    assert is_loopback(resolve("localhost")[0])
    assert resolve("no.such.host.invalid") == []
    assert address_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.usefixtures("invented")
def test_gloo_takes_the_interface_of_its_variable_and_otherwise_the_address_of_the_nodes_name(monkeypatch):
    monkeypatch.setattr(network, "resolve", lambda host: ["192.0.2.1", "fd00::2"])
    assert default_gloo_interface() == network.Interface(None, ("fd00::2",))
    monkeypatch.setattr(network, "resolve", lambda host: [])
    assert default_gloo_interface() == network.Interface(None, ("127.0.0.1",))
    monkeypatch.setenv(GLOO, "eth0,lo")
    assert default_gloo_interface() == network.Interface("eth0,lo", ("10.0.0.2", "127.0.0.1"))
    check_gloo_variable("gloo", "auto")
    monkeypatch.setenv(GLOO, "eth7")
    with pytest.raises(NetworkInterfaceError, match=r"`eth7` in the environment variable `GLOO_.*Unset the variable"):
        check_gloo_variable("gloo", "auto")
    check_gloo_variable("nccl", "auto")
    check_gloo_variable("gloo", "eth0")


def test_an_interface_is_pinned_in_the_syntax_of_each_backend_until_it_is_unpinned(monkeypatch):
    monkeypatch.setenv(GLOO, "before")
    for name in ("eth0", "eth1"):
        pin_interface(name)
        assert values() == [name, f"={name}"]
    unpin_interface()
    assert values() == ["before", None]
    monkeypatch.delenv(GLOO)
    monkeypatch.setenv(NCCL, "^docker")
    pin_interface("eth0", keep=True)  # the user's variables
    assert values() == ["eth0", "^docker"]
    monkeypatch.setenv(GLOO, "eth5")  # changed since
    unpin_interface()
    assert values() == ["eth5", "^docker"]
