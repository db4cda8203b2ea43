"""`GradientCheck` finds how much, and why, the gradient of the parts differs from the gradient of the whole batch."""

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDataParallelStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext.callbacks import GradientCheck, gradient_check
from lightning_ddp_ext.callbacks.gradient_check import GradientComparison
from lightning_ddp_ext.consistency.replica_differences import name_training_state
from lightning_ddp_ext.resume.rng_state import capture_rng_state
from tests.parity import CLASSES, FEATURES, quiet_trainer
from tests.support.processes import run_processes

LAUNCHED = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}  # as torchrun does
SURPRISE, EXACT, EXACT_IN_FLOAT32 = 0.02, 1e-14, 1e-6
SIZES = [11, 5]  # samples of the two parts
CLASS_WEIGHTS = [0.2, 1.0, 3.0]
IGNORED = -100


def mean(logits, labels):
    return functional.cross_entropy(logits, labels.clamp_min(0))


def class_weights(logits, labels):
    return functional.cross_entropy(
        logits, labels.clamp_min(0), torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype, device=logits.device)
    )


def single(logits, labels):
    """Compute the loss in float32, whatever the parameters are, as the models of HuggingFace do."""
    return mean(logits.float(), labels)


def ignore_index(logits, labels):
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED)


def total(logits, labels):
    return functional.cross_entropy(logits, labels.clamp_min(0), reduction="sum")


def square(logits, labels):
    return (logits - 1).square().mean()


def root_mean(logits, labels):
    return square(logits, labels).sqrt()


def two_means(logits, labels):
    return ignore_index(logits, labels) + square(logits, labels)


def in_batch_negatives(logits, labels):
    return functional.cross_entropy(logits @ logits.T, torch.arange(len(logits), device=logits.device))


def noisy(logits, labels):
    return (logits + torch.randn_like(logits)).square().mean()


class Plain(LightningModule):
    """Two layers with dropout, which the check switches off, or batch normalisation."""

    def __init__(self, loss=mean, normalised=False):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(FEATURES, 8)
        self.between = nn.BatchNorm1d(8) if normalised else nn.Dropout(0.5)
        self.last = nn.Linear(8, CLASSES)
        self.loss = loss
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        hidden = functional.dropout(self.between(self.first(batch[0]).tanh()), 0.1, training=self.training)
        loss = self.loss(self.last(hidden), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def count_labels(batch):
    return float((batch[1] != IGNORED).sum())


def sum_class_weights(batch):
    return float(torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)[batch[1].clamp_min(0).cpu()].sum())


@dataclass(frozen=True)
class Case:
    """What `GradientCheck` finds of a loss under a `weight_by`; no remedy if parts and whole agree."""

    loss: Callable[..., Any]
    weight_by: Any = "samples"
    remedy: str | None = None
    fitting: Callable[[Any], float] | None = None
    precision: str = "64-true"
    normalised: bool = False

    def build(self):
        return Plain(self.loss, self.normalised)


MEAN_OVER = "the loss is a mean over something other than samples"
CASES = {
    "mean": Case(mean),
    "mean in float32": Case(mean, precision="32-true"),
    "mean in float32, float64 parameters": Case(single),
    "mean in bfloat16": Case(mean, precision="bf16-mixed"),
    "mean, parts weighted equally": Case(
        mean, "equal", 'fits `weight_by="samples"`', lambda batch: len(batch[0]), precision="32-true"
    ),
    "class weights": Case(class_weights, remedy=MEAN_OVER, fitting=sum_class_weights),
    "class weights in bfloat16": Case(
        class_weights, remedy=MEAN_OVER, fitting=sum_class_weights, precision="bf16-mixed"
    ),
    "class weights, counted": Case(class_weights, sum_class_weights),
    "ignored labels": Case(ignore_index, remedy=MEAN_OVER, fitting=count_labels),
    "sum": Case(total, remedy='fits `weight_by="sum"`'),
    "sum, added up": Case(total, "sum"),
    "root of a mean": Case(root_mean, remedy="which do not add up to 1"),
    "two means": Case(two_means, remedy="terms that are means over different things"),
    "batch normalisation": Case(mean, remedy="Batch normalisation computes", normalised=True),
    "in-batch negatives": Case(in_batch_negatives, remedy="the forward pass mixes samples"),
    "random numbers": Case(noisy, remedy="The step draws random numbers"),
}
# Ranks and chunks share the judgement, so that a few cases are enough on ranks.
ON_RANKS = [
    *((name, DDPJoinStrategy) for name in (
        "mean", "mean in float32", "class weights in bfloat16", "class weights, counted", "sum, added up",
        "random numbers",
    )),
    ("class weights", DDPCheckpointStrategy),
]  # fmt: skip


