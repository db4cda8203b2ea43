"""Loaders, samplers and evaluation under `ddp_join` on three ranks with different amounts of data."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import AUROC, CatMetric, ConfusionMatrix
from torchmetrics.retrieval import RetrievalMAP

from lightning_ddp_ext import DDPJoinStrategy, TokenBudgetBatchSampler
from lightning_ddp_ext.distributed.exchange import destroy_group
from lightning_ddp_ext.loaders import lockstep_source
from tests.strategies.toolkit import (
    ALONE,
    COUNTS,
    FEATURES,
    RANK,
    WORLD_SIZE,
    Classifier,
    assert_identical,
    fit,
    gather,
    loader,
    samples,
    trainer,
)

# ---------------------------------------------------------------- loaders and samplers

SAMPLES, FIRST = 17, 4
DATA = TensorDataset(*samples(SAMPLES))


class OwnBatchSampler(BatchSampler):
    pass


def first_samples() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * FIRST + [0.0] * (SAMPLES - FIRST), SAMPLES)


BATCH_SAMPLERS: dict[str, Callable[[], BatchSampler]] = {
    "that drops": lambda: BatchSampler(RandomSampler(DATA), 3, drop_last=True),
    "subclass": lambda: OwnBatchSampler(RandomSampler(DATA), 3, drop_last=False),
    "weighted": lambda: BatchSampler(first_samples(), 3, drop_last=False),
    "with a DistributedSampler": lambda: BatchSampler(
        DistributedSampler(DATA, WORLD_SIZE, RANK, shuffle=False), 3, drop_last=False
    ),
}


class Seeing(Classifier):
    """Keeps the indices of each batch; its hook makes a loader with a batch sampler."""

    def __init__(self, make: Callable[[], BatchSampler] | None = None) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[2].tolist())
        return self.loss(batch)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(DATA, batch_sampler=self.make())


@pytest.mark.ranks(3)
def test_batch_samplers_keep_the_size_of_batches_and_their_samplers() -> None:
    for strategy, in_hook in (("ddp_join", False), ("ddp_join", True), ("ddp_checkpoint", True)):
        for name, make in BATCH_SAMPLERS.items():
            module = Seeing(make)
            loaders = [] if in_hook else [DataLoader(DATA, batch_sampler=make())]
            trainer(strategy=strategy, max_epochs=2, use_distributed_sampler=True).fit(module, *loaders)
            seen = set(chain(*chain(*gather(module.seen))))
            pads = strategy == "ddp_checkpoint" or "DistributedSampler" in name
            sizes = [3, 3] if pads or RANK < 2 else [3, 2]
            sizes = [3] if "drops" in name and sizes[-1] < 3 else sizes
            assert [len(batch) for batch in module.seen] == sizes * 2, (strategy, in_hook, name)
            if "weighted" in name:
                assert seen <= set(range(FIRST)), (strategy, in_hook, name)
            elif "drops" not in name:
                assert seen == set(range(SAMPLES)), (strategy, in_hook, name)


class ByEpoch(Sampler[int]):
    """Begins with another sample in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter((index + self.epoch) % SAMPLES for index in range(SAMPLES))


@pytest.mark.ranks(3)
def test_samplers_are_divided_among_ranks_once_in_every_epoch() -> None:
    generator = torch.Generator().manual_seed(RANK)  # different on every rank
    drawing = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False, generator=generator)
    tokens = TokenBudgetBatchSampler([1 + index % 4 for index in range(SAMPLES)], max_tokens=6)
    for sampler in (ByEpoch(), drawing, tokens):
        module = Seeing()
        data = DataLoader(DATA, batch_sampler=tokens) if sampler is tokens else DataLoader(DATA, 3, sampler=sampler)
        trainer(max_epochs=2, use_distributed_sampler=True).fit(module, data)
        half = len(module.seen) // 2
        assert gather(module.seen[:half]) != gather(module.seen[half:])
        for epoch, batches in enumerate((module.seen[:half], module.seen[half:])):
            by_rank = gather(list(chain(*batches)))
            assert sorted(chain(*by_rank)) == list(range(SAMPLES))
            if isinstance(sampler, ByEpoch):
                assert [indices[0] for indices in by_rank] == [epoch, epoch + 1, epoch + 2]


@pytest.mark.ranks(3)
def test_hooks_may_change_batches_in_place() -> None:
    class Changing(Classifier):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            batch["features"] = batch.pop("raw")
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss((batch.pop("features"), batch["labels"]))

    features, labels, _ = samples(COUNTS[RANK])
    batches = [{"raw": features[i : i + 2], "labels": labels[i : i + 2]} for i in range(0, COUNTS[RANK], 2)]
    assert_identical(fit(Changing(), DataLoader(batches, batch_size=None))[1].digests)


