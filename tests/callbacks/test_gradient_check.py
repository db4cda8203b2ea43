"""`GradientCheck` finds how much, and why, the gradient of the parts differs from the gradient of the whole batch."""

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDataParallelStrategy, BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext.callbacks import GradientCheck
from lightning_ddp_ext.consistency import name_training_state
from lightning_ddp_ext.resume.rng_state import capture_rng_state
from lightning_ddp_ext.verification.relations import GradientFit
from tests.support.processes import run_processes
from tests.support.training import CLASSES, FEATURES, quiet_trainer

LAUNCHED = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}  # as torchrun does
SURPRISE, EXACT, EXACT_IN_FLOAT32 = 0.02, 1e-14, 1e-6
SIZES = [11, 5]  # samples of the two parts
SHARES = pytest.approx([size / sum(SIZES) for size in SIZES], rel=1e-4)
CLASS_WEIGHTS = [0.2, 1.0, 3.0]
IGNORED = -100


def mean(logits, labels, **options):
    return functional.cross_entropy(logits, labels.clamp_min(0), **options)


def class_weights(logits, labels):
    return mean(logits, labels, weight=torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype, device=logits.device))


def ignore_index(logits, labels):
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED)


def square(logits, labels):
    return (logits - 1).square().mean()


def in_batch_negatives(logits, labels):
    return functional.cross_entropy(logits @ logits.T, torch.arange(len(logits), device=logits.device))


def over_nothing(logits, labels):
    return logits.mean() / (len(logits) != SIZES[1])


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
    """The finding about a loss under a `weight_by`; no remedy if parts and whole agree."""

    loss: Callable[..., Any]
    weight_by: Any = "samples"
    remedy: str | None = None
    fitting: Callable[[Any], float] | None = None
    precision: str = "64-true"
    normalised: bool = False

    def build(self):
        return Plain(self.loss, self.normalised)


def fits_class_weights(precision):
    return Case(
        class_weights, remedy="the loss is a mean over something other than samples", fitting=sum_class_weights,
        precision=precision,
    )  # fmt: skip


