"""`balanced_ddp` with every kind of loader, in training, evaluation and after an interruption."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torchmetrics.classification import MulticlassAccuracy

from lightning_ddp_ext import BalancedDDPStrategy
from tests.strategies.test_balanced_ddp import Recording, joined
from tests.strategies.test_resuming import stateful
from tests.strategies.toolkit import (
    CLASSES,
    RANK,
    Noisy,
    SizedStream,
    Stream,
    errors_of,
    fit,
    part_of_a_run,
    run_on_ranks,
    samples,
    selected,
    trainer,
    values_of,
    with_slow,
)

FIXED = {"split": [1, 2]}


def data(number: int = 21) -> TensorDataset:
    return TensorDataset(*samples(number))


class Halves:
    """A batch sampler of lists of unequal lengths, in an order from three generators of the process."""

    def __iter__(self) -> Iterator[list[int]]:
        for start in (0, 4, 14):
            step = [start + offset for offset in range(4 if start == 0 else 7)]
            random.shuffle(step)
            numpy.random.shuffle(step)
            yield [step[index] for index in torch.randperm(len(step)).tolist()]

    def __len__(self) -> int:
        return 3


class Diverging(Halves):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 5], [6, 7 + RANK]])


class EndingEarlier(Halves):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 5], [6, 7], [8]][: 3 - RANK])


class Chunks:
    """A loader of batches that is not torch's."""

    def __iter__(self) -> Iterator[Any]:
        return (tuple(part[at : at + 3] for part in samples(21)) for at in range(0, 21, 3))


class FewerChunks(Chunks):
    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), 7 - RANK)


def deal(items: list[Any]) -> list[Any]:
    return items[RANK::2]


class OwnShard(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(deal(list(data())))


class Printing(Stream):
    def __iter__(self) -> Iterator[Any]:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print("begin")
        return super().__iter__()


class Shuffled(Stream):
    """Shuffles with all generators of the process, before and while it is read."""

    def __iter__(self) -> Iterator[Any]:
        items = [self.items[index] for index in torch.randperm(len(self.items)).tolist()]
        numpy.random.shuffle(items)
        while items:
            yield items.pop(random.randrange(len(items)))


class Untouched(TensorDataset):
    """Notes which samples are fetched."""

    def __init__(self, *tensors: Any) -> None:
        super().__init__(*tensors)
        self.fetched: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.fetched.append(index)
        return super().__getitem__(index)

    __getitems__ = None  # type: ignore[assignment]


class Rows(TensorDataset):
    """Fetches all samples of a batch at once, and fails for none."""

    def __getitems__(self, indices: list[int]) -> Any:
        rows = numpy.array(indices)  # of floats if there are none
        return list(zip(*(column[rows] for column in self.tensors), strict=True))


def skip_broken(drawn: list[Any]) -> Any:
    return default_collate([sample for sample in drawn if sample is not None])


def with_gaps() -> list[Any]:
    return [None if index % 5 == 1 else sample for index, sample in enumerate(data())]


def weighted() -> DataLoader:
    return DataLoader(data(), 5, sampler=WeightedRandomSampler([1.0 + index for index in range(21)], 21))


def whole_batches() -> DataLoader:
    columns = samples(21)
    return DataLoader([tuple(part[at : at + 5] for part in columns) for at in range(0, 21, 5)], None, shuffle=True)


def both(mode: Any = "max_size_cycle") -> CombinedLoader:
    loaders = [DataLoader(data(16), 4, shuffle=True), DataLoader(data(12), 4, shuffle=True)]
    return CombinedLoader({"one": loaders[0], "other": loaders[1]}, mode)


class OfBoth(Recording):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx
        parts = [batch[name] for name in ("one", "other") if batch[name] is not None]
        self.by_batch[number] = [100 * place + index for place, part in enumerate(parts) for index in part[2].tolist()]
        return sum(map(self.loss, parts))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(data(), 5, shuffle=True),
    "without the last batch": lambda: DataLoader(data(), 5, shuffle=True, drop_last=True),
    "with replacement": lambda: DataLoader(data(), 5, sampler=RandomSampler(data(), replacement=True, num_samples=40)),
    "own generator": lambda: DataLoader(data(), 5, shuffle=True, generator=torch.Generator().manual_seed(RANK)),
    "rows": lambda: DataLoader(Rows(*samples(21)), 5, shuffle=True),
    "rows with workers": lambda: DataLoader(Rows(*samples(21)), 5, shuffle=True, num_workers=1),
    "weighted": weighted,
    "own batch sampler": lambda: DataLoader(data(), batch_sampler=Halves()),
    "batch sampler": lambda: DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(data()), 4, False)),
    "workers": lambda: DataLoader(data(), 4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(data(), 4, shuffle=True, num_workers=1, persistent_workers=True),
    "whole batches": whole_batches,
    "iterable": Chunks,
    "stream": lambda: DataLoader(Stream(list(data())), 5),
    "stream with workers": lambda: DataLoader(Stream(list(data())), 5, num_workers=2),
    "stream without the last batch": lambda: DataLoader(Stream(list(data())), 5, drop_last=True),
    "shuffled stream": lambda: DataLoader(Shuffled(list(data())), 5),
    "shuffled stream with a worker": lambda: DataLoader(Shuffled(list(data())), 5, num_workers=1),
    "stream with gaps": lambda: DataLoader(Stream(with_gaps()), 5, collate_fn=skip_broken),
    "samples with gaps": lambda: DataLoader(with_gaps(), 5, collate_fn=skip_broken),
    "shuffled finished batches": lambda: DataLoader(Shuffled(list(Chunks())), None),
    "stream that prints on rank 0": lambda: DataLoader(Printing(list(data())), 5),
    "stateful": stateful,
    "several": both,
    "several, the shortest": partial(both, "min_size"),
    "several, the longest": partial(both, "max_size"),
}


