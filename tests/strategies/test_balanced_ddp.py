"""`balanced_ddp`: any number of ranks sees the same samples in the same step, and ends with the same parameters."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDDPStrategy
from lightning_ddp_ext.steps import balancer
from lightning_ddp_ext.strategies import balanced_ddp
from tests.strategies.toolkit import (
    ALONE,
    RANK,
    Classifier,
    Momentum,
    Stream,
    assert_identical,
    fit,
    run_on_ranks,
    samples,
    values_of,
)
from tests.support.training import normalised_network, quiet_trainer

EPOCHS = 2
SPEEDS = (1, 3, 4)  # of three ranks, in samples per unit of time


class Recording(Classifier):
    """Records the indices of each batch of this rank, by the number of the batch."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.by_batch: dict[int, list[int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx
        self.by_batch[number] = batch[2].tolist()
        return super().training_step(batch, batch_idx)


class Simulated(Callback):
    """Records the shares, and replaces the times of this rank: in proportion to its samples, and known steps late."""

    def __init__(self, speeds: Any, late: int = 0) -> None:
        self.sizes: list[tuple[int, ...]] = []
        self.speeds, self.late = speeds, late
        self.patch = mock.patch.object(balancer, "Timer", self.timer)

    def timer(self, device: Any) -> Any:
        sizes, begun, seen = self.trainer.strategy.driver.balance.shared.sizes, len(self.sizes), self.sizes
        speed = self.speeds[min(begun, len(self.speeds) - 1)][RANK]

        class Timer:
            seconds = sizes[RANK] / speed / 100

            def start(self) -> None: ...

            stop = start

            def is_done(timer) -> bool:
                return len(seen) >= begun + self.late

        return Timer()

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.trainer = trainer
        self.patch.start()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.sizes.append(trainer.strategy.driver.balance.shared.sizes)

    def on_train_end(self, *_: Any) -> None:
        self.patch.stop()


@dataclass(frozen=True)
class Case:
    """A run of two epochs; samples are shuffled unless they are of a stream."""

    number: int = 45
    windows: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # of the strategy
    batch_size: int = 8
    of_loader: dict[str, Any] = field(default_factory=dict)
    of_trainer: dict[str, Any] = field(default_factory=dict)
    is_stream: bool = False
    speeds: Any = (SPEEDS,)
    late: int = 0  # steps until a time is known
    most: int | None = None  # samples that rank 1 has memory for
    workers_of_rank_1: int | None = None

    def __call__(self, folder: str = "") -> Any:
        data = TensorDataset(*samples(self.number))
        given: Any = Stream(list(data)) if self.is_stream else data
        other = {} if self.workers_of_rank_1 is None or RANK != 1 else {"num_workers": self.workers_of_rank_1}
        loader = DataLoader(given, self.batch_size, shuffle=not self.is_stream, **{**self.of_loader, **other})
        module, simulated = Recording(), Simulated(self.speeds, self.late)
        options = {"max_epochs": EPOCHS, "accumulate_grad_batches": self.windows, **self.of_trainer}
        callbacks = [*([] if self.options else [simulated]), *options.pop("callbacks", [])]
        limits = [self.most if RANK == 1 else None]
        with (
            mock.patch.object(balanced_ddp, "has_own_memory", return_value=self.most is not None),
            mock.patch.object(balancer.PeakMemory, "observe", return_value=limits),
        ):
            _, trace = fit(module, loader, strategy=BalancedDDPStrategy(**self.options), callbacks=callbacks, **options)
        return module.by_batch, trace.parameters, trace.digests, simulated.sizes


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def order_of(by_rank: Sequence[Any]) -> list[list[int]]:
    """Return the indices of each batch, those of rank 0 first."""
    numbers = sorted(set().union(*(batches for batches, *_ in by_rank)))
    assert numbers == list(range(len(numbers)))
    return [joined(batches.get(number, []) for batches, *_ in by_rank) for number in numbers]


