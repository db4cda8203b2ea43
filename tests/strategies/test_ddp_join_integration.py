"""`ddp_join` against one process that steps on the concatenation of the ranks' batches. One launch per world size."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import DDPJoinStrategy
from tests.strategies.toolkit import (
    RANK,
    Batch,
    Classifier,
    Stream,
    Trace,
    digest_of,
    fit,
    run_on_ranks,
    samples,
    values_of,
)


@dataclass(frozen=True)
class Case:
    """A training run with `counts` samples on each rank, or with one number of samples that the strategy distributes.

    `kind` is "map" for a data set to distribute, "list" for loaders of known length, and "stream" for others.
    """

    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    kind: str = "list"
    windows: int = 1
    epochs: int = 2
    clip: float | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    is_sum: bool = False
    workers: int = 0

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    @property
    def total(self) -> int:
        return sum(self.counts)

    def batches(self, epoch: int) -> list[list[Batch]]:
        """The batches of each rank in an epoch."""
        shards = list(torch.split(torch.arange(self.total), self.counts))
        if self.kind == "map":
            order = torch.randperm(self.total, generator=torch.Generator().manual_seed(epoch))
            shards = [order[rank :: self.world_size] for rank in range(self.world_size)]
        return [
            [tuple(part[indices] for part in samples(self.total)) for indices in shard.split(size) if len(indices)]
            for shard, size in zip(shards, self.sizes, strict=True)
        ]

    def __call__(self, folder: str) -> "Outcome":
        """Train on this rank."""
        if self.kind == "map":
            data = TensorDataset(*samples(self.total))
            loader = DataLoader(data, self.sizes[0], shuffle=True, num_workers=self.workers)
            val_loader = DataLoader(TensorDataset(*samples(5)), batch_size=2)
        else:
            batches = self.batches(0)[RANK]
            data = Stream(batches) if self.kind == "stream" else batches
            loader = DataLoader(data, batch_size=None, num_workers=self.workers)
            val_loader = DataLoader(TensorDataset(*samples(5)), 2, sampler=range(RANK, 5, self.world_size))
        module = make_module(self)
        made, trace = fit(
            module, loader, val_loader, strategy=DDPJoinStrategy(weight_by="sum" if self.is_sum else "samples"),
            max_epochs=self.epochs, num_sanity_val_steps=2, accumulate_grad_batches=self.windows,
            gradient_clip_val=self.clip, use_distributed_sampler=self.kind == "map", **self.trainer,
        )  # fmt: skip
        return Outcome(trace, module.seen, made.global_step, float(made.callback_metrics["val_loss_epoch"]))


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"}]


def make_module(case: Case) -> Classifier:
    seed_everything(0, verbose=False)
    return Scheduled(is_sum=case.is_sum)


@dataclass
class Outcome:
    """The end of a run on a rank."""

    trace: Trace
    seen: list[int]
    global_step: int
    val_loss: float


def train_in_one_process(case: Case, combine: Callable[[list[Tensor]], Tensor] | None = None) -> Classifier:
    """Step on the concatenation of the ranks' batches; for controls, `combine` makes one loss of the ranks' losses."""
    module = make_module(case).double()
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


def fit_with_torch_join(folder: str) -> tuple[Tensor, str]:
    """Control: torch's DistributedDataParallel with Join; returns the parameters and a digest of the replica."""
    case = TORCHS
    module = make_module(case).double()
    (optimizer,), (schedule,) = module.configure_optimizers()
    wrapped = DistributedDataParallel(module.network)
    for epoch in range(case.epochs):
        with Join([wrapped]):
            for batch in case.batches(epoch)[dist.get_rank()]:
                optimizer.zero_grad()
                functional.cross_entropy(wrapped(batch[0]), batch[1]).backward()
                optimizer.step()
                schedule["scheduler"].step()
    return parameters_of(module), digest_of(module, optimizer)


TORCHS = Case((14, 6), (2, 2))
CASES = [
    *[Case((number,), (2, 2), "map", windows, clip=0.5) for number, windows in ((7, 1), (5, 3), (1, 1))],
    TORCHS,
    Case((14, 6), (2, 2), "stream", 2),
    Case((0, 9), (2, 4), windows=4),
    Case((9, 0), (4, 2), "stream", 3, clip=0.3),
    Case((10, 3), (3, 1), "stream", workers=1),
    Case((6, 13), (2, 3), trainer={"val_check_interval": 2}),
    Case((14, 6), (2, 2), windows=2, is_sum=True),
    *[Case((number,), (2, 2, 2), "map", windows) for number, windows in ((13, 2), (2, 1))],
    Case((7, 3, 13), (3, 1, 2), windows=2),
    Case((0, 5, 0), (1, 2, 1), "stream", 2),
    Case((11, 4, 1), (2, 2, 1), trainer={"val_check_interval": 0.5}, clip=0.5),
    Case((9, 4, 1, 0), (2, 2, 1, 1), "stream", 2),
]