def samples(double):
    """Labels of both parts have other shares of ignored ones, and of each class."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(sum(SIZES), FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (sum(SIZES),), generator=generator)
    labels[4:8] = IGNORED
    return TensorDataset(features if double else features.float(), labels)


def part(data, index):
    start = sum(SIZES[:index])
    return TensorDataset(*(tensor[start : start + SIZES[index]] for tensor in data.tensors))


def loader(case, rank=None):
    data = samples(case.precision == "64-true")
    data = data if rank is None else part(data, rank)
    return DataLoader(data, batch_size=len(data))


class Communicating(Plain):
    def training_step(self, batch, batch_idx):
        dist.all_reduce(torch.ones(1))
        return super().training_step(batch, batch_idx)


class Loaded(Plain):
    """Trains on the features of the batches of a loader that differs between ranks; None skips a batch."""

    def __init__(self, load, features=lambda batch: batch[0]):
        super().__init__()
        self.load, self.features = load, features

    def train_dataloader(self):
        return self.load(self.trainer.global_rank)

    def training_step(self, batch, batch_idx):
        features = self.features(batch)
        return None if features is None else self.last(self.first(features).tanh()).square().mean()


class Repeating(Loaded):
    """A hook repeats the samples, once more on rank 1: samples weigh by another number than that of the loader."""

    def on_train_batch_start(self, batch, batch_idx):
        batch["rows"] = batch["rows"].repeat(1 + self.trainer.global_rank, 1)


def rows(rank):
    return part(samples(double=False), rank).tensors


def times_first(sizes):
    """The loader draws the samples, which are in the second dimension of its batches."""

    def load(rank):
        drawn = torch.randn(sizes[rank], 6, FEATURES, generator=torch.Generator().manual_seed(rank))
        return DataLoader(drawn, len(drawn), collate_fn=lambda rows: torch.stack(rows, 1))

    return Loaded(load, lambda batch: batch[-1])  # of the last time


def load_marked(rank):
    """The first number of a row is the number of its batch, plus 3 on rank 1."""
    drawn = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(rank))
    drawn[:, 0] = torch.arange(3).repeat_interleave(4) + 3 * rank
    return DataLoader(drawn, batch_size=4)


LOADED = {
    # Rank 1 has longer texts.
    "texts": lambda: Loaded(
        lambda rank: DataLoader([{"tokens": torch.ones(3 + rank, FEATURES)}] * 4, batch_size=2),
        lambda batch: batch["tokens"].mean(1),
    ),
    "times first": lambda: times_first([4, 4]),
    # Each entry of the dataset is a batch, which `collate_fn` converts.
    "made by the dataset": lambda: Loaded(
        lambda rank: DataLoader([rows(rank)], batch_size=1, collate_fn=lambda batches: [*batches[0]])
    ),
    "repeating": lambda: Repeating(
        lambda rank: DataLoader([{"rows": rows(rank)[0]}], batch_size=None), lambda batch: batch["rows"]
    ),
    # Returns None in the first batch of rank 1, and in the second one of all ranks.
    "skipping": lambda: Loaded(load_marked, lambda batch: None if int(batch[0, 0]) in (1, 3, 4) else batch),
}


class Streams(Plain):
    """Rank 1 has fewer batches."""

    def train_dataloader(self):
        number = [12, 4][self.trainer.global_rank]
        generator = torch.Generator().manual_seed(number)
        features = torch.randn(number, FEATURES, generator=generator)
        return DataLoader(TensorDataset(features, torch.randint(CLASSES, (number,), generator=generator)), batch_size=4)


class Locked(Plain):
    """Cannot be copied on the last rank."""

    def setup(self, stage):
        if self.global_rank == self.trainer.world_size - 1:
            self.lock = threading.Lock()


class ByHand(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))


class Weights(Callback):
    """The weight of each batch in the gradient."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *arguments):
        self.seen.append(trainer.strategy.batch_weight)


