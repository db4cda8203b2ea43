"""`ddp_join` against one process that steps on the concatenation of the ranks' batches. One launch per world size."""

import random
import warnings
from collections.abc import Callable, Sequence
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

from tests.strategies.join_ranks import RANK, Batch, Classifier, Stream, Trace, digest_of, samples, trainer
from tests.support.processes import run_processes


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


class Summed(Classifier):
    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.network(batch[1]), batch[2], reduction="sum") / 30


def make_module(case: Case) -> Classifier:
    seed_everything(0, verbose=False)
    return Summed() if case.strategy.get("weight_by") == "sum" else Classifier()


@dataclass
class Outcome:
    """The end of a run on a rank."""

    parameters: Tensor
    trace: Trace
    seen: list[int]
    global_step: int
    metrics: dict[str, float]


def fit_all(cases: Sequence[Case]) -> list[Outcome]:
    """Train each case on this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return [fit(case) for case in cases]


def fit(case: Case) -> Outcome:
    module, trace = make_module(case), Trace()
    made = trainer(
        trace,
        strategy=case.strategy,
        max_epochs=case.epochs,
        num_sanity_val_steps=2,
        accumulate_grad_batches=case.windows,
        gradient_clip_val=case.clip,
        use_distributed_sampler=case.kind == "map",
        **case.trainer,
    )
    validation = TensorDataset(*samples(5))
    if case.kind == "map":
        data = TensorDataset(*samples(case.total))
        loader = DataLoader(data, case.sizes[0], shuffle=True, num_workers=case.workers)
        val_loader = DataLoader(validation, batch_size=2)
    else:
        batches = case.batches(0)[RANK]
        data = Stream(batches) if case.kind == "stream" else batches
        loader = DataLoader(data, batch_size=None, num_workers=case.workers)
        val_loader = DataLoader(validation, batch_size=2, sampler=range(RANK, 5, case.world_size))
    made.fit(module, loader, val_loader)
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    return Outcome(parameters_of(module), trace, module.seen, made.global_step, metrics)


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
    return parameters_of(module), digest_of(module, optimizer)


CASES = [
    *[Case((number,), (2, 2), "map", windows, clip=0.5) for number, windows in ((7, 1), (5, 3), (1, 1))],
    Case((14, 6), (2, 2)),
    Case((14, 6), (2, 2), "stream", 2),
    Case((0, 9), (2, 4), windows=4),
    Case((9, 0), (4, 2), "stream", 3, clip=0.3),
    Case((10, 3), (3, 1), "stream", workers=1),
    Case((6, 13), (2, 3), trainer={"val_check_interval": 2}),
    Case((14, 6), (2, 2), windows=2, strategy={"weight_by": "sum"}),
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
    for outcome in found:
        assert float((outcome.parameters - wanted).norm() / wanted.norm()) < 1e-12
        assert outcome.trace.digests == found[0].trace.digests
        assert outcome.trace.metrics == found[0].trace.metrics
        assert outcome.trace.validations == found[0].trace.validations != []
        assert outcome.global_step == found[0].global_step
        if outcome.trace.validations[-1] == outcome.global_step:
            val_loss = Classifier.loss(expected, samples(5)).item()
            assert outcome.metrics["val_loss"] == pytest.approx(val_loss, rel=1e-12)
    assert sorted(index for outcome in found for index in outcome.seen) == sorted(list(range(case.total)) * case.epochs)
    steps = [max(map(len, case.batches(epoch))) for epoch in range(case.epochs)]
    assert found[0].global_step == sum(-(-number // case.windows) for number in steps)
    for rank, outcome in enumerate(found):
        batches = [len(case.batches(epoch)[rank]) for epoch in range(case.epochs)]
        assert outcome.trace.shadow_ranks == [
            number >= batches[epoch] for epoch in range(case.epochs) for number in range(steps[epoch])
        ]


@pytest.fixture(scope="module")
def found():
    """The outcomes of each case on all ranks."""
    outcomes = {}
    for world_size in (2, 3, 4):
        cases = [case for case in CASES if case.world_size == world_size]
        by_rank = run_processes(fit_all, world_size, cases, timeout=240)
        outcomes.update({repr(case): [of_rank[number] for of_rank in by_rank] for number, case in enumerate(cases)})
    return outcomes


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_uneven_ranks_train_as_one_process_and_stay_identical(found, case):
    check(case, found[repr(case)])


def test_equal_weights_fail_the_same_check():
    case = Case((14, 6), (3, 2))
    exact = parameters_of(train_in_one_process(case))
    control = parameters_of(train_in_one_process(case, lambda losses: torch.stack(losses).mean()))
    assert float((control - exact).norm() / exact.norm()) > 1e-3


def test_torchs_join_fails_the_same_check():
    case = Case((14, 6), (2, 2))
    (first, first_digest), (second, second_digest) = run_processes(fit_with_torch_join, 2, case, timeout=60)
    exact = parameters_of(train_in_one_process(case))
    assert first_digest != second_digest
    for parameters in (first, second):
        assert float((parameters - exact).norm() / exact.norm()) > 1e-3


def run_drawn(seed: int, number: int) -> None:
    generator = random.Random(seed)
    drawn = [draw(generator) for _ in range(number)]
    for world_size in (2, 3):
        cases = [case for case in drawn if case.world_size == world_size]
        by_rank = run_processes(fit_all, world_size, cases, timeout=280)
        for index, case in enumerate(cases):
            check(case, [of_rank[index] for of_rank in by_rank])


@pytest.mark.slow
def test_drawn_amounts_of_data():
    run_drawn(seed=1, number=12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 12))
def test_more_drawn_amounts_of_data(seed):
    run_drawn(seed, number=30)