@pytest.mark.ranks(3)
def test_several_loaders_end_on_each_rank_as_in_one_process() -> None:
    """Loaders have 4, 1, 2 and 1, 3, 2 batches on the ranks."""

    class Several(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(batch_idx)
            return sum(self.loss(part) for part in batch.values() if part is not None)

    for mode, steps in {"min_size": (1, 1, 2), "max_size": (4, 3, 2), "max_size_cycle": (4, 3, 2)}.items():
        module = Several()
        combined = CombinedLoader({"a": loader(8, 2, 4), "b": loader(2, 6, 4, stream=mode == "max_size")}, mode)
        _, trace = fit(module, combined, strategy=DDPJoinStrategy(weight_by="equal"))
        assert_identical(trace.digests)
        assert len(module.seen) == steps[RANK], mode
        assert trace.is_shadow == [step >= steps[RANK] for step in range(max(steps))], mode


@pytest.mark.ranks(3)
def test_stopping_drops_batches_of_longer_loaders_and_says_so_once() -> None:
    dropping = DataLoader(loader(8, 5, 2).dataset, batch_size=2, drop_last=True)
    cases = {
        "drops 3 batches of rank 0, 2 batches of rank 1, 9 samples in every epoch.": (loader(8, 5, 2), None),
        "drops 1 batch of rank 0, 1 batch of rank 1, 4 samples in every epoch.": (loader(8, 5, 2), 2),
        "drops 3 batches of rank 0, 1 batch of rank 1, 8 samples in every epoch.": (dropping, None),
        "drops at least 1 batch of rank 0, 1 batch of rank 1.": (loader(8, 5, 3, stream=True), 4),
        "drops 1 batch of rank 0, 1 batch of rank 1, 3 samples in every epoch.": (loader(4, 3, 2), None),
    }
    for message, (given, limit) in cases.items():
        module = Classifier()
        with mock.patch.object(lockstep_source, "rank_zero_info") as said:
            _, trace = fit(module, given, strategy=DDPJoinStrategy(uneven_inputs="stop"), limit_train_batches=limit)
        assert [call.args[0] for call in said.call_args_list] == [f'`uneven_inputs="stop"` {message}']
        assert_identical(trace.digests)
        assert not any(trace.is_shadow)
        assert not message.startswith("drops 3 batches") or len(module.seen) == 2
    assert torch.is_grad_enabled()


# ---------------------------------------------------------------- evaluation


class Measuring(Callback):
    """Owns a metric that is not part of the module, and keeps a list."""

    def __init__(self) -> None:
        self.scores = CatMetric()

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.scores.update(outputs)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("callback's number", float(len(self.scores.compute())))


class Evaluated(LightningModule):
    """Logs values and metrics of every kind; some metrics keep lists."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(FEATURES, 3, bias=False)
        self.auroc = AUROC("multiclass", num_classes=3)
        self.confusion = ConfusionMatrix("multiclass", num_classes=3)
        self.retrieval = RetrievalMAP(empty_target_action="skip")
        self.indices = CatMetric()
        self.collected: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels, indices = batch
        scores = self.network(features)
        losses = nn.functional.cross_entropy(scores, labels, reduction="none")
        self.auroc.update(scores.softmax(1), labels)
        self.confusion.update(scores, labels)
        self.retrieval.update(scores[:, 1], labels == 1, indexes=indices % 2)
        self.indices.update(indices)
        self.log("loss", losses.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("largest", losses.max(), sync_dist=True, reduce_fx="max")
        self.log("number", float(len(losses)), sync_dist=True, reduce_fx="sum")
        self.collected.extend(indices.tolist())
        return scores

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook", float(len(outputs)), sync_dist=True, reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        self.log("auroc", self.auroc.compute())
        self.log("retrieval", torch.nan_to_num(self.retrieval.compute()))
        self.log("seen", float(len(set(self.indices.compute().reshape(-1).tolist()))))
        self.log_dict({f"confusion {i}": float(n) for i, n in enumerate(self.confusion.compute().flatten())})


EVALUATED = [*[(number, 2) for number in (1, 2, 3, 5, 8, 10)], *[(number, 1) for number in (1, 2, 4, 7)]]


def evaluate(number: int, batch_size: int, **options: Any) -> tuple[dict[str, float], list[int]]:
    """Validate with this number of samples in all."""
    torch.manual_seed(0)
    module = Evaluated()
    data = DataLoader(TensorDataset(*samples(number)), batch_size=batch_size)
    made = trainer(Measuring(), use_distributed_sampler=True, **options)
    return made.validate(module, data, verbose=False)[0], module.collected


@pytest.mark.ranks(3)
def test_evaluation_weights_every_sample_once() -> None:
    on_ranks = [evaluate(*case) for case in EVALUATED]
    destroy_group()  # metrics of one process would use it
    for (number, batch_size), (values, collected) in zip(EVALUATED, on_ranks, strict=True):
        expected, _ = evaluate(number, batch_size, **ALONE)
        for name, value in expected.items():
            tolerance = 1e-6 if name == "retrieval" else 1e-9  # it keeps float32
            assert values[name] == pytest.approx(value, rel=tolerance), (name, number, batch_size)
        assert values.keys() == expected.keys()
        assert collected == list(range(number))[RANK::WORLD_SIZE]
        assert expected["number"] == expected["hook"] == expected["seen"] == expected["callback's number"] == number
