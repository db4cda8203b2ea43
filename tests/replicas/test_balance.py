"""`balance="auto"`: when it is chosen, and the limits that memory sets."""

import pytest
import torch

from lightning_ddp_ext.replicas.balance import BatchDivision, DeviceMemory, advice
from lightning_ddp_ext.replicas.replicated_step import BatchRecord


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        ({}, ["cpu", "cpu"], False),
        ({"balance": "even"}, ["cpu", "meta"], False),
        ({}, ["cpu", "meta"], True),  # distinct devices
        ({"balance": "auto"}, ["cpu", "cpu"], True),
        ({"balance": "auto"}, ["cpu"], False),
        ({"split": [1, 2]}, ["cpu", "meta"], False),
        ({"gpu0_batch_size": 1}, ["cpu", "meta"], False),
    ],
)
def test_the_default_is_auto_for_distinct_devices_only(options, devices, expected):
    division = BatchDivision(**{"gpu0_batch_size": None, "split": None, "balance": None, **options})
    division.start([torch.device(name) for name in devices])
    assert (division.state_dict() != {}) is expected


class Timed(BatchRecord):
    @property
    def seconds(self):
        return [3.0 * self.sizes[0], 1.0 * self.sizes[1]]


def test_free_memory_limits_the_chunks_of_cuda_devices(monkeypatch):
    memories = {0: memory("cuda:0", 10, 1, 5), 1: memory("cuda:1", 10, 1, 2, chunk=1)}  # room for 16 and for 8
    monkeypatch.setattr(DeviceMemory, "read", lambda device, largest: memories[device.index])
    division = BatchDivision(None, None, "auto")
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    division.start(devices)
    assert division.chunk_sizes(16, 2) == [8, 8]
    for _ in range(20):
        division.observe(Timed(division.chunk_sizes(16, 2), []), devices)
    assert division.chunk_sizes(16, 2) == [8, 8]  # 4 and 12 take equally long
    assert division.chunk_sizes(18, 2) == [10, 8]


def memory(name, available, held, peak, chunk=8):
    return DeviceMemory(name, available * 2**30, held * 2**30, peak * 2**30, chunk)


def test_the_number_of_samples_that_fit_follows_from_the_peak():
    # 8 samples take 4 GiB; 0.9 x 10 GiB less the 3 GiB that are held leave room for 12.
    assert memory("cuda:0", 10, 3, 7).most_samples == 12
    assert memory("cuda:0", 10, 9, 10).most_samples == 0
    assert memory("cuda:0", 10, 3, 3).most_samples is None
    assert memory("cuda:0", 10, 3, 7, chunk=0).most_samples is None


def test_memory_that_samples_cannot_balance_is_said_with_numbers():
    text = advice([memory("cuda:0", 10, 9, 10), memory("cuda:1", 10, 2, 6)])
    assert text is not None
    assert "cuda:0 holds 9.00 GiB before it has a sample, more than the 6.00 GiB that cuda:1 needs" in text
    assert "`gpu0_batch_size=0`" in text
    other = advice([memory("cuda:0", 10, 2, 6), memory("cuda:1", 10, 9, 10)])
    assert other is not None
    assert "`split`" in other
    assert advice([memory("cuda:0", 10, 5, 9), memory("cuda:1", 10, 2, 6)]) is None
    assert advice([memory("cuda:0", 10, 5, 9)]) is None