@dataclass(frozen=True)
class Seen:
    """Trains two epochs; returns the samples of each batch, the digests, and the parameters."""

    name: str
    options: dict[str, Any] = field(default_factory=lambda: FIXED)
    of_trainer: dict[str, Any] = field(default_factory=dict)
    is_noisy: bool = False

    def __call__(self, folder: str = "") -> Any:
        module = OfBoth() if self.name.startswith("several") else Recording()
        if self.is_noisy:
            module.make_optimizer = partial(Noisy, lr=0.1)
        torch.rand(3 * RANK)  # ranks have other random numbers
        options = {"max_epochs": 2, "use_distributed_sampler": True, **self.of_trainer}
        _, trace = fit(module, LOADERS[self.name](), strategy=BalancedDDPStrategy(**self.options), **options)
        return module.by_batch, trace.digests, trace.parameters


LIMITED = {"limit_train_batches": 3}
RUNS = {
    **{name: Seen(name) for name in LOADERS},
    "limited": Seen("shuffled", of_trainer=LIMITED),
    "limited stream": Seen("stream", of_trainer=LIMITED),
    "optimizer that draws": Seen("shuffled", is_noisy=True),
    "rows without data": Seen("rows", {"gpu0_batch_size": 0}),
    "workers without data": Seen("workers", {"gpu0_batch_size": 0}),
    "stream without data": Seen("stream with workers", {"gpu0_batch_size": 0}),
    "iterable without data": Seen("iterable", {"gpu0_batch_size": 0}),
}