def draw(generator: random.Random) -> Case:
    """Draw ranks, amounts of data and options of the Trainer."""
    world_size = generator.choice([2, 3])
    kind = generator.choice(["map", "list", "stream"])
    sizes = tuple(generator.randint(1, 4) for _ in range(world_size))
    counts = tuple(generator.choice([0, generator.randint(1, 16)]) for _ in range(world_size))
    if kind == "map":
        counts, sizes = (generator.randint(1, 20),), sizes[:1] * world_size
    if not sum(counts):
        counts = (3, *counts[1:])
    steps = max(-(-count // size) for count, size in zip(counts, sizes, strict=False))
    trainer = {"val_check_interval": generator.randint(1, 2)} if steps >= 2 * world_size else {}
    return Case(counts, sizes, kind, generator.randint(1, 4), clip=generator.choice([None, 0.3]), trainer=trainer)


def parameters_of(module: torch.nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach()


def check(case: Case, found: list[Outcome]) -> None:
    expected = train_in_one_process(case)
    wanted = parameters_of(expected)
    first = found[0].trace
    for trace in (outcome.trace for outcome in found):
        assert float((trace.parameters - wanted).norm() / wanted.norm()) < 1e-12
        assert trace.digests == first.digests
        assert trace.metrics == first.metrics
        assert trace.validations == first.validations != []
    assert {outcome.global_step for outcome in found} == {found[0].global_step}
    if first.validations[-1][0] == found[0].global_step:
        val_loss = functional.cross_entropy(expected.network(samples(5)[0]), samples(5)[1]).item()
        assert [outcome.val_loss for outcome in found] == pytest.approx([val_loss] * len(found), rel=1e-12)
    assert sorted(index for outcome in found for index in outcome.seen) == sorted(list(range(case.total)) * case.epochs)
    steps = [max(map(len, case.batches(epoch))) for epoch in range(case.epochs)]
    assert found[0].global_step == sum(-(-number // case.windows) for number in steps)
    for rank, outcome in enumerate(found):
        batches = [len(case.batches(epoch)[rank]) for epoch in range(case.epochs)]
        assert outcome.trace.is_shadow == [
            number >= batches[epoch] for epoch in range(case.epochs) for number in range(steps[epoch])
        ]


def run_all(cases: list[Case]) -> dict[str, list[Outcome]]:
    """Run cases on as many ranks as each has, in one launch for each number of ranks."""
    outcomes: dict[str, list[Outcome]] = {}
    for world_size in {case.world_size for case in cases}:
        own = {repr(case): case for case in cases if case.world_size == world_size}
        # In the process group of the runs before it. If the control made a group, its wrapper could have the last
        # reference to it, and would wait for threads of gloo while it holds the lock that these need, Python's.
        control = {"torch's Join": fit_with_torch_join} if TORCHS in own.values() else {}
        outcomes |= run_on_ranks(world_size, {**own, **control})
    return outcomes


@pytest.fixture(scope="module")
def found():
    return run_all(CASES)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_uneven_ranks_train_as_one_process_and_stay_identical(found, case):
    check(case, values_of(found, repr(case)))


def test_equal_weights_fail_the_same_check():
    case = Case((14, 6), (3, 2))
    exact = parameters_of(train_in_one_process(case))
    control = parameters_of(train_in_one_process(case, lambda losses: torch.stack(losses).mean()))
    assert float((control - exact).norm() / exact.norm()) > 1e-3


@pytest.mark.cpu_only("is about torch's `Join`")
def test_torchs_join_fails_the_same_check(found):
    (first, first_digest), (second, second_digest) = values_of(found, "torch's Join")
    exact = parameters_of(train_in_one_process(TORCHS))
    assert first_digest != second_digest
    for parameters in (first, second):
        assert float((parameters - exact).norm() / exact.norm()) > 1e-3


def check_drawn(seed: int, number: int) -> None:
    generator = random.Random(seed)
    drawn = [draw(generator) for _ in range(number)]
    outcomes = run_all(drawn)
    for case in drawn:
        check(case, values_of(outcomes, repr(case)))


@pytest.mark.slow
def test_drawn_amounts_of_data():
    check_drawn(seed=1, number=12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 12))
def test_more_drawn_amounts_of_data(seed):
    check_drawn(seed, number=30)
