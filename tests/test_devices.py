"""Devices of any kind: the accelerator of a machine, the widest floating-point type of a device, time and memory."""

import pytest
import torch

from lightning_ddp_ext import _devices as devices
from lightning_ddp_ext._devices import (
    Timer,
    available_memory,
    current_device,
    find_accelerator,
    peak_memory,
    reports_memory,
    restart_peak,
    widest_float,
)
from tests import virtual_accelerator


@pytest.fixture
def refuse(monkeypatch):
    """Let the computation of `widest_float` raise an error."""

    def let(error):
        def ones(*args, **kwargs):
            raise error

        monkeypatch.setattr(devices.torch, "ones", ones)
        widest_float.cache_clear()

    yield let
    widest_float.cache_clear()


def test_a_device_without_double_precision_gets_single_but_missing_memory_is_an_error(refuse):
    assert widest_float(torch.device("cpu")) == torch.float64
    for error in (
        TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."),
        RuntimeError("Required aspect fp64 is not supported on the device"),
    ):
        refuse(error)
        assert widest_float(torch.device("meta")) == torch.float32
    refuse(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(torch.OutOfMemoryError):
        widest_float(torch.device("meta"))


def test_the_accelerator_of_a_machine_is_found(monkeypatch):
    for found, kind in ((None, "cpu"), (torch.device("xpu"), "xpu")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda found=found: found)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda found=found: found is not None)
        assert find_accelerator() == kind


def test_a_job_is_timed_by_its_device_and_not_by_the_host(virtual_devices):
    timer = Timer(virtual_devices[1])
    with current_device(virtual_devices[1]):
        timer.start()
        torch.ones(3, device=virtual_devices[1])
        timer.stop()
    assert not timer.is_done()  # the host is ahead of the device
    assert "host waits" not in virtual_accelerator.counts()
    assert timer.seconds > 0


def test_the_memory_of_a_device_is_measured(virtual_devices):
    device = virtual_devices[2]
    assert reports_memory(device)
    assert not reports_memory(torch.device("cpu"))
    free, held = available_memory(device), torch.accelerator.memory_allocated(device)
    torch.ones(2**20, device=device)
    restart_peak(device)
    assert peak_memory(device) >= held + 2**22  # of the time before the restart
    assert torch.accelerator.max_memory_allocated(device) == held
    assert available_memory(device) == free  # what this process holds may be used again


def test_the_accelerator_of_this_machine_is_found(virtual_devices):
    assert find_accelerator() == "virtual"