def fit(module, callbacks, strategy, data=None, **options):
    devices = 2 if isinstance(strategy, BalancedDataParallelStrategy) else int(os.environ.get("WORLD_SIZE", "1"))
    options = {"max_epochs": 1, "use_distributed_sampler": False, **options}
    trainer = quiet_trainer(strategy, devices, callbacks=callbacks, **options)
    trainer.fit(module, data)
    return trainer


def fit_chunks(module, callbacks, data=None, weight_by="samples", **options):
    strategy = BalancedDataParallelStrategy(split=SIZES, weight_by=weight_by)
    return fit(module, callbacks, strategy, loader(CASES["mean in float32"]) if data is None else data, **options)


def check(module, strategy, data=None, batches=1, **options):
    callback, weights = GradientCheck(batches), Weights()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, [callback, weights], strategy, data, **options)
    return {
        "records": callback.records,
        "reason": callback.reason,
        "steps": trainer.global_step,
        "weights": weights.seen,
        "warnings": [str(one.message) for one in caught if "GradientCheck" in str(one.message)],
    }


class DrawsNumbers(Callback):
    """Changes the training that follows."""

    def on_train_batch_end(self, *arguments):
        torch.rand(1, device=arguments[1].device)


def state_of(module, trainer):
    """Return everything that a check could change, each value copied."""
    state = name_training_state(module, trainer.optimizers, buffers=True)
    logged = {f"logged {name}": value for name, value in trainer.callback_metrics.items()}
    more = {
        "random": torch.tensor([*repr(capture_rng_state()).encode()]),
        "steps": torch.tensor([module.steps, trainer.global_step]),
    }
    return {name: torch.as_tensor(value).clone() for name, value in {**state, **logged, **more}.items()}


def on_gloo(**options):
    return DDPJoinStrategy(process_group_backend="gloo", **options)


def check_on_rank():
    """Run everything that needs two ranks."""
    rank = int(os.environ["RANK"])
    found = {}
    for name, strategy in ON_RANKS:
        case = CASES[name]
        built = strategy(process_group_backend="gloo", weight_by=case.weight_by)
        found[name, strategy.__name__] = check(case.build(), built, loader(case, rank), precision=case.precision)
    even = loader(CASES["mean in float32"], rank)
    for build in (Communicating, Locked, ByHand):
        found[build.__name__] = check(build(), on_gloo(), even)
    for name, build in LOADED.items():
        found[name] = check(build(), on_gloo(), batches=2 if name == "skipping" else 1)
    found["streams"] = check(Streams(), on_gloo(), batches=3)
    for weight_by in ("samples", "equal"):
        strategy = on_gloo(batch_dim=1, weight_by=weight_by)
        found["along `batch_dim`", weight_by] = check(times_first(SIZES), strategy)
    found["states"] = []
    for callbacks in ([], [GradientCheck(batches=2)], [DrawsNumbers()]):
        module = Streams(noisy, normalised=True)  # two epochs, into the uneven phase of each
        trainer = fit(module, callbacks, on_gloo(), max_epochs=2)
        found["states"].append(state_of(module, trainer))
    return found


