"""`balance="auto"`: when it is chosen, and the limits that memory sets."""

from types import SimpleNamespace

import pytest
import torch

from lightning_ddp_ext._devices import peak_memory
from lightning_ddp_ext.batches import balance_controller
from lightning_ddp_ext.replicas.replicated_step import BatchRecord
from lightning_ddp_ext.strategies.balanced_dp import BatchDivision
from tests.support.training import Classifier, balanced, batches, train


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


def test_times_are_read_when_the_devices_have_finished_and_only_of_batches_with_the_present_shares():
    class Behind(Timed):
        def is_done(self):
            return len(batches) - self.number > 3

        @property
        def seconds(self):
            assert self.is_done()
            read.append(self.number)
            return super().seconds

    division = BatchDivision(None, None, "auto")
    devices = [torch.device("cpu")] * 2
    division.start(devices)
    batches, read = [], []
    for _ in range(40):
        batches.append(Behind(division.split_sizes(16, 2), []))
        batches[-1].number = len(batches) - 1
        division.observe(batches[-1], devices)
    assert division.split_sizes(16, 2) == [4, 12]
    moved = next(index for index, batch in enumerate(batches) if batch.sizes == [4, 12])
    assert read == [*range(moved - 3), *range(moved, 37)]


class FakeMemory:
    """The statistics of two accelerators' memories of 100 bytes, each of which holds one byte between batches."""

    def __init__(self):
        self.peaks = [1, 1]

    def use(self, index, size):
        self.peaks[index] = max(self.peaks[index], 1 + size)

    def get_memory_info(self, device):
        return 99, 100

    def memory_allocated(self, device):
        return 1

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device):
        return self.peaks[device.index]

    def reset_peak_memory_stats(self, device):
        self.peaks[device.index] = 1


@pytest.fixture
def memory(monkeypatch):
    fake = FakeMemory()
    for module in ("_devices", "batches.balance_controller"):
        monkeypatch.setattr(f"lightning_ddp_ext.{module}.memory_statistics", lambda device: fake)
    monkeypatch.setattr("lightning_ddp_ext.strategies.balanced_dp.reports_memory", lambda device: True)
    monkeypatch.setattr("lightning_ddp_ext._devices._earlier_peaks", {})
    return fake


@pytest.mark.parametrize(
    ("evaluated", "limits"),
    [({0}, [22, 22]), ({0, 3}, [22, 22]), ({0, 5, 10, 15}, [None, None])],  # a window has 7 batches
    ids=["sanity check", "validation", "frequent validation"],
)
def test_limits_follow_from_the_peaks_of_training_batches_alone(memory, evaluated, limits):
    division = BatchDivision(None, None, "auto")
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    division.start(devices)
    for batch in range(20):
        if batch in evaluated:
            memory.use(0, 90)
            division.peaks.forget()
        sizes = division.split_sizes(16, 2)
        for index, size in enumerate(sizes):
            memory.use(index, 4 * size)
        division.observe(Timed(sizes, []), devices)
    # 0.9 of 100 bytes, less the one that is held, are enough for 22 samples of four bytes each.
    assert division._controller.limits == limits
    assert peak_memory(devices[0]) == 91


@pytest.mark.usefixtures("memory")
def test_free_memory_limits_the_chunks_of_accelerators(monkeypatch):
    room = {0: 16, 1: 8}
    monkeypatch.setattr(balance_controller, "count_fitting", lambda device, largest: room[device.index])
    division = BatchDivision(None, None, "auto")
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    division.start(devices)
    assert division.split_sizes(16, 2) == [8, 8]
    for _ in range(20):
        division.observe(Timed(division.split_sizes(16, 2), []), devices)
    assert division.split_sizes(16, 2) == [8, 8]  # 4 and 12 take equally long
    assert division.split_sizes(18, 2) == [10, 8]


@pytest.mark.parametrize(
    ("held", "peak", "chunk", "expected"),
    # 8 samples take 4 bytes; 0.9 x 10 bytes less the 3 bytes that are held leave room for 12.
    [(3, 7, 8, 12), (9, 10, 8, 0), (3, 3, 8, None), (3, 7, 0, None)],
)
def test_the_number_of_samples_that_fit_follows_from_the_peak(monkeypatch, held, peak, chunk, expected):
    statistics = SimpleNamespace(memory_allocated=lambda device: held, max_memory_allocated=lambda device: peak)
    monkeypatch.setattr(balance_controller, "memory_statistics", lambda device: statistics)
    monkeypatch.setattr(balance_controller, "available_memory", lambda device: 10)
    assert balance_controller.count_fitting(torch.device("cuda"), chunk) == expected


class Evaluated(Classifier):
    """Takes much more memory for evaluation than for training, and notes the limits before each training batch."""

    def __init__(self):
        super().__init__()
        self.limits = []

    def validation_step(self, batch, batch_idx):
        torch.ones(2**22, device=batch[0].device)

    def on_train_batch_start(self, *args):
        self.limits.append(self.trainer.strategy._division._controller.limits)


def test_evaluation_does_not_lower_the_limits_of_training_on_devices(virtual_devices):
    module = Evaluated()
    strategy = balanced(balance="auto", parallel_devices=virtual_devices[:2])
    options = {"val_loader": batches(16), "val_check_interval": 12, "max_epochs": 1, "accelerator": "virtual"}
    train(module, strategy, 2, loader=batches(8 * 36), **options)
    known = [limit for limits in module.limits for limit in limits if limit is not None]
    assert min(known) > 1000  # the peaks of evaluation leave room for fewer
