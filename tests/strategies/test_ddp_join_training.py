"""Kinds of optimization, and resuming, under `ddp_join` on ranks with different amounts of data. One launch for all."""

import gc
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPJoinStrategy
from tests.strategies.ddp_modules import Adversaries, Fused, Noisy
from tests.strategies.join_ranks import (
    COUNTS,
    RANK,
    Classifier,
    assert_identical,
    digest_of,
    fit,
    gather,
    loader,
    run_cases,
    samples,
    trainer,
    values_of,
)
from tests.support import devices
from tests.support.devices import accelerator
from tests.support.processes import run_processes

COLLECTIVES = ("all_reduce", "all_gather", "broadcast")


class Messages(Callback):
    """Counts the collectives of each step."""

    def __init__(self) -> None:
        self.by_step: list[int] = []
        self.patches = [mock.patch.object(dist, name, wraps=getattr(dist, name)) for name in COLLECTIVES]

    def on_train_start(self, *_: Any) -> None:
        self.mocks = [patch.start() for patch in self.patches]

    def on_train_batch_end(self, *_: Any) -> None:
        self.by_step.append(sum(one.call_count for one in self.mocks))
        for one in self.mocks:
            one.reset_mock()

    def on_train_end(self, *_: Any) -> None:
        for patch in self.patches:
            patch.stop()


def a_step_is_one_message_whether_loaders_know_their_length_or_not(folder: str) -> None:
    class Silent(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    for stream, window in ((False, 1), (True, 1), (True, 2)):
        counting = Messages()
        fit(Silent(), loader(16, 16, 12, stream=stream), callbacks=[counting], accumulate_grad_batches=window)
        assert counting.by_step[0] > 1
        # On other devices than CPUs, the host reads control values from a message of their own.
        most = 1 if devices.is_cpu() else 2
        assert max(counting.by_step[2:5]) == most, (stream, window, counting.by_step)
        assert min(counting.by_step[2:5]) >= 1


def count_threads(expected: int) -> int:
    """Count the threads of this process; those that are about to end have a second to do so."""
    deadline = time.monotonic() + 1
    while (number := len(list(Path("/proc/self/task").iterdir()))) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return number


def process_groups_and_their_threads_end_with_a_run(folder: str) -> None:
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


def ranks_stay_identical_under_every_kind_of_step(folder: str) -> None:
    class Fusing(Classifier):
        def configure_optimizers(self) -> Any:
            return Fused(self.parameters(), lr=0.1)

    normalised = Classifier()
    normalised.network.insert(1, nn.BatchNorm1d(8))
    hook = {"ddp_comm_hook": default_hooks.fp16_compress_hook}
    for module, strategy in ((normalised, {}), (Classifier(), hook), (Fusing(), {})):
        assert_identical(fit(module, strategy=strategy)[1].digests)


def integer_parameters_become_those_of_rank_0(folder: str) -> None:
    module = Classifier()
    module.order = nn.Parameter(torch.arange(3) + RANK, requires_grad=False)
    fit(module)
    assert module.order.tolist() == [0, 1, 2]


def averaged_weights_have_the_statistics_of_all_samples(folder: str) -> None:
    """In its last epoch, `StochasticWeightAveraging` renews the statistics of batch normalisation without updates."""

    class Logging(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("rank", float(RANK), on_step=True, on_epoch=False, sync_dist=True)
            return self.loss(batch)

    module = Logging()
    module.network.insert(0, nn.BatchNorm1d(6))
    _, trace = fit(module, max_epochs=3, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)])
    assert module.network[0].running_mean.tolist() == pytest.approx(samples(14)[1].mean(0).tolist(), rel=1e-9)
    assert [metrics["rank"] for metrics in trace.metrics[-4:]] == [1, 0.5, 0, 0]  # means over the ranks with data


def manual_optimization_steps_on_all_ranks(folder: str) -> None:
    module = Adversaries()
    parts = [part[1][:, :5] for part in loader(*COUNTS)]
    made = trainer(max_epochs=2)
    made.fit(module, DataLoader([(part, part) for part in parts], batch_size=None))
    assert made.global_step == 2 * 2 * 4
    assert_identical([digest_of(module, optimizer) for optimizer in made.optimizers])


class Words(LightningModule):
    """Leaves sparse gradients after a step; a parameter and a buffer are excluded from synchronisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.words = nn.Embedding(9, 3, sparse=True)
        self.top = nn.Linear(3, 2)
        self.own = nn.Parameter(torch.ones(RANK + 1))
        self.register_buffer("queue", torch.full((2,), float(RANK)))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["queue", "own"])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        scores = self.top(self.words(batch[0] % 9)).float()
        self.manual_backward(nn.functional.cross_entropy(scores, batch[2] % 2))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        own = torch.optim.Adam([*self.top.parameters(), self.own])
        average = torch.full_like(self.own, float(RANK))
        own.state[self.own] = {"step": torch.tensor(1.0), "exp_avg": average, "exp_avg_sq": average.clone()}
        return torch.optim.SGD(self.words.parameters(), lr=0.1), own


def manual_optimization_shares_scalers_and_sparse_gradients_but_no_excluded_tensors(folder: str) -> None:
    module = Words()
    scaler = torch.amp.GradScaler(accelerator(), init_scale=2.0, growth_interval=1)
    states, found = [], []

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Any, module: Words, *_: Any) -> None:
            gradient = module.words.weight.grad
            values = [gradient.to_dense(), *module.words.parameters(), *module.top.parameters()]
            states.append([value.tolist() for value in values])
            found.append((gradient.is_sparse, scaler.get_scale()))

    plugin = MixedPrecision("16-mixed", accelerator(), scaler)
    made = trainer(Reading(), precision=None, plugins=[plugin], enable_checkpointing=False)
    made.fit(module, loader(*COUNTS))
    assert_identical(states)
    assert found == [(True, 2.0 * 4 ** (1 + step)) for step in range(4)]
    kept = made.optimizers[1].state[module.own]["exp_avg"]
    assert module.queue.tolist() == [RANK] * 2
    assert module.own.tolist() == [1] * (RANK + 1)
    assert kept.tolist() == [RANK] * (RANK + 1)


class Accumulating(Classifier):
    """Steps every other batch, and logs before and between backward passes; rank 0 makes more of those."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.log("before", loss, sync_dist=True)
        for _ in range(2 if RANK == 0 else 1):
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(loss / 4, retain_graph=True)
        self.manual_backward(loss / 2)
        self.log("between", loss, sync_dist=True)
        optimizer.step()
        optimizer.zero_grad()


