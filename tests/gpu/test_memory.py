"""Memory of a device: saved by activation checkpointing, and run out of on one rank."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from tests.gpu.training import RANKED, Regression, Task, difference, plain, rows, train
from tests.support import devices
from tests.support.processes import RankError

WIDTH, LENGTH = 64, 128


def transformer():
    options = {"dropout": 0.1, "batch_first": True, "dtype": torch.float64}
    return nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options) for _ in range(6)))


class PeakMemory(Callback):
    """Measures the peak of the last batch."""

    found = 0

    def on_train_batch_start(self, trainer, *_):
        if not devices.is_cpu():
            torch.accelerator.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer, *_):
        if not devices.is_cpu():
            self.found = torch.accelerator.max_memory_allocated()


@pytest.mark.parametrize("name", RANKED)
def test_activation_checkpointing_saves_memory_and_keeps_gradients(name, record_property):
    """Dropout draws the same masks when a segment is recomputed."""

    def run(policy):
        batch, strategy = partial(rows, shape=(LENGTH, WIDTH)), {"activation_checkpointing": policy}
        task = Task(partial(Regression, transformer), batch, ((4, 4, 4), (3, 4, 4)), {}, strategy, PeakMemory)
        return train(name, task)

    kept, recomputed = run(None), run(nn.TransformerEncoderLayer)
    assert difference(recomputed[0], kept[0]) < devices.tolerance()
    if not devices.is_cpu():
        record_property("peak in MiB", f"{recomputed[0].found / 2**20:.1f}, without it {kept[0].found / 2**20:.1f}")
        assert recomputed[0].found < 0.75 * kept[0].found


class OutOfMemory(Regression):
    """Asks for more memory than there is in the third batch, on rank 1."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            torch.empty(2**60, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", RANKED)
def test_a_rank_without_memory_ends_all_ranks(name):
    batches = (2,) * 6
    task = Task(partial(OutOfMemory, plain), sizes=(batches, batches), strategy={"stall_timeout": 15})
    with pytest.raises(RankError) as raised:
        train(name, task, timeout=100)
    first, _, rest = str(raised.value).partition("\n")
    assert first.startswith("rank 1 of 2 raised")
    assert "memory" in first
    failure = rest.partition("--- rank 0 raised ")[2].partition("\n")[0]
    assert "rank 1" in failure, rest