class Evaluating(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.accuracy(self.network(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True, add_dataloader_idx=False)
        self.log("val_loss", self.mean_loss(batch), on_epoch=True, sync_dist=True, add_dataloader_idx=False)

    test_step = validation_step


def evaluate(options: dict[str, Any], folder: str) -> list[list[float]]:
    """Return the values of a validation after training, of one within training, and of a stream."""
    module = Evaluating().double()
    loaders = (DataLoader(data(), 5), DataLoader(data(9), 4))
    made = trainer(strategy=BalancedDDPStrategy(**options), max_epochs=1, num_sanity_val_steps=1)
    made.fit(module, DataLoader(data(), 5, shuffle=True), loaders[0])
    found = [{**made.callback_metrics}]
    found.extend(made.validate(module, loaders[1], verbose=False))
    found.extend(made.test(module, DataLoader(Stream(list(data(9))), 4), verbose=False))
    return [[round(float(value), 12) for _, value in sorted(one.items())] for one in found]


EVALUATIONS = {
    "evaluation": partial(evaluate, FIXED),
    "evaluation without data": partial(evaluate, {"gpu0_batch_size": 0}),
}


def only_the_share_is_fetched(folder: str) -> list[int]:
    dataset = Untouched(*samples(21))
    fit(Recording(), DataLoader(dataset, 5, shuffle=True), strategy=BalancedDDPStrategy(**FIXED))
    return dataset.fetched


def refuse(name: str, folder: str) -> None:
    options: dict[str, Any] = {"strategy": BalancedDDPStrategy(), "max_epochs": 1}
    options["accumulate_grad_batches"] = 2 if name.startswith("accumulated") else 1
    if name.startswith("validation"):
        trainer(**options).validate(Evaluating().double(), REFUSED[name][0](), verbose=False)
    else:
        fit(Recording(), REFUSED[name][0](), **options)


OTHER_SAMPLES = "UnsupportedFeatureError: rank 1: the first batch of `OwnShard` has other samples than on rank 0"
ENDED = "UnevenInputsError: rank 1: `Stream` ended after 3 batches, and has more on other ranks"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sampler of the rank": (
        lambda: DataLoader(data(), 5, sampler=DistributedSampler(data(), 2, RANK)),
        "UnsupportedFeatureError: a loader has a `DistributedSampler` with `num_replicas=2`",
    ),
    "diverging batches": (
        lambda: DataLoader(data(), batch_sampler=Diverging()),
        "RanksOutOfStepError: rank 1: batch 1 of `Diverging` has other samples than on rank 0",
    ),
    "stream of the rank with workers": (lambda: DataLoader(OwnShard(), 5, num_workers=1), OTHER_SAMPLES),
    "validation on a stream of the rank": (lambda: DataLoader(OwnShard(), 5), OTHER_SAMPLES),
    "stream that is empty on a rank": (
        lambda: DataLoader(Stream(list(data())[21 * RANK :]), 5),
        "UnevenInputsError: rank 1: `Stream` ended after 0 batches, and has more on other ranks",
    ),
    "diverging stream": (
        lambda: DataLoader(Stream([*list(data())[:5], *list(data())[5 + RANK : 20 + RANK]]), 5),
        "RanksOutOfStepError: rank 1: batch 1 of `Stream` has other samples than on rank 0",
    ),
    "stream that ends earlier on a rank": (lambda: DataLoader(Stream(list(data())[: 20 - 5 * RANK]), 5), ENDED),
    "stream that ends one sample earlier on a rank": (
        lambda: DataLoader(Stream(list(data())[: 17 - RANK]), 5),
        "UnevenInputsError: rank 1: `Stream` ended after 3 batches and 1 samples, and has more on other ranks",
    ),
    "stream with a length that ends several batches earlier on a rank": (
        lambda: DataLoader(SizedStream(list(data())[: 21 if RANK else 1], 21), 4),
        "UnevenInputsError: rank 0: `SizedStream` ended after 0 batches and 1 samples, and has more on other ranks",
    ),
    "validation on a stream that ends one short batch earlier on a rank": (
        lambda: DataLoader(Stream(list(data())[: 16 - RANK]), 5, num_workers=1),
        ENDED,
    ),
    "own batches that end earlier on a rank": (
        lambda: DataLoader(data(), batch_sampler=EndingEarlier()),
        "UnevenInputsError: rank 1: `EndingEarlier` ended after 2 batches, and has more on other ranks",
    ),
    "iterable that ends earlier on a rank": (
        FewerChunks,
        "UnevenInputsError: rank 1: `FewerChunks` ended after 6 batches, and has more on other ranks",
    ),
    "dataset with fewer samples on a rank": (
        lambda: DataLoader(data(16 - RANK), 5),
        "UnsupportedFeatureError: rank 1: the last batch of `BatchSampler` has other samples than on rank 0",
    ),
    "accumulated stream that ends earlier on a rank": (
        lambda: DataLoader(Stream(list(data())[: 20 - 5 * RANK]), 5, num_workers=1),
        ENDED,
    ),
    "data pipe": (lambda: DataLoader(IterableWrapper(list(data())), 5), "Wrapper` gives each rank samples of its own"),
    "small batches": (
        lambda: DataLoader(data(), 1),
        "BatchSplitError: rank 1 never gets a sample: batches of 1 are shared as [1, 0]. Use larger batches or fewer",
    ),
    "stream with other workers": (
        lambda: DataLoader(Stream(list(data())), 5, num_workers=RANK),
        "UnsupportedFeatureError: the loaders of a stream have workers that fetch 0, 2 batches ahead on ranks 0 to 1",
    ),
    "broken samples": (
        lambda: DataLoader([*list(data())[:3], None, None], 5, collate_fn=skip_broken),
        "all 2 samples in the share of a rank are None, and the collate function raises IndexError",
    ),
    "any order": (
        lambda: DataLoader(data(), 5, num_workers=1, in_order=False),
        "UnsupportedFeatureError: a loader has `in_order=False`",
    ),
    "other proportions": (
        lambda: [DataLoader(data(), 4), DataLoader(data(), 5)],
        "BatchSplitError: the loaders of a step give 4 and 5 samples",
    ),
}


