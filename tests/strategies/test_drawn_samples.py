"""Batches whose samples cannot be counted from their tensors, on two ranks and in one process."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from tests.strategies.ddp_ranks import digest_of, quiet_trainer
from tests.strategies.join_ranks import Stream
from tests.support.processes import run_processes

TIMES, FEATURES = 7, 3
EVEN = [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14], [15, 16]], [[17, 18], [19], [20], [21]]]
UNEVEN = [EVEN[0], [[17, 18, 19], [20, 21]]]
STRATEGIES = {"ddp_checkpoint": DDPCheckpointStrategy, "ddp_join": DDPJoinStrategy}


def joined(lists: Sequence[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


class Series(Dataset):
    """Time series of shape (time, features), with a target at each time."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(TIMES, FEATURES + 1, generator=torch.Generator().manual_seed(index))
        return values[:, 1:].double(), values[:, 0].double() + index

    def __len__(self) -> int:
        return 22


def across_time(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column, dim=1) for column in zip(*samples, strict=True))


class Graphs(Series):
    """A different number of nodes in each graph, and a target for all of them."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, targets = super().__getitem__(index)
        return features[: 1 + index % TIMES], targets[0]


class GraphBatch:
    """The nodes of all graphs in a row, and the graph of each node."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.nodes = torch.cat([nodes for nodes, _ in samples])
        self.graphs = torch.cat([torch.full((len(nodes),), graph) for graph, (nodes, _) in enumerate(samples)])
        self.targets = torch.stack([target for _, target in samples])

    def to(self, device: torch.device, **_: Any) -> "GraphBatch":
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))
        return self