def alone(batches: list[list[int]], windows: int) -> torch.Tensor:
    """Train in one process on batches of these indices, and return the parameters."""
    in_epoch = len(batches) // EPOCHS
    epochs = [batches[:in_epoch], batches[in_epoch:]]
    wholes = [joined(epoch[at : at + windows]) for epoch in epochs for at in range(0, in_epoch, windows)]
    data = samples(1 + max(map(max, wholes)))
    loader = DataLoader([tuple(part[whole] for part in data) for whole in wholes], batch_size=None)
    seed_everything(0, verbose=False)
    return fit(Momentum(), loader, **ALONE)[1].parameters


def cases_of(ranks: int, is_complete: bool) -> dict[str, Case]:
    splits = {"even": {"balance": "even"}, "gpu0 0": {"gpu0_batch_size": 0}, "gpu0 2": {"gpu0_batch_size": 2}}
    if ranks > 1:
        splits["split"] = {"split": [1, 2, 3] if ranks == 3 else [1, 3]}
    pairs = itertools.product((45, 17, 64), (1, 3)) if is_complete else ((45, 1), (17, 3))
    found = {
        f"{name}, {number} samples, {windows}": Case(number, windows, options)
        for (number, windows), (name, options) in itertools.product(pairs, [*splits.items(), ("auto", {})])
    }
    if ranks > 1:
        found["control"] = Case(45, 1, {"split": [1, 2, 3][-ranks:], "weight_by": "equal"})
    return found


@pytest.fixture(scope="module")
def wanted() -> Callable[[int, int], tuple[list[list[int]], torch.Tensor]]:
    """Return the batches of a single rank, and the parameters of one process under no strategy, for a case."""
    found = run_on_ranks(1, {f"{number}": Case(number) for number in (45, 17, 64)})

    @functools.cache
    def wanted_of(number: int, windows: int) -> tuple[list[list[int]], torch.Tensor]:
        order = order_of(values_of(found, f"{number}"))
        for epoch in (order[: len(order) // 2], order[len(order) // 2 :]):
            assert [len(batch) for batch in epoch[:-1]] == [8] * (-(-number // 8) - 1)
            assert sorted(joined(epoch)) == list(range(number)) != joined(epoch)
        return order, alone(order, windows)

    return wanted_of


COMPLETE = [pytest.param(ranks, True, marks=pytest.mark.slow, id=f"{ranks} ranks, all") for ranks in (1, 2, 3)]


@pytest.mark.parametrize(("ranks", "is_complete"), [(2, False), *COMPLETE])
def test_any_number_of_ranks_trains_as_one_process(wanted, ranks, is_complete, tmp_path):
    cases = cases_of(ranks, is_complete)
    found = run_on_ranks(ranks, cases, tmp_path)
    for name, case in cases.items():
        by_rank = values_of(found, name)
        order, alone = wanted(case.number, case.windows)
        assert order_of(by_rank) == order
        for _, parameters, digests, _ in by_rank:
            error = float((parameters - alone).abs().max())
            assert (error > 1e-6) if name == "control" else (error < 1e-10), (name, error)
            assert digests == by_rank[0][2] != []
    if ranks > 1:  # decisions have changed the shares
        by_rank = values_of(found, "auto, 64 samples, 1" if is_complete else "auto, 45 samples, 1")
        of_rank_0 = [len(by_rank[0][0][number]) for number in (0, 10)]
        assert of_rank_0 == ([4, 2] if ranks == 2 else [3, 1])


def test_a_number_of_proportions_that_does_not_fit_is_refused_before_ranks_are_started():
    with pytest.raises(ValueError, match=r"`split=.*` has 3 entries for 2 ranks"):
        quiet_trainer(BalancedDDPStrategy(split=[1, 2, 3]), 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("is_normalised", "share"), [(True, (2, 6)), (False, (1, 7))])
def test_batch_normalisation_gets_no_single_sample(is_normalised, share):
    module, simulated = Classifier(), Simulated([SPEEDS])
    if is_normalised:
        module.network = normalised_network()
    loader = DataLoader(TensorDataset(*samples(24)), batch_size=8)
    _, trace = fit(module, loader, strategy=BalancedDDPStrategy(split=[1, 7]), callbacks=[simulated])
    assert simulated.sizes == [share] * 3
    assert_identical(trace.digests)
