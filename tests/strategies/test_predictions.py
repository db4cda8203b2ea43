"""`trainer.predict` of several ranks returns what one process returns, in lockstep, and `PredictionWriter` resumes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler

from lightning_ddp_ext import BalancedDDPStrategy, DDPJoinStrategy, TokenBudgetBatchSampler, UnsupportedFeatureError
from lightning_ddp_ext.callbacks import PredictionWriter, read_predictions
from lightning_ddp_ext.distributed.exchange import destroy_group
from tests.strategies.toolkit import (
    ALONE,
    RANK,
    WORLD_SIZE,
    Stream,
    assert_identical,
    gather,
    run_on_ranks,
    trainer,
    values_of,
    with_slow,
)

RANKS = 3


class Found(NamedTuple):
    """A part of an output that has no tensors."""

    index: int
    words: list[str]


class Texts(Dataset):
    """Samples of different lengths, which are padded to the longest of a batch."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.arange(1.0, 2 + index % 4, dtype=torch.float64) * (index + 1)


def pad(samples: Sequence[tuple[int, Tensor]]) -> tuple[list[int], Tensor]:
    return [index for index, _ in samples], nn.utils.rnn.pad_sequence([row for _, row in samples], batch_first=True)


def load(number: int = 7, **options: Any) -> DataLoader:
    options = {"batch_size": 2, **options} if "batch_sampler" not in options else options
    return DataLoader(Texts(number), collate_fn=pad, **options)


class Predicting(LightningModule):
    """Returns tensors whose shapes depend on the batch, texts, and objects; its steps communicate."""

    def __init__(self, stops_at: int | None = None, pads: bool = True, bias: float = 0.25) -> None:
        super().__init__()
        self.pads = pads
        self.layer = nn.Linear(1, 1, dtype=torch.float64)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.constant_(self.layer.bias, bias)
        self.stops_at = stops_at
        self.seen: list[int] = []
        self.begun = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.begun == self.stops_at:
            raise ArithmeticError("interrupted")  # also on a rank without a sample
        self.begun += 1
        if isinstance(self.trainer.strategy, DDPJoinStrategy):  # ranks of `ddp` have different numbers of batches
            ranks = torch.ones(1, device=self.device)
            dist.all_reduce(ranks)
            assert ranks.item() == WORLD_SIZE  # also between two batches that some rank has no sample of
        return batch

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        indices, rows = batch
        if dist.is_initialized():
            active = self.all_gather(torch.ones(1, device=self.device))
            total = torch.ones(1, device=self.device)
            dist.all_reduce(total)
            assert total.item() == active.numel()
        self.seen.extend(indices)
        scores = rows * self.layer.weight[0, 0] + self.layer.bias[0]  # equal bit by bit for any number of samples
        return {
            "scores": scores if self.pads else scores[:, :1],
            "found": [Found(index, ["word"] * index) for index in indices],
            "ragged": [rows.new_full((index % 3,), index) for index in indices],
        }


