"""`cost` of `balanced_ddp`: ranks get samples of equal costs instead of equally many."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_ddp_ext import BalancedDDPStrategy
from lightning_ddp_ext.shares.costs import SampleCost
from tests.strategies.test_balanced_ddp import Recording, Simulated, joined, order_of
from tests.strategies.toolkit import ALONE, RANK, Stream, errors_of, fit, run_on_ranks, samples, values_of

NUMBER, BATCH = 90, 16
LENGTHS = [1 + 61 * index % 40 if index % 5 else 60 for index in range(NUMBER)]


class Sequences(Dataset):
    """Sequences of very different lengths; reading a sample draws from the generator of the process."""

    def __init__(self) -> None:
        self.features, self.labels, self.indices = samples(NUMBER)
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> Any:
        torch.rand(1)
        self.read.append(index)
        rows = self.features[index] + torch.arange(LENGTHS[index], dtype=torch.float64).sin()[:, None]
        return {"rows": rows, "label": self.labels[index], "index": self.indices[index]}


def concatenate(chosen: list[Any]) -> Any:
    """Concatenate sequences without padding."""
    labels, indices = (torch.stack([one[name] for one in chosen]) for name in ("label", "index"))
    return torch.cat([one["rows"] for one in chosen]), labels, indices


class Pooling(Recording):
    """Classifies the mean of a sequence."""

    def log(self, name: str, value: Any, **options: Any) -> None:
        super().log(name, value, batch_size=1, **options)  # in one process, Lightning cannot count the samples

    def mean_loss(self, batch: Any, **options: Any) -> Tensor:
        rows = batch[0].split([LENGTHS[index] for index in batch[2].tolist()])
        return super().mean_loss((torch.stack([part.mean(0) for part in rows]), *batch[1:]), **options)


def square(sample: Any) -> float:
    return len(sample["rows"]) ** 2


def wrong_of_one(value: Any) -> Any:
    """Return a function that is wrong for one sample, which the second rank measures."""
    return lambda sample: value if int(sample["index"]) == 7 else 1.0


class Unreadable(Sequences):
    def __getitem__(self, index: int) -> Any:
        return {}[index] if index == 7 else super().__getitem__(index)


class SimulatedCosts(Simulated):
    """The times of this rank are proportional to the costs of its samples."""

    def timer(self, device: Any) -> Any:
        simulated, module = super().timer(device), self.trainer.lightning_module
        number, speed = self.trainer.strategy.driver.balance.shared.number, self.speeds[0][RANK]
        type(simulated).seconds = property(lambda _: cost_of(module.by_batch.get(number, [])) / speed / 1000)
        return simulated


def cost_of(indices: list[int], power: int = 1) -> int:
    return sum(LENGTHS[index] ** power for index in indices)


@dataclass(frozen=True)
class Case:
    """A run of some epochs."""

    options: dict[str, Any] = field(default_factory=lambda: {"balance": "even", "cost": "length"})
    of_loader: dict[str, Any] = field(default_factory=dict)
    is_stream: bool = False
    speeds: tuple[int, ...] = ()
    epochs: int = 1

    def __call__(self, folder: str = "") -> Any:
        module, data = Pooling(), Sequences()
        given: Any = Stream([data[index] for index in range(NUMBER)]) if self.is_stream else data
        order = {} if self.is_stream else {"shuffle": True}
        loader = DataLoader(given, BATCH, collate_fn=concatenate, **order, **self.of_loader)
        data.read.clear()
        callbacks = [SimulatedCosts([self.speeds])] if self.speeds else []
        strategy = BalancedDDPStrategy(**self.options)
        _, trace = fit(module, loader, strategy=strategy, callbacks=callbacks, max_epochs=self.epochs)
        return module.by_batch, trace.parameters, trace.digests, data.read


EVEN = (1, 1)
CASES: dict[str, tuple[Case, tuple[float, ...], int]] = {  # with the proportions of costs, and the power of lengths
    "length": (Case(), EVEN, 1),
    "function": (Case({"balance": "even", "cost": square}), EVEN, 2),
    "split": (Case({"split": [1, 3], "cost": "length"}), (1, 3), 1),
    "rank without samples": (Case({"gpu0_batch_size": 0, "cost": "length"}), (0, 1), 1),
    "workers": (Case(of_loader={"num_workers": 1}), EVEN, 1),
    "stream": (Case(is_stream=True), EVEN, 1),
    "stream with a worker": (Case(is_stream=True, of_loader={"num_workers": 1}), EVEN, 1),
}
OTHERS = {
    "counts": Case({"balance": "even"}),
    "padded": Case({"balance": "even", "cost": "padded_length"}),
    "padded stream": Case({"balance": "even", "cost": "padded_length"}, {"num_workers": 1}, is_stream=True),
    "control": Case({"split": [1, 3], "cost": "length", "weight_by": "equal"}),
    "auto": Case({"cost": "length"}, speeds=(1, 3), epochs=6),
    "few for rank 0": Case({"gpu0_batch_size": 2, "cost": "length"}),
    "few for rank 0, padded": Case({"gpu0_batch_size": 2, "cost": "padded_length"}),
}


class Keys(Sampler[list[str]]):
    def __iter__(self) -> Any:
        return iter([["0", "1"]])


class ByKey(Sequences):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(int(key))


def both() -> CombinedLoader:
    loaders = [DataLoader(Sequences(), 4, shuffle=True, collate_fn=concatenate) for _ in range(2)]
    return CombinedLoader(loaders, "min_size")


REFUSED: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "whole batches": (
        "length",
        lambda: DataLoader([samples(4)], None),
        "UnsupportedFeatureError: `cost` needs a loader that collates samples, and `DataLoader` gives whole batches",
    ),
    "keys": (
        "length",
        lambda: DataLoader(ByKey(), batch_sampler=Keys(), collate_fn=concatenate),
        "UnsupportedFeatureError: `cost` needs a dataset whose samples have the indices 0 to `len(dataset) - 1`, and"
        " `Keys` yields ['0', '1']",
    ),
    "other lengths": (
        "length",
        lambda: DataLoader(torch.utils.data.Subset(Sequences(), range(9 - RANK)), 4, collate_fn=concatenate),
        "UnsupportedFeatureError: `cost` needs a dataset with the same `len` on every rank, and `Subset` has 9, 8 on",
    ),
    "several loaders": ("length", both, "BatchSplitError: the loaders of a step give 4 and 4 samples, in the shares"),
    **{
        f"returns {value}": (
            wrong_of_one(value),
            lambda: DataLoader(Sequences(), 4, collate_fn=concatenate),
            f"ValueError: rank 1, sample 7: `cost` returned {value!r}. Return a finite number of at least 0",
        )
        for value in (-1.0, None, float("nan"), "9", (1, 2))
    },
    "stream": (
        wrong_of_one(None),
        lambda: DataLoader(Stream([Sequences()[index] for index in range(9)]), 4, collate_fn=concatenate),
        ", batch 1, sample 3: `cost` returned None. Return a finite number",
    ),
    "a stream, and an error": (
        lambda sample: float(sample["absent"]),
        lambda: DataLoader(Stream([Sequences()[index] for index in range(9)]), 4, collate_fn=concatenate),
        ", batch 0, sample 0: `cost` raises KeyError: 'absent'",
    ),
    "unreadable sample": (
        "length",
        lambda: DataLoader(Unreadable(), 4, collate_fn=concatenate),
        "ValueError: rank 1, sample 7: KeyError: 7",
    ),
}


def refuse(name: str, folder: str) -> None:
    cost, make, _ = REFUSED[name]
    fit(Pooling(), make(), strategy=BalancedDDPStrategy(cost=cost), max_epochs=1)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cases = {**{name: case for name, (case, *_) in CASES.items()}, **OTHERS}
    refused = {f"refused: {name}": partial(refuse, name) for name in REFUSED}
    return run_on_ranks(2, {**cases, **refused}, tmp_path_factory.mktemp("costs"))


def alone(order: list[list[int]]) -> Tensor:
    data = Sequences()
    loader = DataLoader([concatenate([data[index] for index in batch]) for batch in order], batch_size=None)
    seed_everything(0, verbose=False)
    return fit(Pooling(), loader, **ALONE)[1].parameters


def sets_of(order: list[list[int]]) -> list[set[int]]:
    return [set(batch) for batch in order]


def unevenness(by_rank: list[Any], power: int = 1) -> float:
    """Return the mean over batches of the largest cost of a rank relative to an even share, less 1."""
    batches = [[cost_of(one.get(number, []), power) for one, *_ in by_rank] for number in range(len(order_of(by_rank)))]
    return sum(max(costs) * len(costs) / sum(costs) - 1 for costs in batches) / len(batches)


@pytest.mark.parametrize("name", CASES)
def test_costs_are_shared_in_proportion_and_the_gradient_is_the_one_of_the_whole_batch(found, name):
    (_, proportions, power), by_rank = CASES[name], values_of(found, name)
    order = order_of(by_rank)
    assert sorted(joined(order)) == list(range(NUMBER))
    if "stream" not in name:
        assert sets_of(order) == sets_of(order_of(values_of(found, "counts")))
    for number, batch in enumerate(order):
        for (batches, *_), proportion in zip(by_rank, proportions, strict=True):
            share = cost_of(batch, power) * proportion / sum(proportions)
            longest = max(LENGTHS[index] ** power for index in batch)
            assert abs(cost_of(batches.get(number, []), power) - share) <= (longest if proportion else 0)
    wanted = alone(order)
    for _, parameters, digests, _ in by_rank:
        assert float((parameters - wanted).abs().max()) < 1e-10
        assert digests == by_rank[0][2] != []


@pytest.mark.parametrize("name", ["few for rank 0", "few for rank 0, padded"])
def test_gpu0_batch_size_limits_samples_of_any_cost(found, name):
    by_rank = values_of(found, name)
    order = order_of(by_rank)
    assert [len(by_rank[0][0][number]) for number in range(len(order))] == [2] * len(order)
    for _, parameters, *_ in by_rank:
        assert float((parameters - alone(order)).abs().max()) < 1e-10


def test_costs_make_ranks_more_even_than_counts_and_equal_weights_are_wrong(found):
    assert 0 < 4 * unevenness(values_of(found, "length")) < unevenness(values_of(found, "counts"))
    by_rank = values_of(found, "control")
    assert float((by_rank[0][1] - alone(order_of(by_rank))).abs().max()) > 1e-6


@pytest.mark.parametrize("name", ["padded", "padded stream"])
def test_samples_of_similar_length_come_together_if_they_are_padded(found, name):
    by_rank = values_of(found, name)
    order = order_of(by_rank)
    for number in range(len(order)):
        shorter, longer = ([LENGTHS[index] for index in one[number]] for one, *_ in by_rank)
        assert max(shorter) <= min(longer)
    wanted = alone(order)
    for _, parameters, *_ in by_rank:
        assert float((parameters - wanted).abs().max()) < 1e-10


def test_padded_shares_take_less_time_than_equal_counts(found):
    def slowest(by_rank: list[Any]) -> int:
        shares = [[one[number] for one, *_ in by_rank] for number in range(len(order_of(by_rank)))]
        return sum(max(len(share) * max(LENGTHS[index] for index in share) for share in batch) for batch in shares)

    assert slowest(values_of(found, "padded")) < 0.8 * slowest(values_of(found, "counts"))


def test_every_rank_measures_a_part_of_the_samples_once(found):
    reads = [read for *_, read in values_of(found, "length")]
    assert [read[: NUMBER // 2] for read in reads] == [list(range(rank, NUMBER, 2)) for rank in range(2)]
    assert sorted(joined(read[NUMBER // 2 :] for read in reads)) == list(range(NUMBER))


def test_auto_finds_the_speeds_of_ranks_with_costs(found):
    by_rank = values_of(found, "auto")
    order = order_of(by_rank)
    last = range(len(order) - 6, len(order))
    costs = [sum(cost_of(batches[number]) for number in last) for batches, *_ in by_rank]
    assert costs[0] / sum(costs) == pytest.approx(1 / 4, abs=0.05)


@pytest.mark.parametrize("name", REFUSED)
def test_data_without_costs_are_refused(found, name):
    for error in errors_of(found, f"refused: {name}"):
        assert REFUSED[name][2] in error


class Graph:
    """As in PyTorch Geometric."""

    def to_dict(self) -> dict[str, Any]:
        return {"x": torch.zeros(4, 9), "edge_index": torch.zeros(2, 7), "y": torch.tensor(1)}


def test_length_is_the_one_of_the_longest_part_of_a_sample():
    length = SampleCost("length")
    for sample, expected in (
        (torch.zeros(7), 7),
        ({"input_ids": [1, 2, 3], "label": 1}, 3),
        ((torch.zeros(4, 9), torch.tensor(1)), 4),
        ([[1, 2], "a text"], 6),
        (torch.zeros(5).numpy(), 5),
        ([], 0),
        (Graph(), 4),
    ):
        assert length(sample, "") == expected
    with pytest.raises(ValueError, match=r"`cost` finds no array, text or list of numbers in a sample, a `d"):
        length({"label": 1}, "")
    with pytest.raises(
        ValueError, match='`cost` must be "length", "padded_length" or a function of one sample, got \'lengths\''
    ):
        BalancedDDPStrategy(cost="lengths")
