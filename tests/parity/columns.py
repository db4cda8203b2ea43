"""The columns of the table: a strategy under the Trainer or under Fabric, and how it trains a row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_ddp_ext as for_trainer
from lightning_ddp_ext import fabric as for_fabric
from tests.strategies.toolkit import RANK, SizedStream, Stream, digest_of, samples, trainer

Sizes = Sequence[Sequence[int]]
UNEVEN = ((3, 5, 2, 4), (1, 2, 7), (2, 1))
POOL = samples(120)


def classified(indices: Tensor) -> tuple[Tensor, ...]:
    """Features, labels and indices."""
    return tuple(part[indices] for part in POOL)


def pairs(indices: Tensor) -> tuple[Tensor, ...]:
    """Features and labels."""
    return classified(indices)[:2]


@dataclass(frozen=True)
class Column:
    """A strategy; `ranks` is 0 if it trains in this process."""

    make: Callable[..., Any]
    ranks: int = 2
    is_even: bool = False  # all ranks need equally many batches
    shares: bool = False  # every rank is given the batches of all ranks
    is_fabric: bool = False
    is_default: bool = True  # otherwise it trains the rows that name it

    @property
    def replaces_windows(self) -> bool:
        """Whether a window weighs samples, as one batch does; in one process the Trainer weighs batches equally."""
        return self.ranks > 0

    def indices(self, row: "Row") -> list[list[Tensor]]:
        """Return the samples of each batch of each rank; samples are numbered over all ranks."""
        sizes = [list(of_rank) for of_rank in row.sizes[: self.ranks or 2]]
        if self.is_even:
            sizes = [of_rank[: min(map(len, sizes))] for of_rank in sizes]
        parts = iter(torch.arange(sum(map(sum, sizes))).split([size for of_rank in sizes for size in of_rank]))
        return [[next(parts) for _ in of_rank] for of_rank in sizes]

    def whole(self, row: "Row", windows: int = 1) -> list[Any]:
        """Return the batches of all ranks, concatenated for each step."""
        by_rank = [[one[:0] if len(one) == row.skipped else one for one in of_rank] for of_rank in self.indices(row)]
        starts = range(0, max(map(len, by_rank)), windows)
        steps = ([one for of_rank in by_rank for one in of_rank[start : start + windows]] for start in starts)
        return [row.data(torch.cat(step)) for step in steps]

    def train(self, row: "Row", is_wrong: bool = False) -> "Run":
        """Train on this rank, or for the negative control one epoch with wrong weights."""
        strategy = self.make(**{**row.options, "weight_by": row.wrong if is_wrong else row.weight_by})
        batches = self.whole(row) if self.shares else [row.data(one) for one in self.indices(row)[RANK]]
        if row.loader is not None:
            batches = row.loader(self.indices(row)[RANK])
        fit = fit_in_fabric if self.is_fabric else fit_in_trainer
        return fit(row, batches, strategy, self.ranks or 2, row.windows, 1 if is_wrong else row.epochs)

    def alone(self, row: "Row") -> "Run":
        """Train in one process on the batches of all ranks."""
        windows = 1 if self.replaces_windows else row.windows
        return fit_in_trainer(row, self.whole(row, row.windows // windows), "auto", 1, windows, row.epochs)


@dataclass(frozen=True)
class Row:
    """Two epochs of a model on batches of these sizes, `windows` of which make a step."""

    model: Callable[[], LightningModule]
    sizes: Sizes = UNEVEN
    weight_by: Any = "samples"
    wrong: Any = "equal"  # weights of the negative control; None if weights do not matter
    windows: int = 1
    data: Callable[[Tensor], Any] = classified
    trainer: Callable[[], dict[str, Any]] | dict[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the strategy
    columns: Sequence[str] = ()  # by default all
    tolerance: float = 1e-11
    is_exact: bool = True  # otherwise ranks are identical only
    is_stream: bool = False
    missing: int = 0  # batches that a stream announces and does not have
    validates: bool = False
    loader: Callable[[list[Tensor]], DataLoader] | None = None  # of the batches with these samples of a rank
    warns: tuple[str, int] | None = ("", 0)  # a part of a warning, and the number of these warnings on all ranks
    skipped: int | None = None  # the size of batches that one process leaves out
    lacking: str = ""  # what virtual devices do not have
    refused: str = ""  # a part of the error on each rank
    epochs: int = 2


@dataclass
class Run:
    """The parameters after each step, and after each batch a hash of parameters, buffers and states of optimizers."""

    parameters: list[Tensor] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    values: list[dict[str, float]] = field(default_factory=list)  # logged until the end of each batch, or at the end
    found: list[Any] = field(default_factory=list)  # by hooks of the module
    warned: list[str] = field(default_factory=list)

    def add_step(self, module: nn.Module) -> None:
        parts = [torch.view_as_real(one.detach().cpu().to(torch.complex128)).flatten() for one in module.parameters()]
        self.parameters.append(torch.cat(parts))


class Recorder(Callback):
    def __init__(self) -> None:
        self.run, self.steps = Run(), 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.accumulate_grad_batches == 1 or trainer.global_step != self.steps:
            self.run.add_step(module)
        self.steps = trainer.global_step
        if trainer.accumulate_grad_batches == 1:
            self.run.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.run.digests.append(digest_of(module, *trainer.optimizers))  # integers are equal after the last hook

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.on_train_batch_start(trainer, module)


def load(row: Row, batches: Any) -> DataLoader:
    if isinstance(batches, DataLoader):
        return batches
    data = (
        SizedStream(batches, len(batches) + row.missing)
        if row.missing
        else Stream(batches)
        if row.is_stream
        else list(batches)
    )
    return DataLoader(data, batch_size=None)


def fit_in_trainer(row: Row, batches: Any, strategy: Any, ranks: int, windows: int, epochs: int) -> Run:
    recorder = Recorder()
    given = row.trainer() if callable(row.trainer) else row.trainer
    options = {"accumulate_grad_batches": windows, "max_epochs": epochs, **given}
    callbacks = [recorder, *options.pop("callbacks", [])]
    torch.manual_seed(0)
    module = row.model()
    validation = load(row, [classified(one) for one in torch.arange(6).split(2)]) if row.validates else None
    trainer(*callbacks, strategy=strategy, devices=ranks, **options).fit(module, load(row, batches), validation)
    recorder.run.found = getattr(module, "found", [])
    metrics = module.trainer.callback_metrics.items()
    recorder.run.values.append({name: float(value) for name, value in metrics if not name.endswith("_step")})
    return recorder.run


def fit_in_fabric(row: Row, batches: Any, strategy: Any, ranks: int, windows: int, epochs: int) -> Run:
    """Train in a loop as users write it; the loss of each micro-batch is divided by the length of the window."""
    given = row.trainer() if callable(row.trainer) else row.trainer
    fabric, run = Fabric(strategy=strategy, accelerator="cpu", devices=ranks, precision="64-true"), Run()
    fabric.launch()
    torch.manual_seed(0)
    module = row.model()
    torch.set_default_dtype(torch.float64)  # Fabric converts outputs of modules to it
    configured = module.configure_optimizers()
    optimizers, schedulers = configured if isinstance(configured, tuple) else (configured, [])
    model, *optimizers = fabric.setup(module, *(optimizers if isinstance(optimizers, list) else [optimizers]))
    loader = fabric.setup_dataloaders(load(row, batches), use_distributed_sampler=False)
    length = given.get("gradient_clip_val")
    by_value = given.get("gradient_clip_algorithm") == "value"
    clip = partial(fabric.clip_gradients, model, **{"clip_val" if by_value else "max_norm": length})

    def backward(batch: Any, number: int, window: int) -> Tensor:
        loss = model.training_step(batch, number)
        fabric.backward(loss / window)
        return loss

    def closure(batch: Any, number: int) -> Tensor:
        optimizers[0].zero_grad()
        loss = backward(batch, number, 1)
        if length is not None:
            clip(optimizers[0])
        return loss

    for _ in range(epochs):
        for number, batch in enumerate(loader):
            is_last = number + 1 == len(loader) if windows > 1 else True
            steps = is_last or (number + 1) % windows == 0
            if not module.automatic_optimization:
                model.training_step(batch, number)
            elif windows == 1:
                optimizers[0].step(partial(closure, batch, number))
            else:
                is_sum = row.weight_by == "sum"
                window = 1 if is_sum else min(windows, len(loader) - number // windows * windows)
                with fabric.no_backward_sync(model, enabled=not steps):
                    backward(batch, number, window)
                if steps:
                    clip(optimizers[0]) if length is not None else None
                    optimizers[0].step()
                    optimizers[0].zero_grad()
            if steps:
                for scheduler in schedulers:
                    scheduler["scheduler"].step()
                run.add_step(model)
            run.digests.append(digest_of(model, *(one.optimizer for one in optimizers)))
    return run


COLUMNS = {
    "balanced_dp": Column(partial(for_trainer.BalancedDataParallelStrategy, split=[1, 3]), ranks=0, shares=True),
    "balanced_ddp": Column(partial(for_trainer.BalancedDDPStrategy, split=[1, 3]), shares=True),
    "ddp_join": Column(for_trainer.DDPJoinStrategy),
    "ddp_join on 3 ranks": Column(for_trainer.DDPJoinStrategy, ranks=3, is_default=False),
    "ddp_checkpoint": Column(for_trainer.DDPCheckpointStrategy, is_even=True),
    "fabric balanced_ddp": Column(partial(for_fabric.BalancedDDPStrategy, split=[1, 3]), shares=True, is_fabric=True),
    "fabric ddp_join": Column(for_fabric.DDPJoinStrategy, is_fabric=True),
    "fabric ddp_checkpoint": Column(for_fabric.DDPCheckpointStrategy, is_even=True, is_fabric=True),
}
