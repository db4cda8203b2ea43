"""Data, modules and checks for ranks with different amounts of data; every rank imports this module."""

import hashlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ddp_ext import DDPJoinStrategy
from tests.strategies import ddp_ranks

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
COUNTS = (8, 4, 2)  # samples of each rank, in batches of two
FEATURES, CLASSES = 6, 3
Batch = tuple[Tensor, Tensor, Tensor]


def samples(number: int) -> Batch:
    """Indices, features and labels, the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(number, FEATURES, generator=generator, dtype=torch.float64)
    return torch.arange(number), features, torch.randint(CLASSES, (number,), generator=generator)


class Stream(IterableDataset):
    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.seen: list[Any] = []

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.network(batch[1]), batch[2])

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
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


class Trace(Callback):
    """Records after every batch a digest of the replica, the synchronised values, and whether the step is a shadow."""

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
    return hashlib.sha256(b"".join(part.detach().cpu().numpy().tobytes() for part in parts)).hexdigest()


def loader(*counts: int, stream: bool = False) -> DataLoader:
    """This rank's samples, numbered over all ranks."""
    parts = torch.split(torch.arange(sum(counts)), counts)[RANK]
    data = TensorDataset(*(part[parts] for part in samples(sum(counts))))
    return DataLoader(Stream(list(data)) if stream else data, batch_size=2)


def whole_batches(counts: tuple[int, ...]) -> DataLoader:
    """The batches of all ranks, concatenated for each step."""
    by_rank = [torch.split(part, 2) if len(part) else () for part in torch.split(torch.arange(sum(counts)), counts)]
    steps = [
        torch.cat([batches[number] for batches in by_rank if number < len(batches)])
        for number in range(max(map(len, by_rank)))
    ]
    data = samples(sum(counts))
    return DataLoader([tuple(part[indices] for part in data) for indices in steps], batch_size=None)


def trainer(*callbacks: Callback, strategy: Any = None, **options: Any) -> Trainer:
    return ddp_ranks.quiet_trainer(
        **{
            "strategy": strategy if isinstance(strategy, str) else DDPJoinStrategy(**(strategy or {})),
            "devices": WORLD_SIZE,
            "precision": "64-true",
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            "callbacks": list(callbacks),
            **options,
        }
    )


def fit(module: LightningModule, *loaders: Any, ckpt_path: str | None = None, **options: Any) -> tuple[Trainer, Trace]:
    trace = Trace()
    made = trainer(trace, *options.pop("callbacks", ()), **options)
    made.fit(module, *(loaders or [loader(*COUNTS)]), ckpt_path=ckpt_path)
    return made, trace


class CaseError(str):
    """Traceback of a case that failed on a rank."""


def run_cases(cases: Sequence[Callable[[str], Any]], folder: str) -> dict[str, Any]:
    """Run cases on this rank one after another; returns for each its value or its error."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for case in cases:
        seed_everything(0, verbose=False)
        try:
            found[case.__name__] = case(folder)
        except (Exception, pytest.fail.Exception):
            found[case.__name__] = CaseError(traceback.format_exc())
    return found


def values_of(found: Sequence[dict[str, Any]], case: Callable[[str], Any]) -> list[Any]:
    """Return the value of a case on each rank; fails with the errors, if there are any."""
    values = [of_rank[case.__name__] for of_rank in found]
    errors = [f"rank {rank}: {value}" for rank, value in enumerate(values) if isinstance(value, CaseError)]
    assert not errors, "\n".join(errors)
    return values


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def assert_identical(value: Any) -> None:
    values = gather(value)
    assert all(other == values[0] for other in values), values
    assert value