def plain(value: Any) -> Any:
    """Return predictions as values that `==` compares, with every bit of tensors."""
    if isinstance(value, Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return value


def indices_of(predictions: Any) -> list[int]:
    return [one.index for batch in predictions for one in batch["found"]]


def predict(make: Callable[[], Any], options: dict[str, Any], pads: bool = True) -> Any:
    return plain(trainer(use_distributed_sampler=True, **options).predict(Predicting(pads=pads), make()))


MAKERS: dict[str, Callable[[], Any]] = {
    **{f"{number} samples": partial(load, number) for number in range(1, 11)},
    "single samples": partial(load, batch_size=1),
    "one batch": partial(load, batch_size=20),
    "two loaders": lambda: [load(7), load(4, batch_size=3)],
    "workers": partial(load, num_workers=1),
    "without collation": lambda: DataLoader([pad([Texts(7)[n]]) for n in range(7)], batch_size=None),
}
QUICK = {"1 samples", "4 samples", "7 samples", "two loaders", "workers", "without collation"}  # the others are slow
STRATEGIES = {"ddp_join": DDPJoinStrategy, "balanced_ddp": BalancedDDPStrategy}
KINDS = {**STRATEGIES, "balanced_ddp, none on rank 0": partial(BalancedDDPStrategy, gpu0_batch_size=0)}


def predict_alone(make: Callable[[], Any], pads: bool = True) -> Any:
    """Predict in one process without a strategy; called on all ranks, since it ends their process group."""
    if dist.is_initialized():
        destroy_group()
    return predict(make, ALONE, pads)


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("name", with_slow(MAKERS, QUICK))
@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_those_of_one_process_on_every_rank(kind, name):
    pads = kind == "ddp_join"  # `balanced_ddp` pads the share of each rank
    found = predict(MAKERS[name], {"strategy": KINDS[kind]()}, pads)
    assert found == predict_alone(MAKERS[name], pads) != []


@pytest.mark.ranks(RANKS)
def test_predictions_may_be_kept_on_rank_zero_only():
    found = predict(load, {"strategy": DDPJoinStrategy(predictions_on="rank_zero")})
    alone = predict_alone(load)
    assert found == (alone if RANK == 0 else None)


@pytest.mark.ranks(RANKS)
def test_shuffled_samples_are_predicted_once_and_alike():
    torch.manual_seed(RANK)
    made = trainer(use_distributed_sampler=True)
    for options in ({"shuffle": True}, {"batch_sampler": BatchSampler(RandomSampler(range(10)), 3, False)}):
        order = indices_of(made.predict(Predicting(), load(10, **options)))
        assert sorted(order) == list(range(10)) != order
        assert_identical(order)


@pytest.mark.ranks(RANKS)
def test_the_order_of_a_batch_sampler_is_kept():
    """In one process Lightning takes the sampler of the loader instead."""
    made = trainer(use_distributed_sampler=True)
    found = made.predict(Predicting(), load(batch_sampler=BatchSampler(range(6, -1, -1), 3, drop_last=False)))
    assert [indices_of([batch]) for batch in found] == [[6, 5, 4], [3, 2, 1], [0]]


@pytest.mark.ranks(RANKS)
def test_a_limit_keeps_the_first_batches():
    made = trainer(strategy=BalancedDDPStrategy(), use_distributed_sampler=True, limit_predict_batches=2)
    assert indices_of(made.predict(Predicting(pads=False), load())) == [0, 1, 2, 3]


@pytest.mark.ranks(RANKS)
def test_batches_with_a_token_budget_come_in_their_order():
    sampler = TokenBudgetBatchSampler([1 + index % 4 for index in range(10)], max_tokens=6, shuffle=False)
    make = partial(load, 10, batch_sampler=sampler)
    assert predict(make, {}) == predict_alone(make) != []


class Batches:
    """Finished batches, without torch's loader, and a batch sampler that is no class of torch."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def own_loader(kind: str) -> DataLoader:
    """A loader with the samples of this rank: 0 to 4, 5 and 6, and none."""
    own = [range(5), range(5, 7), range(0)][RANK]
    if kind == "stream":
        return DataLoader(Stream([Texts(7)[n] for n in own]), 2, collate_fn=pad)
    if kind == "iterable":
        return Batches([pad([Texts(7)[n]]) for n in own])
    return load(batch_sampler=BatchSampler(own, 2, drop_last=False))


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("kind", ["stream", "iterable", "map"])
def test_data_of_ranks_come_rank_after_rank(kind):
    made = trainer(use_distributed_sampler=False)
    assert indices_of(made.predict(Predicting(), own_loader(kind))) == list(range(7))


@pytest.mark.ranks(RANKS)
def test_a_distributed_sampler_of_the_user_stays():
    sampler = DistributedSampler(range(9), WORLD_SIZE, RANK, shuffle=False)
    found = trainer(use_distributed_sampler=True).predict(Predicting(), load(9, sampler=sampler))
    assert indices_of(found) == [0, 3, 6, 1, 4, 7, 2, 5, 8]


class Keeping(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.by_batch: list[Any] = []
        self.by_epoch: list[Any] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.by_batch.append((indices_of([prediction]), list(batch_indices)))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.by_epoch.append((indices_of(predictions), list(chain(*batch_indices[0]))))


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("kind", STRATEGIES)
def test_callbacks_of_lightning_get_the_indices(kind):
    callback = Keeping()
    made = trainer(callback, strategy=STRATEGIES[kind](), use_distributed_sampler=True)
    assert made.predict(Predicting(), load(), return_predictions=False) is None
    for pairs in (callback.by_batch, callback.by_epoch):
        assert all(predicted == indices for predicted, indices in pairs)
        assert sorted(chain(*chain(*gather([predicted for predicted, _ in pairs])))) == list(range(7))


class Opaque:
    pass


class Unsendable(Predicting):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return [Opaque()]


@pytest.mark.ranks(RANKS)
def test_what_cannot_be_merged_is_refused():
    made = partial(trainer, use_distributed_sampler=True)
    assert made().predict(Unsendable(), load(), return_predictions=False) is None
    with pytest.raises(TypeError, match=rf"^rank {RANK}: `predict_step` returns `Opaque` at `\[0\]`, which cannot"):
        made().predict(Unsendable(), load())
    with pytest.raises(UnsupportedFeatureError, match=r"^rank 1 draws other samples to predict than rank 0"):
        made().predict(Predicting(), load(batch_sampler=Batches([[RANK], [3]])))


# ---------------------------------------------------------------- PredictionWriter

SAMPLES = 15  # in batches of two


def load_all() -> DataLoader:
    return load(SAMPLES)


def write(
    folder: Path,
    kind: str = "ddp_join",
    make: Callable[[], Any] = load_all,
    merge: bool = True,
    shares_data: bool = True,
    **of_module: Any,
) -> list[int]:
    """Predict into a folder; return the samples that this rank has predicted."""
    module = Predicting(pads=kind == "ddp_join", **of_module)
    options: dict[str, Any] = {"strategy": STRATEGIES[kind](), "use_distributed_sampler": shares_data}
    trainer(PredictionWriter(folder, merge), **options).predict(module, make(), return_predictions=False)
    return module.seen


def interrupt(folder: Path, kind: str = "ddp_join", at: int = 1, **options: Any) -> None:
    with pytest.raises(ArithmeticError, match="interrupted"):
        write(folder, kind, stops_at=at, **options)


def merged(folder: Path) -> Any:
    """Return what is in the merged file, after a comparison with what `read_predictions` reads."""
    found = torch.load(folder / "predictions.pt", weights_only=False)
    read = [list(part) for part in zip(*read_predictions(folder), strict=True)]
    assert plain(read) == plain([found["indices"], found["predictions"]])
    return plain(found)


def written_after_an_interruption(kind: str, folder: str) -> Any:
    path = Path(folder, f"{kind}, interrupted")
    interrupt(path, kind, at=2)
    if RANK == 0:  # the last line of an index may be incomplete
        index = sorted(path.glob("parts/*.jsonl"))[-1]
        index.write_text(index.read_text()[:-9])
    seen = gather(write(path, kind))
    assert gather(write(path, kind)) == [[]] * WORLD_SIZE  # everything is there
    return sorted(chain(*seen)), merged(path)


def interrupted_for_others(folder: str) -> None:
    for kind in STRATEGIES:
        for ranks in (1, 2):
            interrupt(Path(folder, f"{kind} to {ranks}"), kind, at=2)


def continued_on_another_number_of_ranks(folder: str) -> Any:
    found = {}
    for kind in STRATEGIES:
        path = Path(folder, f"{kind} to {WORLD_SIZE}")
        seen = gather(write(path, kind))
        found[kind] = sorted(chain(*seen)), merged(path)
    return found


def other_folders_are_refused(folder: str) -> list[str]:
    path, found = Path(folder, "refused"), []
    interrupt(path, merge=False)
    attempts: list[Callable[[], Any]] = [
        partial(write, path, bias=0.5),
        partial(write, path, make=partial(load, SAMPLES, batch_size=3)),
        partial(write, path, shares_data=False),
        partial(write, path, "balanced_ddp", make=partial(load, SAMPLES, batch_size=3)),
        lambda: trainer(PredictionWriter(path), strategy="ddp").predict(Predicting(), load()),
        lambda: trainer(PredictionWriter(path), PredictionWriter(path / "b")).predict(Predicting(), load()),
    ]
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    write(path, "balanced_ddp", merge=False)  # another strategy may continue
    assert not (path / "predictions.pt").exists()
    return [*found, *indices_of([prediction for _, prediction in read_predictions(path)])]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    cases = {f"interrupted, {kind}": partial(written_after_an_interruption, kind) for kind in STRATEGIES}
    others = [other_folders_are_refused, interrupted_for_others]
    found = run_on_ranks(RANKS, {**cases, **{case.__name__: case for case in others}}, folder)
    values_of(found, interrupted_for_others)
    fewer = [run_on_ranks(ranks, [continued_on_another_number_of_ranks], folder) for ranks in (2, 1)]
    return found, *fewer


@pytest.fixture(scope="module")
def wanted():
    """What one process without the strategy predicts, with the indices."""
    indices = [list(range(start, min(start + 2, SAMPLES))) for start in range(0, SAMPLES, 2)]
    predicted = {}
    for kind in STRATEGIES:
        module = Predicting(pads=kind == "ddp_join")
        predicted[kind] = plain({"indices": indices, "predictions": trainer(**ALONE).predict(module, load(SAMPLES))})
    return predicted


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRATEGIES)
def test_an_interrupted_run_predicts_the_missing_batches_only(files, wanted, kind):
    for seen, values in values_of(files[0], f"interrupted, {kind}"):
        assert values == wanted[kind]
        assert seen == list(range(seen[0], SAMPLES))
        assert seen[0] >= (6 if kind == "ddp_join" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 1])
def test_another_number_of_ranks_continues(files, wanted, kind, ranks):
    for of_kind in values_of(files[3 - ranks], continued_on_another_number_of_ranks):
        seen, values = of_kind[kind]
        assert values == wanted[kind]
        assert seen == list(range(12 if kind == "ddp_join" else 4, SAMPLES))


@pytest.mark.slow
def test_folders_of_other_predictions_are_refused(files):
    for rank, found in enumerate(values_of(files[0], other_folders_are_refused)):
        model, batches, divided, shared, strategy, two, *indices = found
        assert "has predictions of another model. Write into an empty folder." in model
        for one in (batches, shared):
            assert one.startswith(f"UnsupportedFeatureError: rank {rank}: the loader makes batches other than")
        assert "has predictions of data that ranks have divided in another way" in divided
        assert "`PredictionWriter` does not know the order of batches under `DDPStrategy`" in strategy
        assert two.endswith("has two callbacks `PredictionWriter`. Use one.")
        assert indices == list(range(SAMPLES))
