import os

import pytest

from lightning_ddp_ext.errors import NetworkInterfaceError
from lightning_ddp_ext.network.interfaces import interface_addresses, pin_interface

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "before")


def loopback():
    return next(name for name, addresses in interface_addresses().items() if "127.0.0.1" in addresses)


def test_the_loopback_interface_is_listed_with_its_address():
    assert "127.0.0.1" in interface_addresses()[loopback()]


@pytest.mark.parametrize("name", ["loopback", loopback()])
def test_an_interface_is_pinned_for_every_back_end(name):
    pin_interface(name)
    assert [os.environ[variable] for variable in VARIABLES] == [loopback()] * 2


@pytest.mark.parametrize("name", [None, "auto"])
def test_the_choice_can_be_left_to_the_back_end(name):
    pin_interface(name)
    assert [os.environ[variable] for variable in VARIABLES] == ["before"] * 2


def test_a_missing_interface_is_an_error_that_lists_the_real_ones():
    with pytest.raises(NetworkInterfaceError, match=r"`nosuch0` not found on host .*127\.0\.0\.1"):
        pin_interface("nosuch0")
    assert [os.environ[variable] for variable in VARIABLES] == ["before"] * 2


def test_an_interface_that_was_not_named_is_asked_for():
    with pytest.raises(NetworkInterfaceError, match=r"no interface named on host .*Set `network.interface`"):
        pin_interface("")