def assert_found(case, record):
    """The size of the difference, its remedy, and the weights that would fit."""
    assert record.batch == 0
    if case.remedy is None:
        assert record.remedy is None
        is_exact = case.precision == "64-true" and case.loss is not single
        assert record.difference < (EXACT if is_exact else EXACT_IN_FLOAT32)
        return
    assert case.remedy in record.remedy
    assert record.difference > SURPRISE
    assert 0 < record.parameter_difference < 10
    if case.fitting is not None:
        counts = [case.fitting(part(samples(double=True), index).tensors) for index in range(2)]
        expected = [count / sum(counts) for count in counts]
        assert record.fitted_weights == pytest.approx(expected, rel=1e-5)
        assert record.weights != pytest.approx(expected, rel=1e-2)


def test_a_loss_that_does_not_fit_the_weights_of_chunks_is_noticed():
    for name, case in CASES.items():
        check = GradientCheck()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit_chunks(case.build(), [check], loader(case), case.weight_by, precision=case.precision)
        (record,) = check.records
        assert_found(case, record)
        found = [str(one.message) for one in caught if "GradientCheck" in str(one.message)]
        assert len(found) == (case.remedy is not None), name
        if found:
            assert f"differs from the gradient of the whole batch by {record.difference:.1e}" in found[0]
            assert f"most in `{record.parameter}` ({record.parameter_difference:.1e})" in found[0]
            assert found[0].endswith(record.remedy)


@pytest.fixture(scope="module")
def by_rank():
    return run_processes(check_on_rank, 2, timeout=240, env=LAUNCHED)


@pytest.mark.timeout(300)
def test_a_loss_that_does_not_fit_the_weights_of_ranks_is_noticed(by_rank):
    for name, strategy in ON_RANKS:
        first, second = (found[name, strategy.__name__] for found in by_rank)
        assert first["reason"] is None
        (record,) = first["records"]
        assert_found(CASES[name], record)
        assert second["records"] == [record]
        assert (len(first["warnings"]), second["warnings"]) == (record.remedy is not None, [])


def test_what_cannot_be_checked_on_ranks_is_said_once_while_training_goes_on(by_rank):
    for name, reason in {
        "Communicating": "`training_step` communicates between ranks",
        "Locked": "cannot be copied: TypeError: cannot pickle '_thread.lock' object (rank 1)",
        "ByHand": "under manual optimization",
        "times first": "drew 4 samples for a batch whose size along `batch_dim=0` is 6, so that",
        "texts": "`batch['tokens']` cannot be joined, it is shape (2, 3, 5) and shape (2, 4, 5)",
    }.items():
        first, second = (found[name] for found in by_rank)
        for found in (first, second):
            assert reason in found["reason"]
            assert found["records"] == []
            assert found["steps"] > 0 or name == "ByHand"
        (warning,) = first["warnings"]
        assert reason in warning
        assert second["warnings"] == []


def test_batches_of_ranks_are_joined_and_weighted(by_rank):
    for rank, found in enumerate(by_rank):
        (record,) = found["made by the dataset"]["records"]  # samples are counted by the tensors
        assert record.weights == pytest.approx([size / sum(SIZES) for size in SIZES])
        assert record.remedy is None
        assert [record.batch for record in found["streams"]["records"]] == [0]  # later, one rank alone has data
        assert (found["streams"]["reason"], found["streams"]["steps"]) == (None, 3)
        (record,) = found["repeating"]["records"]  # the remedy is never the value that is already set
        assert record.fitted_weights == pytest.approx([size / sum(SIZES) for size in SIZES], rel=1e-4)
        assert "a mean over something other than samples" in record.remedy
        (record,) = found["skipping"]["records"]  # the first batch in which the steps of both ranks return a loss
        assert (record.batch, record.remedy, record.weights) == (2, None, [0.5, 0.5])
        assert (found["skipping"]["weights"], found["skipping"]["reason"]) == ([[4, 0, 4], [0, 0, 4]][rank], None)


