"""The row of `doctor` with the speed of devices."""

import pytest
import torch

from lightning_ddp_ext.cli.devices import DeviceSpeed, describe_devices, measure_device, suggest_split


@pytest.mark.parametrize(
    ("speeds", "split"),
    [
        ([4.0, 4.6], None),
        ([1.0, 3.0], [1, 3]),
        ([9.1, 3.0, 3.1], [3, 1, 1]),
        ([2.0, 3.0], [2, 3]),
        ([1.0, 1.3], [3, 4]),
        ([50.0, 1.0], [50, 1]),
        ([7.0], None),
    ],
)
def test_shares_follow_the_speed_of_unequal_devices(speeds, split):
    assert suggest_split(speeds) == split


def test_devices_are_listed_with_a_split_that_the_command_accepts():
    devices = [DeviceSpeed("cuda:0", "Tesla T4", 4e12), DeviceSpeed("cuda:1", "Tesla P4", 2.04e12)]
    assert describe_devices(devices, "replica").splitlines() == [
        "replica 0: cuda:0 (Tesla T4), 4,000 GFLOP/s",
        "replica 1: cuda:1 (Tesla P4), 2,040 GFLOP/s",
        "suggested for `balanced_dp` and `balanced_ddp`: strategy.split=[2,1]",
    ]
    assert describe_devices(devices[:1] * 2, "rank").splitlines() == [
        "rank 0: cuda:0 (Tesla T4), 4,000 GFLOP/s",
        "rank 1: cuda:0 (Tesla T4), 4,000 GFLOP/s",
    ]


def test_a_device_that_takes_longer_is_slower(monkeypatch):
    fast = measure_device(torch.device("cpu"))
    monkeypatch.setattr("lightning_ddp_ext.cli.devices.time_call", lambda call, device: 1.0)
    slow = measure_device(torch.device("cpu"))
    assert (slow.device, slow.name, slow.speed) == ("cpu", "", 2 * 512**3)
    assert fast.speed > slow.speed