# The others are slow.
QUICK = {
    "shuffled", "own generator", "rows with workers", "weighted", "own batch sampler", "persistent workers",
    "whole batches", "stream with workers", "shuffled stream with a worker", "samples with gaps", "stateful", "several",
    "limited stream", "optimizer that draws", "workers without data", "iterable without data",
}  # fmt: skip
QUICK_REFUSALS = {
    "sampler of the rank", "diverging batches", "stream of the rank with workers", "validation on a stream of the rank",
    "stream that ends earlier on a rank", "stream that ends one sample earlier on a rank", "data pipe", "small batches",
    "own batches that end earlier on a rank", "dataset with fewer samples on a rank", "broken samples", "any order",
    "stream with other workers", "other proportions",
}  # fmt: skip


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    names = selected(request, "name")
    runs = {name: case for name, case in RUNS.items() if name in names}
    alone = {name: replace(case, options={}) for name, case in runs.items()}
    alone.update((name, partial(evaluate, {})) for name in EVALUATIONS)
    refused = {name: partial(refuse, name) for name in REFUSED if name in names}
    shared = {**runs, **EVALUATIONS, "fetched": only_the_share_is_fetched, **refused}
    folder = tmp_path_factory.mktemp("data")
    return run_on_ranks(1, alone, folder), run_on_ranks(2, shared, folder)


@pytest.mark.parametrize("name", with_slow(RUNS, QUICK))
def test_ranks_share_the_batches_of_one_process(found, name):
    (whole, _, wanted), by_rank = values_of(found[0], name)[0], values_of(found[1], name)
    numbers = sorted(set().union(*(batches for batches, _, _ in by_rank)))
    shared = [sorted(joined(batches.get(number, []) for batches, _, _ in by_rank)) for number in numbers]
    assert shared == [sorted(whole[number]) for number in sorted(whole)] != []
    for _, digests, parameters in by_rank:
        assert digests == by_rank[0][1] != []
        torch.testing.assert_close(parameters, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation_is_the_one_of_one_process(found, name):
    (wanted,) = values_of(found[0], name)
    for values in values_of(found[1], name):
        assert len(values) == 3
        for own, other in zip(values, wanted, strict=True):
            assert own == pytest.approx(other, rel=1e-9)


def test_a_rank_fetches_no_sample_of_another_rank(found):
    fetched = values_of(found[1], "fetched")
    assert sorted(joined(fetched)) == list(range(21))
    assert len(fetched[0]) < len(fetched[1])


@pytest.mark.parametrize("name", with_slow(REFUSED, QUICK_REFUSALS))
def test_data_that_ranks_cannot_share_is_refused(found, name):
    for error in errors_of(found[1], name):
        assert REFUSED[name][1] in error


# ---------------------------------------------------------------- resuming

RESUMED = (
    "shuffled",
    "own generator",
    "own batch sampler",
    "workers",
    "stream",
    "shuffled stream",
    "stateful",
    "several",
)
STEPS = {"own batch sampler": 4, "several": 5}  # else 7 of 2 x 5 or 2 x 6; this is within the second epoch


def see(name: str, steps: int, until: bool, folder: str) -> dict[int, list[int]]:
    """Train two epochs until a checkpoint is saved after a step, or from it on; returns the samples by batch."""
    module = OfBoth() if name == "several" else Recording()
    torch.rand(3 * RANK + until)
    options = part_of_a_run(f"{folder}/{name}-{steps}", steps, until)
    fit(module, LOADERS[name](), strategy=BalancedDDPStrategy(balance="even"), max_epochs=2, **options)
    return module.by_batch


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The samples by batch of whole runs, of interrupted runs of each number of ranks, and the folders of these."""
    points = [(name, STEPS.get(name, 7)) for name in RESUMED]
    points += [("shuffled", 5), ("own generator", 5)]  # the end of the first epoch
    whole = run_on_ranks(1, {name: Seen(name, {}) for name in RESUMED})
    folders, found = {}, {}
    for ranks in (1, 2, 3):
        folders[ranks] = tmp_path_factory.mktemp(f"of{ranks}")
        cases = {f"{name}-{steps}": partial(see, name, steps, True) for name, steps in points}
        found[ranks] = run_on_ranks(ranks, cases, folders[ranks])
    return points, whole, folders, found


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2), (2, 2)])
def test_a_run_resumes_on_any_number_of_ranks(interrupted, before, after):
    points, whole, folders, found = interrupted
    cases = {f"{name}-{steps}": partial(see, name, steps, False) for name, steps in points}
    resumed = run_on_ranks(after, cases, folders[before])
    for name, steps in points:
        wanted = {number: sorted(batch) for number, batch in values_of(whole, name)[0][0].items()}
        key = f"{name}-{steps}"
        merged: dict[int, list[int]] = {}
        for part in (*values_of(found[before], key), *values_of(resumed, key)):
            for number, batch in part.items():
                merged.setdefault(number, []).extend(batch)
        assert {number: sorted(batch) for number, batch in merged.items()} == wanted, key
        assert 0 < len(set().union(*values_of(resumed, key))) == len(wanted) - steps