class Regression(LightningModule):
    """Learns from series, graphs, or a list of batches of graphs with equal weights."""

    def __init__(self, count: Callable[[Any], int] | None = None) -> None:
        super().__init__()
        self.network = nn.Linear(FEATURES, 1)
        self.count = count

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, list) and not isinstance(batch[0], Tensor):
            return torch.stack([self.loss(part) for part in batch]).mean()
        if isinstance(batch, list | tuple):
            return functional.mse_loss(self.network(batch[0]).squeeze(-1), batch[1])
        graphs = SimpleNamespace(**batch) if isinstance(batch, dict) else batch
        pooled = graphs.nodes.new_zeros(len(graphs.targets), FEATURES).index_add(0, graphs.graphs, graphs.nodes)
        return functional.mse_loss(self.network(pooled).squeeze(-1), graphs.targets)

    def _log(self, name: str, value: Tensor, batch: Any) -> None:
        size = None if self.count is None else self.count(batch)
        self.log(name, value.detach(), on_step=True, on_epoch=True, sync_dist=True, batch_size=size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self._log("loss", loss, batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log("val_loss", self.loss(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Logged(DummyLogger):
    """Keeps what is logged; the strategies log the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.values.append({name: value for name, value in metrics.items() if name != "epoch"})


@dataclass
class Outcome:
    """The end of a run on a rank."""

    parameters: Tensor
    digest: str
    logged: list[dict[str, float]]
    warned: list[str]
    weights: list[float]


def series(batches: list[list[int]]) -> DataLoader:
    return DataLoader(Series(), batch_sampler=batches, collate_fn=across_time)


def graphs(batches: list[list[int]]) -> DataLoader:
    return DataLoader(Graphs(), batch_sampler=batches, collate_fn=GraphBatch, num_workers=1, persistent_workers=True)


def streamed(batches: list[list[int]]) -> DataLoader:
    return DataLoader(Stream([Graphs()[i] for i in joined(batches)]), batch_size=len(batches[0]), collate_fn=GraphBatch)


def ready_series(batches: list[list[int]]) -> DataLoader:
    return DataLoader(list(series(batches)), batch_size=None)


def ready_graphs(batches: list[list[int]]) -> DataLoader:
    return DataLoader([GraphBatch([Graphs()[index] for index in batch]) for batch in batches], batch_size=None)


# Functions that make loaders, and arguments of the strategy.
CASES: dict[str, tuple[Callable[[list[list[int]]], DataLoader], dict[str, Any]]] = {
    "series": (series, {}),
    "graphs": (graphs, {}),
    "streamed graphs": (streamed, {}),
    "ready series": (ready_series, {"batch_dim": 1}),
    "ready series along another dimension": (ready_series, {}),
    "ready graphs": (ready_graphs, {}),
}


def batches_of(case: str, strategy: str) -> list[list[list[int]]]:
    if case == "streamed graphs":  # of one size but for the last
        return [[[0, 1, 2, 3], [4, 5, 6]], [[7], [8]]] if strategy == "ddp_checkpoint" else [[[0, 1, 2], [3, 4]], [[5]]]
    return EVEN if strategy == "ddp_checkpoint" else UNEVEN


class EachEpoch(IterableDataset):
    """Other batches in each epoch."""

    trainer: Trainer

    def __init__(self, epochs: Sequence[Sequence[Any]]) -> None:
        self.epochs = epochs

    def __iter__(self) -> Iterator[Any]:
        return iter(self.epochs[self.trainer.current_epoch])


def fit(
    loader: DataLoader, count: Callable[[Any], int] | None = None, ckpt_path: str | None = None, **options: Any
) -> Outcome:
    """Train for two epochs."""
    seed_everything(0, verbose=False)
    module, logger, weights = Regression(count).double(), Logged(), []
    trainer = quiet_trainer(
        max_epochs=2, precision="64-true", num_sanity_val_steps=0, logger=logger, log_every_n_steps=1, **options
    )
    if isinstance(loader.dataset, EachEpoch):
        loader.dataset.trainer = trainer
    module.on_train_batch_end = lambda *_: weights.append(getattr(trainer.strategy, "batch_weight", 0.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    texts = [str(one.message) for one in caught]
    warned = [text for text in texts if "cannot be counted" in text or "continues with equal weights" in text]
    parameters = nn.utils.parameters_to_vector(module.parameters()).detach()
    return Outcome(parameters, digest_of(module, trainer), logger.values, warned, weights)


def fit_cases() -> dict[tuple[str, str], Outcome]:
    """Run every case on this rank, under both strategies."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    return {
        # Lightning wants to be given the size of a batch that it cannot read and no loader has drawn.
        (case, name): fit(
            make(batches_of(case, name)[rank]),
            (lambda batch: len(batch.targets)) if case == "ready graphs" else None,
            strategy=kind(**options),
        )
        for case, (make, options) in CASES.items()
        for name, kind in STRATEGIES.items()
    }


def fit_alone(case: str, strategy: str, batches: list[list[list[int]]] | None = None) -> Outcome:
    """Train in one process on what all ranks have for each step, as one batch."""
    of_ranks = batches or batches_of(case, strategy)
    steps = [[of_rank[step] for of_rank in of_ranks if step < len(of_rank)] for step in range(max(map(len, of_ranks)))]
    if case == "ready graphs":
        parts = [[GraphBatch([Graphs()[index] for index in part]) for part in step] for step in steps]
        return fit(DataLoader(parts, batch_size=None), lambda batch: 1, devices=1)
    if "series" in case:
        return fit(series([joined(step) for step in steps]), lambda batch: batch[0].shape[1], devices=1)
    loader = DataLoader(Graphs(), batch_sampler=[joined(step) for step in steps], collate_fn=GraphBatch)
    return fit(loader, lambda batch: len(batch.targets), devices=1)


class Backwards(DistributedSampler):
    """Of a user: this rank's samples from the last to the first."""

    def __iter__(self) -> Iterator[int]:
        return reversed(list(super().__iter__()))


class OwnLoader(DataLoader):
    pass


class Predicting(LightningModule):
    """Creates its sampler with the arguments that the Trainer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []

    def train_dataloader(self) -> DataLoader:
        data = torch.arange(8)
        sampler = Backwards(data, shuffle=False, **self.trainer.distributed_sampler_kwargs)
        return OwnLoader(data, batch_size=2, sampler=sampler, num_workers=1, persistent_workers=True, pin_memory=True)

    predict_dataloader = train_dataloader

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[int]:
        return batch.tolist()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.tolist()
        return self.layer(batch[:, None].float()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def use_own_sampler(strategy: str) -> dict[str, Any]:
    module = Predicting()
    options = {"strategy": strategy, "use_distributed_sampler": True, "max_epochs": 1}
    predicted = quiet_trainer(**options).predict(module)
    trainer = quiet_trainer(**options, reload_dataloaders_every_n_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    return {
        "predicted": joined(predicted or []),
        "seen": module.seen,
        "sampler": type(trainer.train_dataloader.sampler).__name__,
        "is its loader": isinstance(trainer.train_dataloader, OwnLoader),
        "advice": [str(one.message) for one in caught if "can lead to instability" in str(one.message)],
    }


# For each epoch, the batches of each rank: the second rank, which cannot count its samples, begins late or ends early.
LATE = [[[[0, 1], [2, 3]], []], [[[4, 5], [6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]]]]
EARLY = [[[[0, 1], [2, 3], [4, 5]], [[8, 9, 10, 11]]]] * 2


def as_dictionary(indices: list[int]) -> dict[str, Tensor]:
    return vars(GraphBatch([Graphs()[index] for index in indices]))


def fit_epochs_alone(epochs: Any, *, is_equal: bool = True) -> Outcome:
    """Train in one process on the batches of all ranks, which weigh the same, or by their samples."""
    steps: list[list[Any]] = []
    for of_ranks in epochs:
        steps.append([])
        for step in range(max(map(len, of_ranks))):
            parts = [of_rank[step] for of_rank in of_ranks if step < len(of_rank)]
            parts = parts if is_equal else [joined(parts)]
            steps[-1].append([as_dictionary(part) for part in parts])
    return fit(DataLoader(EachEpoch(steps), batch_size=None), lambda batch: 1, devices=1, limit_val_batches=0)


def fit_uncounted(folder: str) -> dict[str, Outcome]:
    """Train while only the first rank can count its samples: from a late batch on, in one run, and resumed."""
    rank = int(os.environ["RANK"])

    def train(epochs: Any, **options: Any) -> Outcome:
        own = [of_ranks[rank] for of_ranks in epochs]
        if rank:
            ready = [[as_dictionary(indices) for indices in batches] for batches in own]
            loader = DataLoader(EachEpoch(ready), batch_size=None)
        else:
            graphs = [[Graphs()[index] for index in joined(batches)] for batches in own]
            loader = DataLoader(EachEpoch(graphs), len(own[0][0]), collate_fn=lambda samples: vars(GraphBatch(samples)))
        return fit(loader, lambda batch: 1, strategy=DDPJoinStrategy(), limit_val_batches=0, **options)

    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    return {
        "late": train(LATE),
        "whole": train(EARLY, callbacks=[saving], enable_checkpointing=True),
        "resumed": train(EARLY, ckpt_path=f"{folder}/step=2.ckpt"),
    }


def run(folder: str) -> tuple[dict[tuple[str, str], Outcome], dict[str, Any], dict[str, Outcome]]:
    warnings.simplefilter("ignore")
    return fit_cases(), {name: use_own_sampler(name) for name in STRATEGIES}, fit_uncounted(folder)


COUNTED = [case for case in CASES if not case.endswith("along another dimension")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(run, 2, str(tmp_path_factory.mktemp("uncounted")), timeout=240)


def difference(outcome, expected):
    return float((outcome.parameters - expected.parameters).norm() / expected.parameters.norm())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", COUNTED)
def test_gradients_and_logged_values_equal_one_process(found, case, strategy):
    expected = fit_alone(case, strategy)
    outcomes = [of_rank[0][case, strategy] for of_rank in found]
    assert outcomes[0].digest == outcomes[1].digest
    assert difference(outcomes[0], expected) < 1e-12
    if case == "ready graphs":  # nobody knows their samples
        return
    assert {name for values in expected.logged for name in values} == {
        "loss_step", "loss_epoch", "val_loss_step", "val_loss_epoch"
    }  # fmt: skip
    for outcome in outcomes:
        assert len(outcome.logged) == len(expected.logged)
        for values, wanted in zip(outcome.logged, expected.logged, strict=True):
            assert values == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_dimension_of_time_fails_the_same_check(found, strategy):
    expected = fit_alone("series", strategy)
    assert difference(found[0][0]["ready series along another dimension", strategy], expected) > 1e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_that_cannot_be_counted_have_equal_weights_and_one_warning_says_so(found, strategy):
    for case in CASES:
        warned = [warning for of_rank in found for warning in of_rank[0][case, strategy].warned]
        if case == "ready graphs":
            (warning,) = warned
            assert warning.startswith("rank 0: the samples of a batch cannot be counted: `batch` of type `GraphBatch`")
            assert "All batches weigh the same. Pass a callable `weight_by`" in warning
        else:
            assert warned == []


@pytest.mark.parametrize(("name", "epochs"), [("late", LATE), ("whole", EARLY)])
def test_weights_are_equal_from_the_first_batch_that_cannot_be_counted(found, name, epochs):
    first, second = (of_rank[2][name] for of_rank in found)
    assert first.digest == second.digest
    assert difference(first, fit_epochs_alone(epochs)) < 1e-12
    assert difference(first, fit_epochs_alone(epochs, is_equal=False)) > 1e-3
    assert first.weights == [2.0, 2.0, 1.0, 1.0] if name == "late" else [1.0] * 6
    (warning,) = first.warned + second.warned
    assert warning.startswith("rank 1: the samples of a batch cannot be counted")
    assert "All batches weigh the same." in warning


def test_a_run_with_equal_weights_keeps_them_when_it_resumes_without_the_rank_that_cannot_count(found):
    for rank in range(2):
        whole, resumed = found[rank][2]["whole"], found[rank][2]["resumed"]
        assert resumed.weights == whole.weights[2:]
        assert resumed.digest == whole.digest
        assert [("continues with equal weights" in warning) for warning in resumed.warned] == [True] * (rank == 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_users_sampler_and_class_of_loader_stay(found, strategy):
    for rank in range(2):
        own = found[rank][1][strategy]
        assert own["predicted"] == own["seen"] == list(range(8))[rank::2][::-1]
        assert own["sampler"] == "Backwards"
        assert own["is its loader"]
    assert len(found[0][1][strategy]["advice"]) == 1
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, num_nodes=2, logger=False)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 0}  # before any run


def test_one_rank_has_the_loader_of_the_user():
    loader = DataLoader(Series(), batch_size=5)
    trainer = quiet_trainer(strategy="ddp_join", devices=1, max_epochs=1, precision="64-true")
    trainer.fit(Regression(), loader, loader)
    assert trainer.train_dataloader is trainer.val_dataloaders is loader


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_number_that_was_drawn_for_a_batch_ends_with_it(strategy):
    within, after = [], []

    class Counting(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            within.append(trainer.strategy.count_samples(batch))

        def on_train_epoch_end(self, trainer, module):
            after.append(trainer.strategy.count_samples(torch.zeros(5, 3)))

        def on_validation_epoch_end(self, trainer, module):
            after.append(trainer.strategy.count_samples(torch.zeros(4, 3)))

    trainer = quiet_trainer(
        strategy=strategy, devices=1, max_epochs=1, precision="64-true", callbacks=[Counting()], num_sanity_val_steps=0
    )
    loader = DataLoader(Series(), batch_size=9, collate_fn=across_time)
    trainer.fit(Regression(), loader, loader)
    assert within == [9, 9, 4]  # not 7, the number of times
    assert after == [4, 5]