def test_samples_are_counted_and_joined_along_the_batch_dimension(by_rank):
    for found in by_rank:
        (fits,), (differs,) = (found["along `batch_dim`", weight_by]["records"] for weight_by in ("samples", "equal"))
        assert fits.weights == pytest.approx([size / sum(SIZES) for size in SIZES])
        assert fits.difference < EXACT_IN_FLOAT32
        assert differs.difference > SURPRISE
        assert 'fits `weight_by="samples"`' in differs.remedy


def same_bits(one, other):
    assert one.keys() == other.keys()
    assert len(one) > 10
    return {name for name, value in one.items() if torch.equal(value, other[name])}


def test_a_check_changes_no_bit_of_a_training_on_ranks(by_rank):
    for found in by_rank:
        without, checked, disturbed = found["states"]
        assert same_bits(without, checked) == set(without)
        assert "parameter `first.weight`" not in same_bits(without, disturbed)


@pytest.mark.filterwarnings("ignore")
def test_a_check_changes_no_bit_of_a_training_on_chunks(tmp_path):
    states, rows = [], []
    for callbacks in ([], [GradientCheck(batches=2)], [DrawsNumbers()]):
        module, logger = Plain(noisy, normalised=True), CSVLogger(tmp_path, name=None, version=str(len(rows)))
        trainer = fit_chunks(module, callbacks, max_epochs=3, logger=logger, log_every_n_steps=1)
        states.append(state_of(module, trainer))
        rows.append((tmp_path / str(len(rows)) / "metrics.csv").read_text())
    without, checked, disturbed = states
    assert same_bits(without, checked) == set(without)
    assert rows[0] == rows[1]
    assert rows[0].count("\n") == 4
    assert "parameter `first.weight`" not in same_bits(without, disturbed)


class SkippingChunks(Plain):
    """Returns None for chunks that begin with a marked sample."""

    def training_step(self, batch, batch_idx):
        return None if batch[0][0, 0] == 9 else mean(self.last(self.first(batch[0]).tanh()), batch[1])


@pytest.mark.filterwarnings("ignore:.*returned .?None", "ignore:.*draws random", "ignore:GradientCheck. in batch")
@pytest.mark.parametrize("weight_by", ["samples", "equal"])
def test_replicas_whose_step_returns_none_are_left_out(weight_by):
    """In the first batch the last replica, in the second all, in the third none."""
    features, labels = torch.randn(36, 5, generator=torch.Generator().manual_seed(1)), torch.arange(36) % 3
    features[[7, 12, 14, 19], 0] = 9
    check = GradientCheck(batches=2)
    strategy = BalancedDataParallelStrategy(split=[2, 5, 5], weight_by=weight_by)
    trainer = quiet_trainer(strategy, 3, max_epochs=1, callbacks=[check])
    trainer.fit(SkippingChunks(), DataLoader(TensorDataset(features, labels), batch_size=12))
    assert check.reason is None
    first, third = check.records
    assert (first.batch, third.batch) == (0, 2)
    if weight_by == "samples":
        assert first.weights == pytest.approx([2 / 7, 5 / 7])
        assert max(first.difference, third.difference) < EXACT_IN_FLOAT32
    else:
        assert first.weights == [0.5, 0.5]
        assert first.fitted_weights == pytest.approx([2 / 7, 5 / 7], rel=1e-4)
        assert 'fits `weight_by="samples"`' in first.remedy


@pytest.mark.filterwarnings("ignore:.*draws random numbers")
@pytest.mark.parametrize(
    ("strategy", "module", "reason"),
    [
        (BalancedDataParallelStrategy(split=SIZES), Locked, "cannot be copied: TypeError: cannot pickle"),
        ("auto", Plain, "SingleDeviceStrategy is not one of"),
    ],
)
def test_what_cannot_be_checked_in_one_process_is_said_while_training_goes_on(strategy, module, reason):
    check = GradientCheck()
    trainer = quiet_trainer(strategy, 1 if strategy == "auto" else 2, max_epochs=1, callbacks=[check])
    with pytest.warns(UserWarning, match=f"GradientCheck compared nothing: .*{reason}"):
        trainer.fit(module(), loader(CASES["mean in float32"]))
    assert reason in check.reason
    assert trainer.global_step == 1


