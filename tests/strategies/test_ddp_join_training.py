"""Training of several kinds under `ddp_join` on ranks with 4, 2 and 1 batches: messages, state and random numbers."""

import gc
import os
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.parity.models import Counting
from tests.strategies.toolkit import (
    COUNTS,
    FEATURES,
    RANK,
    Classifier,
    Noisy,
    assert_identical,
    fit,
    gather,
    loader,
    samples,
    trainer,
)
from tests.support import devices
from tests.support.devices import accelerator


class Silent(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class Messages(Callback):
    """Counts the collectives of each step."""

    def __init__(self) -> None:
        self.by_step: list[int] = []
        names = ("all_reduce", "all_gather", "broadcast")
        self.patches = [mock.patch.object(dist, name, wraps=getattr(dist, name)) for name in names]

    def on_train_start(self, *_: Any) -> None:
        self.mocks = [patch.start() for patch in self.patches]

    def on_train_batch_end(self, *_: Any) -> None:
        self.by_step.append(sum(one.call_count for one in self.mocks))
        for one in self.mocks:
            one.reset_mock()

    def on_train_end(self, *_: Any) -> None:
        for patch in self.patches:
            patch.stop()


@pytest.mark.ranks(3)
def test_a_step_is_one_message_whether_loaders_know_their_length_or_not() -> None:
    for stream, window in ((False, 1), (True, 1), (True, 2)):
        counting = Messages()
        fit(Silent(), loader(16, 16, 12, stream=stream), callbacks=[counting], accumulate_grad_batches=window)
        assert counting.by_step[0] > 1
        # On other devices than CPUs, the host reads control values from a separate message.
        most = 1 if devices.is_cpu() else 2
        assert max(counting.by_step[2:5]) == most, (stream, window, counting.by_step)
        assert min(counting.by_step[2:5]) >= 1


def count_threads(expected: int) -> int:
    """Count the threads of this process; those that are about to end have a second to do so."""
    deadline = time.monotonic() + 1
    while (number := len(list(Path("/proc/self/task").iterdir()))) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return number


@pytest.mark.ranks(3)
def test_process_groups_and_their_threads_end_with_a_run() -> None:
    """Forked workers of the next run would wait for the threads; nothing is left to the garbage collector."""
    module, found = Classifier(), []
    gc.collect()
    gc.disable()
    for _ in range(4):
        made = trainer()
        made.fit(module, loader(*COUNTS), loader(2, 2, 2, stream=True))
        made.validate(module, loader(*COUNTS), verbose=False)
        found.append(count_threads(found[0] if found else 0))
    gc.enable()
    assert found == [found[0]] * 4


class Interruption(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise SIGTERMException(143)


def interrupt_a_run() -> None:
    with pytest.raises(SystemExit) as interruption:  # its traceback refers to this frame, which refers to it
        fit(Classifier(), callbacks=[Interruption()])
    assert interruption.value.code == 143


@pytest.mark.ranks(3)
def test_a_worker_does_not_collect_the_process_group_of_an_interrupted_run() -> None:
    """It would wait for the threads of the group, which only its rank has, or crash."""
    gc.collect()
    gc.disable()
    fit(Classifier())
    threads = count_threads(0)
    interrupt_a_run()
    assert count_threads(threads) > threads
    batches = list(loader(*COUNTS))
    collecting: dict[str, Any] = {"num_workers": 1, "worker_init_fn": lambda _: gc.collect(), "timeout": 60}
    _, trace = fit(Classifier(), DataLoader(batches, batch_size=None, **collecting))
    gc.enable()
    assert len(trace.digests) == 4
    gc.collect()
    assert count_threads(threads) == threads


@pytest.mark.ranks(3)
def test_averaged_weights_have_the_statistics_of_all_samples() -> None:
    """In its last epoch, `StochasticWeightAveraging` renews the statistics of batch normalisation without updates."""

    class Logging(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("rank", float(RANK), on_step=True, on_epoch=False, sync_dist=True)
            return self.loss(batch)

    module, norm = Logging(), nn.BatchNorm1d(FEATURES)
    module.network = nn.Sequential(nn.Linear(FEATURES, FEATURES), norm, nn.Linear(FEATURES, 3))
    module.network[0].requires_grad_(False)
    _, trace = fit(module, max_epochs=3, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)])
    hidden = module.network[0](samples(14)[0].to(norm.weight)).mean(0)
    assert norm.running_mean.tolist() == pytest.approx(hidden.tolist(), rel=1e-9)
    assert [metrics["rank"] for metrics in trace.metrics[-4:]] == [1, 0.5, 0, 0]  # means over the ranks with data


class Words(LightningModule):
    """Leaves sparse gradients after a step; a parameter is excluded from synchronisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.words = nn.Embedding(9, 3, sparse=True)
        self.top = nn.Linear(3, 2)
        self.own = nn.Parameter(torch.ones(RANK + 1))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["own"])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        scores = self.top(self.words(batch[2] % 9)).float()
        self.manual_backward(functional.cross_entropy(scores, batch[1] % 2))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        own = torch.optim.Adam([*self.top.parameters(), self.own])
        average = torch.full_like(self.own, float(RANK))
        own.state[self.own] = {"step": torch.tensor(1.0), "exp_avg": average, "exp_avg_sq": average.clone()}
        return torch.optim.SGD(self.words.parameters(), lr=0.1), own


@devices.virtual_devices_lack("sparse tensors")
@pytest.mark.ranks(3)
def test_manual_optimization_shares_scalers_and_sparse_gradients_but_no_excluded_tensors() -> None:
    module, states, found = Words(), [], []
    scaler = torch.amp.GradScaler(accelerator(), init_scale=2.0, growth_interval=1)

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Any, module: Words, *_: Any) -> None:
            gradient = module.words.weight.grad
            values = [gradient.to_dense(), *module.words.parameters(), *module.top.parameters()]
            states.append([value.tolist() for value in values])
            found.append((gradient.is_sparse, scaler.get_scale()))

    made = trainer(Reading(), precision=None, plugins=[MixedPrecision("16-mixed", accelerator(), scaler)])
    made.fit(module, loader(*COUNTS))
    assert_identical(states)
    assert found == [(True, 2.0 * 4 ** (1 + step)) for step in range(4)]
    assert module.own.tolist() == [1] * (RANK + 1)
    assert made.optimizers[1].state[module.own]["exp_avg"].tolist() == [RANK] * (RANK + 1)


def save_every_step(folder: str, name: str) -> dict[str, Any]:
    saving = ModelCheckpoint(f"{folder}/{name}", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    return {"max_epochs": 2, "callbacks": [saving], "enable_checkpointing": True}


class Thawing(LightningModule):
    """Thaws layers one after another and uses them in another order than the order of creation."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.middle, self.bottom = nn.Linear(50, 1), nn.Linear(40, 50), nn.Linear(FEATURES, 40)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.bottom.requires_grad_(self.global_step > 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.top(self.middle(self.bottom(batch[0].double()).tanh()).tanh()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.ranks(3)
def test_a_resumed_run_has_the_buckets_that_had_grown(folder: str) -> None:
    """With other buckets, sums over three ranks would be rounded differently. The first rank joins first."""
    counts = (2, 6, 8)
    whole = fit(Thawing(), loader(*counts), **save_every_step(folder, "grown"))[1].digests
    for steps in (1, 3, 6):
        path = gather(f"{folder}/grown/step={steps}.ckpt")[0]
        trace = fit(Thawing().double(), loader(*counts), max_epochs=2, ckpt_path=path)[1]
        assert trace.digests == whole[steps:] != []


class Sampling(Silent):
    """Masks inputs with random numbers that differ among ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.make_optimizer = partial(Noisy, lr=0.1)
        self.drawn: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        torch.rand(RANK)
        return super().loss((functional.dropout(batch[0]), batch[1]))


@pytest.mark.ranks(3)
def test_optimizers_draw_the_same_numbers_on_all_ranks_and_steps_draw_different_ones(folder: str) -> None:
    os.environ.pop("PL_GLOBAL_SEED")  # with which Lightning would seed all ranks alike
    torch.manual_seed(RANK)
    module = Sampling()
    whole = fit(module, **save_every_step(folder, "drawing"))[1].digests
    torch.manual_seed(RANK + 7)
    again = Sampling()
    path = gather(f"{folder}/drawing/step=3.ckpt")[0]
    resumed = fit(again.double(), max_epochs=2, ckpt_path=path)[1].digests
    assert_identical(whole)
    assert len(set(whole)) == 8
    assert resumed == whole[3:]
    # Rank 1 has two batches in an epoch, rank 2 has one; three steps were made before the interruption.
    assert again.drawn == module.drawn[[3, 2, 1][RANK] :]
    assert len({number for drawn in gather(module.drawn) for number in drawn}) == 2 * (4 + 2 + 1)


class SavingInHook(Callback):
    """Saves in a hook of each batch, and reads the counts once the batch has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.path)

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.path.exists():
            self.found.append(
                (torch.load(self.path, weights_only=False)["state_dict"]["counts"], module.counts.clone())
            )


@pytest.mark.ranks(3)
def test_a_checkpoint_of_a_hook_holds_the_integers_that_all_ranks_get_after_the_batch(folder: str) -> None:
    saving = SavingInHook(Path(folder) / "counts.ckpt")
    fit(Counting("", resets=False), max_epochs=2, callbacks=[saving])
    assert all(saved.equal(after) for saved, after in saving.found)
    assert_identical([after.tolist() for _, after in saving.found])
    assert len({tuple(after.tolist()) for _, after in saving.found}) > 4
