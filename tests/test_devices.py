"""Devices of any kind: the accelerator of a machine, and the widest floating-point type of a device."""

import pytest
import torch

from lightning_ddp_ext import _devices as devices
from lightning_ddp_ext._devices import find_accelerator, widest_float


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
