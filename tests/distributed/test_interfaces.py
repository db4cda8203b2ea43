import os

import pytest

from lightning_ddp_ext.distributed import interfaces
from lightning_ddp_ext.distributed.interfaces import (
    address_towards,
    check_interface,
    find_interface,
    gloos_choice,
    interface_addresses,
    interface_with,
    is_local,
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
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: found)


def loopback():
    return next(name for name, addresses in interface_addresses().items() if "127.0.0.1" in addresses)


def values():
    return [os.environ.get(variable) for variable in VARIABLES]


def test_the_loopback_interface_is_listed_with_its_address():
    assert "127.0.0.1" in interface_addresses()[loopback()]


@pytest.mark.parametrize("name", ["loopback", loopback()])
def test_the_loopback_interface_is_found(name):
    assert find_interface(name).name == loopback()
    assert find_interface(name).is_loopback


@pytest.mark.parametrize("name", [None, "auto"])
def test_a_choice_that_is_left_open_cannot_be_wrong(name):
    check_interface(name, num_nodes=2)


def test_a_missing_interface_is_an_error_that_lists_the_real_ones():
    with pytest.raises(NetworkInterfaceError, match=r"`nosuch0` not found on host .*127\.0\.0\.1.*Set `network"):
        check_interface("nosuch0")


def test_an_interface_that_was_not_named_is_asked_for():
    with pytest.raises(NetworkInterfaceError, match=r"no interface named on host .*Set `network.interface`"):
        check_interface("")


@pytest.mark.usefixtures("invented")
def test_an_interface_without_an_address_is_refused():
    with pytest.raises(NetworkInterfaceError, match="interface `down0` has no address on host"):
        find_interface("down0")


@pytest.mark.parametrize("name", ["loopback", loopback()])
def test_the_loopback_interface_is_refused_for_several_hosts(name):
    check_interface(name, num_nodes=1)
    with pytest.raises(NetworkInterfaceError, match="which other hosts cannot reach, and the run has 3 of them"):
        check_interface(name, num_nodes=3)


@pytest.mark.usefixtures("invented")
def test_an_interface_is_found_by_any_of_its_addresses_and_has_the_one_that_gloo_takes():
    assert interface_with("fd00::2") == interface_with("10.0.0.2") == interfaces.Interface("eth0", ("10.0.0.2",))
    assert interface_with("fe80::1").name == "ib0"
    assert interface_with("10.0.0.3") is None
    assert is_local("10.0.0.2")
    assert not is_local("10.0.0.3")


@pytest.mark.parametrize(("address", "expected"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False)])
def test_loopback_addresses_are_recognised(address, expected):
    assert is_loopback(address) is expected


def test_names_are_resolved_and_unknown_ones_are_nothing():
    assert is_loopback(resolve("localhost")[0])
    assert resolve("127.0.0.1") == ["127.0.0.1"]
    assert resolve("no.such.host.invalid") == []


def test_the_address_towards_a_host_is_that_of_the_route():
    assert address_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.usefixtures("invented")
def test_gloo_takes_what_the_environment_says_and_otherwise_the_address_of_the_hosts_name(monkeypatch):
    monkeypatch.setattr(interfaces, "resolve", lambda host: ["192.0.2.1", "fd00::2"])
    assert gloos_choice() == interfaces.Interface(None, ("fd00::2",))
    monkeypatch.setattr(interfaces, "resolve", lambda host: [])
    assert gloos_choice() == interfaces.Interface(None, ("127.0.0.1",))
    monkeypatch.setenv(GLOO, "eth0,lo")
    assert gloos_choice() == interfaces.Interface("eth0,lo", ("10.0.0.2", "127.0.0.1"))
    monkeypatch.setenv(GLOO, "eth7")
    with pytest.raises(NetworkInterfaceError, match=r"`eth7` in the environment variable `GLOO_.*Unset the variable"):
        gloos_choice()


def test_an_interface_is_pinned_in_the_syntax_of_each_back_end():
    pin_interface("eth0")
    assert values() == ["eth0", "=eth0"]


def test_a_pin_is_taken_back(monkeypatch):
    monkeypatch.setenv(GLOO, "before")
    pin_interface("eth0")
    pin_interface("eth1")
    assert values() == ["eth1", "=eth1"]
    unpin_interface()
    assert values() == ["before", None]


def test_what_somebody_else_has_set_is_kept_where_asked_for(monkeypatch):
    monkeypatch.setenv(NCCL, "^docker")
    pin_interface("eth0", keep=True)
    assert values() == ["eth0", "^docker"]
    unpin_interface()
    assert values() == [None, "^docker"]


def test_what_was_changed_since_is_kept(monkeypatch):
    pin_interface("eth0")
    monkeypatch.setenv(GLOO, "eth5")
    unpin_interface()
    assert values() == ["eth5", None]