def values_logged_around_manual_backward_passes_are_synchronised(folder: str) -> None:
    _, trace = fit(Accumulating())
    assert_identical((trace.digests, trace.metrics))
    assert len(trace.digests) == 4
    assert all(metrics.keys() >= {"before", "between"} for metrics in trace.metrics)


def within_a_window_a_rank_finds_its_own_gradient_or_none(folder: str) -> None:
    found: list[Any] = []

    class Looking(Classifier):
        def on_after_backward(self) -> None:
            found.append(self.network[0].weight.grad)

    fit(Looking(), accumulate_grad_batches=2)
    assert [gradient is None for gradient in found] == [False, False, RANK > 0, False]
    assert_identical(found[-1].tolist())


def a_resumed_run_ends_as_the_whole_run(folder: str) -> None:
    """Resume before any rank has joined, and in the uneven phase."""
    for steps in (1, 3, 6):
        seed_everything(0, verbose=False)
        whole = fit(Classifier(), max_epochs=2)[1].digests
        seed_everything(0, verbose=False)
        saving = ModelCheckpoint(f"{folder}/{steps}", every_n_train_steps=steps, save_top_k=-1)
        fit(Classifier(), max_epochs=2, max_steps=steps, callbacks=[saving], enable_checkpointing=True)
        path = gather(saving.best_model_path)[0]
        assert fit(Classifier().double(), max_epochs=2, ckpt_path=path)[1].digests == whole[steps:] != []


class Thawing(LightningModule):
    """Thaws layers one after another and uses them in another order than the order of creation."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.middle, self.bottom = nn.Linear(50, 1), nn.Linear(40, 50), nn.Linear(6, 40)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.bottom.requires_grad_(self.global_step > 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.top(self.middle(self.bottom(batch[1].double()).tanh()).tanh()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def a_resumed_run_has_the_buckets_that_had_grown(folder: str) -> None:
    """With other buckets, sums over three ranks would be rounded differently. The first rank joins first."""
    counts = (2, 6, 8)
    saving = ModelCheckpoint(f"{folder}/grown", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(Thawing(), loader(*counts), max_epochs=2, callbacks=[saving], enable_checkpointing=True)[1].digests
    for steps in (1, 3, 6):
        path = gather(f"{folder}/grown/step={steps}.ckpt")[0]
        _, trace = fit(Thawing().double(), loader(*counts), max_epochs=2, ckpt_path=path)
        assert trace.digests == whole[steps:] != []


class Sampling(Classifier):
    """Masks inputs with random numbers that differ among ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        torch.rand(RANK)
        index, features, labels = batch
        return super().loss((index, functional.dropout(features), labels))

    def configure_optimizers(self) -> Any:
        return Noisy(self.parameters(), lr=0.1)


def optimizers_draw_the_same_numbers_on_all_ranks_and_steps_draw_different_ones(folder: str) -> None:
    os.environ.pop("PL_GLOBAL_SEED")  # with which Lightning would seed all ranks alike
    torch.manual_seed(RANK)
    module = Sampling()
    saving = ModelCheckpoint(f"{folder}/drawing", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(module, max_epochs=2, callbacks=[saving], enable_checkpointing=True)[1].digests
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


CASES = [
    a_step_is_one_message_whether_loaders_know_their_length_or_not,
    process_groups_and_their_threads_end_with_a_run,
    ranks_stay_identical_under_every_kind_of_step,
    integer_parameters_become_those_of_rank_0,
    averaged_weights_have_the_statistics_of_all_samples,
    manual_optimization_steps_on_all_ranks,
    manual_optimization_shares_scalers_and_sparse_gradients_but_no_excluded_tensors,
    values_logged_around_manual_backward_passes_are_synchronised,
    within_a_window_a_rank_finds_its_own_gradient_or_none,
    a_resumed_run_ends_as_the_whole_run,
    a_resumed_run_has_the_buckets_that_had_grown,
    optimizers_draw_the_same_numbers_on_all_ranks_and_steps_draw_different_ones,
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(run_cases, 3, CASES, str(tmp_path_factory.mktemp("training")), timeout=200)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_every_rank(found, case):
    values_of(found, case)


def test_a_hook_that_keeps_state_is_refused():
    """Ranks without data do not run it."""
    with pytest.raises(ValueError, match="`ddp_comm_hook` must be one of torch's that keep no state"):
        DDPJoinStrategy(ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=object())