CASES = {
    "mean": Case(mean),
    "mean in float32": Case(mean, precision="32-true"),
    # As the models of HuggingFace compute it.
    "mean in float32, float64 parameters": Case(lambda logits, labels: mean(logits.float(), labels)),
    "mean in bfloat16": Case(mean, precision="bf16-mixed"),
    "mean, parts weighted equally": Case(
        mean, "equal", 'fits `weight_by="samples"`', lambda batch: len(batch[0]), precision="32-true"
    ),
    "class weights": fits_class_weights("64-true"),
    "class weights in bfloat16": fits_class_weights("bf16-mixed"),
    "class weights, counted": Case(class_weights, sum_class_weights),
    "ignored labels": Case(ignore_index, remedy="the loss is a mean over something other", fitting=count_labels),
    "sum": Case(lambda *both: mean(*both, reduction="sum"), remedy='fits `weight_by="sum"`'),
    "sum, added up": Case(lambda *both: mean(*both, reduction="sum"), "sum"),
    "root of a mean": Case(lambda *both: square(*both).sqrt(), remedy="which do not add up to 1"),
    "two means": Case(
        lambda *both: ignore_index(*both) + square(*both), remedy="terms that are means over different things"
    ),
    "mean over nothing": Case(over_nothing, remedy="A gradient is not finite"),
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
    ("class weights", BalancedDDPStrategy),
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
        dist.all_reduce(torch.ones(1, device=self.device))
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


def drawn(number, *shape):
    return torch.randn(number, *shape, FEATURES, generator=torch.Generator().manual_seed(number))


def rows(rank):
    return part(samples(double=False), rank).tensors


def times_first(sizes):
    """The loader draws the samples, which are in the second dimension of its batches."""
    join = partial(torch.stack, dim=1)
    return Loaded(lambda rank: DataLoader(drawn(sizes[rank], 6), sizes[rank], collate_fn=join), lambda batch: batch[-1])


def load_marked(rank):
    """The first number of a row is the number of its batch, plus 3 on rank 1."""
    marked = drawn(12 + rank)[:12]
    marked[:, 0] = torch.arange(3).repeat_interleave(4) + 3 * rank
    return DataLoader(marked, batch_size=4)


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
    """Rank 1 has fewer batches. A lambda reaches the module itself, also from a copy."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.penalty = lambda: self.last.weight.square().sum()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.penalty()

    def train_dataloader(self):
        number = [12, 4][self.trainer.global_rank]
        return DataLoader(TensorDataset(drawn(number), torch.arange(number) % CLASSES), batch_size=4)


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


def fit(module, callbacks, strategy, data=None, devices=2, **options):
    options = {"max_epochs": 1, "use_distributed_sampler": False, **options}
    trainer = quiet_trainer(strategy, devices, callbacks=callbacks, **options)
    trainer.fit(module, data)
    return trainer


def fit_chunks(module, callbacks, data=None, **options):
    data = loader(CASES["mean in float32"]) if data is None else data
    return fit(module, callbacks, BalancedDataParallelStrategy(split=SIZES), data, **options)


def check(module, strategy, data=None, batches=1, **options):
    callback, weights = GradientCheck(batches), []
    noting = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: weights.append(getattr(trainer.strategy, "batch_weight", None))
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, [callback, noting], strategy, data, **options)
    return {
        "records": callback.records,
        "reason": callback.reason,
        "steps": trainer.global_step,
        "weights": weights,
        "warnings": [str(one.message) for one in caught if "GradientCheck" in str(one.message)],
    }


# Changes the training that follows.
DRAWING = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: torch.rand(1, device=module.device))


def state_of(module, trainer):
    """Return everything that a check could change, each value copied."""
    state = name_training_state(module, trainer.optimizers, buffers=True)
    logged = {f"logged {name}": value for name, value in trainer.callback_metrics.items()}
    more = {
        "random": torch.tensor([*repr(capture_rng_state()).encode()]),
        "steps": torch.tensor([module.steps, trainer.global_step]),
    }
    return {name: torch.as_tensor(value).clone() for name, value in {**state, **logged, **more}.items()}


def check_on_rank():
    rank = int(os.environ["RANK"])
    found = {}
    for name, strategy in ON_RANKS:
        case = CASES[name]
        shares_batches = strategy is BalancedDDPStrategy
        options = {"split": SIZES} if shares_batches else {}
        built = strategy(weight_by=case.weight_by, **options)
        data = loader(case, None if shares_batches else rank)
        found[name, strategy.__name__] = check(case.build(), built, data, precision=case.precision)
    even = loader(CASES["mean in float32"], rank)
    for build in (Communicating, Locked, ByHand):
        found[build.__name__] = check(build(), DDPJoinStrategy(), even)
    for name, build in LOADED.items():
        found[name] = check(build(), DDPJoinStrategy(), batches=2 if name == "skipping" else 1)
    found["streams"] = check(Streams(), DDPJoinStrategy(), batches=3)
    for weight_by in ("samples", "equal"):
        strategy = DDPJoinStrategy(batch_dim=1, weight_by=weight_by)
        found["along `batch_dim`", weight_by] = check(times_first(SIZES), strategy)
    found["states"] = []
    for callbacks in ([], [GradientCheck(batches=2)], [DRAWING]):
        module = Streams(noisy, normalised=True)  # two epochs, into the uneven phase of each
        trainer = fit(module, callbacks, DDPJoinStrategy(), max_epochs=2, accumulate_grad_batches=2)
        found["states"].append(state_of(module, trainer))
    return found


def assert_found(name, record, found):
    """Compare the size of the difference, its remedy, the fitted weights and the warnings with those of a case."""
    case = CASES[name]
    assert record.batch == 0
    if case.remedy is None:
        is_exact = case.precision == "64-true" and "float32" not in name
        assert (record.remedy, found) == (None, []), name
        assert record.difference < (EXACT if is_exact else EXACT_IN_FLOAT32), name
        return
    assert case.remedy in record.remedy, name
    assert not record.difference <= SURPRISE
    (warning,) = found
    assert f"differs from the gradient of the whole batch by {record.difference:.1e}" in warning
    assert f"most in `{record.parameter}` ({record.parameter_difference:.1e})" in warning
    assert warning.endswith(record.remedy)
    if case.fitting is not None:
        counts = [case.fitting(part(samples(double=True), index).tensors) for index in range(2)]
        expected = [count / sum(counts) for count in counts]
        assert record.fitted_weights == pytest.approx(expected, rel=1e-5)
        assert record.weights != pytest.approx(expected, rel=1e-2)


def test_a_loss_that_does_not_fit_the_weights_of_chunks_is_noticed():
    for name, case in CASES.items():
        strategy = BalancedDataParallelStrategy(split=SIZES, weight_by=case.weight_by)
        found = check(case.build(), strategy, loader(case), precision=case.precision)
        (record,) = found["records"]
        assert_found(name, record, found["warnings"])


@pytest.fixture(scope="module")
def by_rank():
    return run_processes(check_on_rank, 2, timeout=240, env=LAUNCHED)


@pytest.mark.timeout(300)
def test_a_loss_that_does_not_fit_the_weights_of_ranks_is_noticed(by_rank):
    for name, strategy in ON_RANKS:
        first, second = (found[name, strategy.__name__] for found in by_rank)
        assert first["reason"] is None
        (record,) = first["records"]
        assert_found(name, record, first["warnings"])
        assert (second["records"], second["warnings"]) == ([record], [])


def test_an_impossible_check_on_ranks_is_explained_once_and_training_continues(by_rank):
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
        assert record.weights == SHARES
        assert record.remedy is None
        assert [record.batch for record in found["streams"]["records"]] == [0]  # later, one rank alone has data
        assert (found["streams"]["reason"], found["streams"]["steps"]) == (None, 3)
        (record,) = found["repeating"]["records"]  # the remedy is never the value that is already set
        assert record.fitted_weights == SHARES
        assert "a mean over something other than samples" in record.remedy
        (record,) = found["skipping"]["records"]  # the first batch in which the steps of both ranks return a loss
        assert (record.batch, record.remedy, record.weights) == (2, None, [0.5, 0.5])
        assert (found["skipping"]["weights"], found["skipping"]["reason"]) == ([[4, 0, 4], [0, 0, 4]][rank], None)


def test_samples_are_counted_and_joined_along_the_batch_dimension(by_rank):
    for found in by_rank:
        (fits,), (differs,) = (found["along `batch_dim`", weight_by]["records"] for weight_by in ("samples", "equal"))
        assert fits.weights == SHARES
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
    for callbacks in ([], [GradientCheck(batches=2)], [DRAWING]):
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


@pytest.mark.parametrize("weight_by", ["samples", "equal"])
def test_replicas_whose_step_returns_none_have_no_part(weight_by):
    """In the first batch the last replica returns None, in the second all do, in the third none does."""
    features, labels = torch.randn(36, 5, generator=torch.Generator().manual_seed(1)), torch.arange(36) % 3
    features[[7, 12, 14, 19], 0] = 9
    data = DataLoader(TensorDataset(features, labels), batch_size=12)
    strategy = BalancedDataParallelStrategy(split=[2, 5, 5], weight_by=weight_by)
    found = check(SkippingChunks(), strategy, data, batches=2, devices=3)
    assert found["reason"] is None
    first, third = found["records"]
    assert (first.batch, third.batch) == (0, 2)
    if weight_by == "samples":
        assert first.weights == pytest.approx([2 / 7, 5 / 7])
        assert max(first.difference, third.difference) < EXACT_IN_FLOAT32
    else:
        assert first.weights == [0.5, 0.5]
        assert first.fitted_weights == pytest.approx([2 / 7, 5 / 7], rel=1e-4)
        assert 'fits `weight_by="samples"`' in first.remedy


def test_an_impossible_check_in_one_process_is_explained_and_training_continues():
    data = loader(CASES["mean in float32"])
    for strategy, devices, module, reason in (
        (BalancedDataParallelStrategy(split=SIZES), 2, Locked, "cannot be copied: TypeError: cannot pickle"),
        ("auto", 1, Plain, "SingleDeviceStrategy is not one of"),
    ):
        found = check(module(), strategy, data, devices=devices)
        (warning,) = found["warnings"]
        assert warning.startswith("GradientCheck compared nothing: ")
        assert reason in found["reason"]
        assert reason in warning
        assert found["steps"] == 1


class Reading(Plain):
    """Reads the Trainer and its optimizer, takes features out of the batch, and calls a layer through a method."""

    def __init__(self):
        super().__init__()
        self.apply_last = self.last.forward

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
    assert (check.reason, [record.remedy for record in check.records]) == (None, [None, None])
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


class Recurrent(Plain):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(5, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def training_step(self, batch, batch_idx):
        hidden, _ = self.recurrent(batch[0].unsqueeze(1).expand(-1, 3, -1))
        return self.last(self.attention(hidden, hidden, hidden)[0]).square().mean()


class Recomputing(Plain):
    """Recomputes dropout in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.block = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Tanh(), nn.AlphaDropout(0.5))

    def training_step(self, batch, batch_idx):
        features = batch[0].requires_grad_()
        hidden = checkpoint(self.block, features, use_reentrant=self.use_reentrant)
        return self.last(hidden).square().mean()


@pytest.mark.parametrize("module", [Recurrent(), Recomputing(True), Recomputing(False)])
def test_dropout_is_off_in_kernels_and_in_the_recomputation_of_activations(module):
    data = loader(CASES["mean in float32"])
    (record,) = check(module, BalancedDataParallelStrategy(split=SIZES), data)["records"]
    assert record.remedy is None
    assert record.difference < EXACT_IN_FLOAT32


def test_weights_are_fitted_only_if_they_are_unique():
    def fit(*vectors):
        *parts, whole = ([("weight", vector)] for vector in vectors)
        return GradientFit(whole, parts).fitted

    one, other = torch.randn(2, 9, dtype=torch.float64)
    assert fit(one, other, 2 * one - other) == pytest.approx([2, -1])
    assert fit(one, one, other) is None
    assert fit(one[:2], other[:2], one[:2]) is None  # they fit any gradient
