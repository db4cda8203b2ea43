"""Training on ranks with different amounts of data, and the same in one process; every rank imports it."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ddp_ext import DDPJoinStrategy
from tests.strategies.ddp_ranks import quiet_trainer

FEATURES, CLASSES = 6, 3
Batch = tuple[Tensor, Tensor, Tensor]


def samples(number: int) -> Batch:
    """Indices, features and labels, the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(number, FEATURES, generator=generator, dtype=torch.float64)
    return torch.arange(number), features, torch.randint(CLASSES, (number,), generator=generator)


@dataclass(frozen=True)
class Case:
    """A training run on ranks with different amounts of data.

    Attributes:
        counts: Samples of each rank; with one number, of a data set that the strategy deals out.
        sizes: Size of each rank's batches.
        kind: `"map"` for a data set that is dealt out, `"list"` for loaders of known length, `"stream"` for others.
        windows: Batches that make up an optimizer step.
        epochs: Number of epochs.
        clip: Limit of the gradient's norm.
        trainer: Other arguments of the Trainer.
        strategy: Arguments of the strategy.
        workers: Worker processes of each loader.
    """

    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    kind: str = "list"
    windows: int = 1
    epochs: int = 2
    clip: float | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    workers: int = 0

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    @property
    def total(self) -> int:
        return sum(self.counts)

    def batches(self, epoch: int) -> list[list[Batch]]:
        """The batches of each rank in an epoch."""
        everything = samples(self.total)
        if self.kind == "map":
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(self.total, generator=generator)
            shards = [order[rank :: self.world_size] for rank in range(self.world_size)]
        else:
            shards = list(torch.split(torch.arange(self.total), self.counts))
        return [
            [tuple(part[indices] for part in everything) for indices in torch.split(shard, size) if len(indices)]
            for shard, size in zip(shards, self.sizes, strict=True)
        ]


class Stream(IterableDataset):
    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.seen: list[int] = []

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.network(batch[1]), batch[2])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen.extend(batch[0].tolist())
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", Classifier.loss(self, batch), on_step=True, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Summed(Classifier):
    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.network(batch[1]), batch[2], reduction="sum") / 30


class Trace(Callback):
    """What a rank has after every batch: a digest of its replica, and the synchronised values."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.metrics: list[dict[str, float]] = []
        self.shadow_ranks: list[bool] = []
        self.validations: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.digests.append(digest_of(module, trainer.optimizers[0]))
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.shadow_ranks.append(trainer.strategy.is_shadow)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.validations.append(trainer.global_step)


def digest_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    parts = [*module.parameters(), *module.buffers(), *states]
    return hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in parts)).hexdigest()


@dataclass
class Outcome:
    """What is left of a run on a rank."""

    parameters: Tensor
    trace: Trace
    seen: list[int]
    global_step: int
    metrics: dict[str, float]


def fit_all(cases: Sequence[Case]) -> list[Outcome]:
    """Train each case on this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return [_fit(case) for case in cases]


def _fit(case: Case) -> Outcome:
    seed_everything(0, verbose=False)
    module = Summed() if case.strategy.get("weight_by") == "sum" else Classifier()
    trace = Trace()
    trainer = quiet_trainer(
        strategy=DDPJoinStrategy(**case.strategy),
        devices=case.world_size,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.windows,
        gradient_clip_val=case.clip,
        callbacks=[trace],
        precision="64-true",
        use_distributed_sampler=case.kind == "map",
        **case.trainer,
    )
    trainer.fit(module, loader_of(case, int(os.environ["RANK"])), validation_of(case))
    parameters = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(parameters, trace, module.seen, trainer.global_step, metrics)


def loader_of(case: Case, rank: int) -> DataLoader:
    if case.kind == "map":
        return DataLoader(TensorDataset(*samples(case.total)), case.sizes[0], shuffle=True, num_workers=case.workers)
    own = case.batches(0)[rank]
    batches = Stream(own) if case.kind == "stream" else own
    return DataLoader(batches, batch_size=None, num_workers=case.workers)


def validation_of(case: Case) -> DataLoader:
    data = TensorDataset(*samples(5))
    if case.kind == "map":
        return DataLoader(data, batch_size=2)
    rank = int(os.environ["RANK"])
    return DataLoader(data, batch_size=2, sampler=range(rank, 5, case.world_size))


def train_in_one_process(case: Case, combine: Callable[[list[Tensor]], Tensor] | None = None) -> Classifier:
    """Step on the concatenation of the ranks' batches.

    Args:
        case: The case.
        combine: For controls, what makes one loss of those of the ranks' batches; the mean over samples by default.
    """
    seed_everything(0, verbose=False)
    module = (Summed() if case.strategy.get("weight_by") == "sum" else Classifier()).double()
    (optimizer,), (schedule,) = module.configure_optimizers()
    for epoch in range(case.epochs):
        by_rank = case.batches(epoch)
        steps = max(map(len, by_rank))
        for first in range(0, steps, case.windows):
            numbers = range(first, min(first + case.windows, steps))
            window = [batches[number] for number in numbers for batches in by_rank if number < len(batches)]
            optimizer.zero_grad()
            if combine is None:
                module.loss(tuple(map(torch.cat, zip(*window, strict=True)))).backward()
            else:
                combine([module.loss(batch) for batch in window]).backward()
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), case.clip)
            optimizer.step()
            schedule["scheduler"].step()
    return module


def evaluate_in_one_process(module: Classifier) -> float:
    with torch.no_grad():
        return float(Classifier.loss(module, samples(5)))


def fit_with_torch_join(case: Case) -> tuple[Tensor, str]:
    """Control: torch's DistributedDataParallel with Join; returns the parameters and a digest of the replica."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seed_everything(0, verbose=False)
    module = Classifier().double()
    (optimizer,), (schedule,) = module.configure_optimizers()
    wrapped = DistributedDataParallel(module.network)
    for epoch in range(case.epochs):
        with Join([wrapped]):
            for batch in case.batches(epoch)[dist.get_rank()]:
                optimizer.zero_grad()
                functional.cross_entropy(wrapped(batch[1]), batch[2]).backward()
                optimizer.step()
                schedule["scheduler"].step()
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach(), digest_of(module, optimizer)
