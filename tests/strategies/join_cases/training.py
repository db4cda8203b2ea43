"""Kinds of optimization."""

import gc
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.strategies.ddp_modules import Adversaries, Fused
from tests.strategies.join_cases.casing import COUNTS, RANK, case, fit, loader, trainer
from tests.strategies.join_ranks import Classifier, digest_of

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


@case
def messages(folder: str) -> Any:
    class Silent(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    found = {}
    for name, stream, window in (("sized", False, 1), ("stream", True, 1), ("accumulated stream", True, 2)):
        counting = Messages()
        fit(Silent(), loader(16, 16, 12, stream=stream), callbacks=[counting], accumulate_grad_batches=window)
        found[name] = counting.by_step[2:5], counting.by_step[0]
    return found


def count_threads(expected: int) -> int:
    """Count the threads of this process; those that are about to end have a second to do so."""
    deadline = time.monotonic() + 1
    while (number := len(list(Path("/proc/self/task").iterdir()))) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return number


@case
def repeated_runs(folder: str) -> Any:
    """Threads of this process after each run, of which nothing is left to the garbage collector."""
    module, found = Classifier(), []
    gc.collect()
    gc.disable()
    for _ in range(4):
        made = trainer()
        made.fit(module, loader(*COUNTS), loader(2, 2, 2, stream=True))
        made.validate(module, loader(*COUNTS), verbose=False)
        found.append(count_threads(found[0] if found else 0))
    gc.enable()
    return found


@case
def normalisation(folder: str) -> Any:
    module = Classifier()
    module.network.insert(1, nn.BatchNorm1d(8))
    return fit(module, max_epochs=2)[1].digests


@case
def compressed_gradients(folder: str) -> Any:
    return fit(Classifier(), strategy={"ddp_comm_hook": default_hooks.fp16_compress_hook})[1].digests


@case
def an_optimizer_inside_of_the_backward_pass(folder: str) -> Any:
    class Fusing(Classifier):
        def configure_optimizers(self) -> Any:
            return Fused(self.parameters(), lr=0.1)

    return fit(Fusing())[1].digests


@case
def parameters_that_are_whole_numbers(folder: str) -> Any:
    module = Classifier()
    module.order = nn.Parameter(torch.arange(3) + RANK, requires_grad=False)
    fit(module)
    return module.order.tolist()


@case
def statistics_of_averaged_weights(folder: str) -> Any:
    """Renew the statistics of batch normalisation in a last epoch; returns those of its inputs."""
    module = Classifier()
    module.network.insert(0, nn.BatchNorm1d(6))
    fit(module, max_epochs=3, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)])
    return module.network[0].running_mean.tolist()


@case
def manual_optimization(folder: str) -> Any:
    module = Adversaries()
    parts = [part[1][:, :5] for part in loader(*COUNTS)]
    made = trainer(max_epochs=2)
    made.fit(module, DataLoader([(part, part) for part in parts], batch_size=None))
    return made.global_step, [digest_of(module, optimizer) for optimizer in made.optimizers]


class Words(LightningModule):
    """Has sparse gradients that are left after a step, a scaler that grows, and a buffer of each rank's own."""

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


@case
def logging_around_manual_backward_passes(folder: str) -> Any:
    _, trace = fit(Accumulating())
    return trace.digests, trace.metrics


@case
def values_of_steps_for_averaged_weights(folder: str) -> Any:
    class Logging(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("rank", float(RANK), on_step=True, on_epoch=False, sync_dist=True)
            return self.loss(batch)

    module = Logging()
    module.network.insert(0, nn.BatchNorm1d(6))
    _, trace = fit(module, max_epochs=3, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)])
    return [metrics["rank"] for metrics in trace.metrics[-4:]]


@case
def manual_optimization_of_words(folder: str) -> Any:
    module = Words()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    states = []

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Any, module: Words, *_: Any) -> None:
            gradient = module.words.weight.grad
            values = [gradient.to_dense(), *module.words.parameters(), *module.top.parameters()]
            states.append((gradient.is_sparse, scaler.get_scale(), [value.tolist() for value in values]))

    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    made = trainer(Reading(), precision=None, plugins=[plugin], enable_checkpointing=False)
    made.fit(module, loader(*COUNTS))
    kept = made.optimizers[1].state[module.own]["exp_avg"]
    return states, [module.queue.tolist(), module.own.tolist(), kept.tolist()]


@case
def gradients_within_a_window(folder: str) -> Any:
    """Whether there is one after each backward pass, and the last of the window."""

    class Looking(Classifier):
        def on_after_backward(self) -> None:
            found.append(self.network[0].weight.grad)

    found: list[Any] = []
    fit(Looking(), accumulate_grad_batches=2)
    return [gradient is None for gradient in found], found[-1].tolist()