class Reading(Plain):
    """Reads the Trainer and its optimizer, takes features out of the batch, and calls a layer through a lambda."""

    def __init__(self):
        super().__init__()
        self.apply_last = lambda hidden: self.last(hidden)

    def on_train_batch_start(self, batch, batch_idx):
        self.scale = 2.0

    def training_step(self, batch, batch_idx):
        rate = self.optimizers().param_groups[0]["lr"] * self.trainer.max_epochs
        return self.apply_last(self.first(batch.pop("features"))).square().mean() * rate * self.scale


def test_steps_may_read_the_trainer_and_empty_the_batch():
    trained = []
    check = GradientCheck(batches=2)
    for callbacks in ([], [check]):
        module, features = Reading(), torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
        data = DataLoader(features, batch_size=16, collate_fn=lambda rows: {"features": torch.stack(rows)})
        fit_chunks(module, callbacks, data, accumulate_grad_batches=2)
        trained.append(module.state_dict())
    assert check.reason is None
    assert [record.remedy for record in check.records] == [None, None]
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


def test_a_lstm_and_attention_are_compared_without_dropout():
    class Recurrent(Plain):
        def __init__(self):
            super().__init__()
            self.recurrent = nn.LSTM(5, 8, num_layers=2, dropout=0.5, batch_first=True)
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

        def training_step(self, batch, batch_idx):
            hidden, _ = self.recurrent(batch[0].unsqueeze(1).expand(-1, 3, -1))
            return self.last(self.attention(hidden, hidden, hidden)[0]).square().mean()

    check = GradientCheck()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_chunks(Recurrent(), [check])
    assert check.records[0].remedy is None
    assert check.records[0].difference < EXACT_IN_FLOAT32


def gradients(seed, weight=30):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in (weight, 1, 0)]


def compared(parts, whole):
    comparison = GradientComparison(len(parts))
    for name, *of_parts, of_whole in zip(("weight", "bias", "empty"), *parts, whole, strict=True):
        comparison.add(name, of_parts, of_whole)
    return comparison


def weighted(parts, weights):
    return [sum(w * one for w, one in zip(weights, of_parts, strict=True)) for of_parts in zip(*parts, strict=True)]


def test_differences_are_differences_of_the_vectors_in_blocks_of_any_size(monkeypatch):
    parts, whole, weights = [gradients(seed) for seed in range(3)], gradients(7), [0.2, 0.3, 0.5]
    errors = [one - other for one, other in zip(weighted(parts, weights), whole, strict=True)]
    expected = torch.cat(errors).norm() / torch.cat(whole).norm()
    of_weight = float(errors[0].norm() / whole[0].norm())
    for rows in (1, 7, 1000):
        monkeypatch.setattr(gradient_check, "_ROWS", rows)
        comparison = compared(parts, whole)
        assert comparison.difference(weights) == pytest.approx(float(expected), rel=1e-12)
        assert comparison.most_different(weights) == ("weight", pytest.approx(of_weight, rel=1e-12))


def test_weights_are_fitted_only_if_they_are_unique():
    parts, weights = [gradients(seed) for seed in range(3)], [0.1, 2.0, 0.0]
    assert compared(parts, weighted(parts, weights)).fit() == pytest.approx(weights, abs=1e-12)
    twice = [parts[0], parts[0], parts[1]]
    assert compared(twice, weighted(twice, [1, 1, 1])).fit() is None
    assert compared([gradients(seed, weight=1) for seed in range(3)], gradients(7, weight=1)).fit() is None
    nothing = weighted(parts, [0, 0, 0])
    assert compared([nothing, nothing], nothing).difference([0.5, 0.5]) == 0
    assert compared([nothing, parts[0]], nothing).difference([0.5, 0.5]) == float("inf")
    parts[0][0][4] = torch.nan
    comparison = compared(parts, gradients(7))
    assert comparison.fit() is None
    assert not comparison.difference([1, 1, 1]) <= 1
