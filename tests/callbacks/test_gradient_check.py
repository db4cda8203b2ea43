"""`GradientCheck` finds how much, and why, the gradient of the parts differs from the gradient of the whole batch."""

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
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


class Plain(LightningModule):
    """A mean over samples, with dropout, which the check switches off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(FEATURES, 8)
        self.between: nn.Module = nn.Dropout(0.5)
        self.last = nn.Linear(8, CLASSES)
        self.steps = 0

    def logits(self, batch: Any) -> Tensor:
        hidden = functional.dropout(self.between(self.first(batch[0]).tanh()), 0.1, training=self.training)
        return self.last(hidden)

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.logits(batch), batch[1].clamp_min(0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ClassWeights(Plain):
    def loss(self, batch: Any) -> Tensor:
        logits = self.logits(batch)
        weights = torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype)
        return functional.cross_entropy(logits, batch[1].clamp_min(0), weights)


class SingleLoss(Plain):
    """Computes the loss in float32, whatever the parameters are, as the models of HuggingFace do."""

    def logits(self, batch: Any) -> Tensor:
        return super().logits(batch).float()


class IgnoreIndex(Plain):
    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.logits(batch), batch[1], ignore_index=IGNORED)


class Sum(Plain):
    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.logits(batch), batch[1].clamp_min(0), reduction="sum")


class RootMean(Plain):
    def loss(self, batch: Any) -> Tensor:
        return (self.logits(batch) - 1).square().mean().sqrt()


class TwoMeans(Plain):
    def loss(self, batch: Any) -> Tensor:
        return IgnoreIndex.loss(self, batch) + (self.logits(batch) - 1).square().mean()


class Normalised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.between = nn.BatchNorm1d(8)


class InBatchNegatives(Plain):
    def loss(self, batch: Any) -> Tensor:
        logits = self.logits(batch)
        return functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Noisy(Plain):
    def loss(self, batch: Any) -> Tensor:
        logits = self.logits(batch)
        return (logits + torch.randn_like(logits)).square().mean()


class Drawing(Normalised, Noisy):
    """With everything that a check could change: random numbers, running statistics, momentum and attributes."""


def count_labels(batch: Any) -> float:
    return float((batch[1] != IGNORED).sum())


def sum_class_weights(batch: Any) -> float:
    return float(torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)[batch[1].clamp_min(0)].sum())


@dataclass(frozen=True)
class Case:
    """What `GradientCheck` finds of a module under a `weight_by`; no remedy if parts and whole agree."""

    build: Callable[[], LightningModule]
    weight_by: Any = "samples"
    remedy: str | None = None
    fitting: Callable[[Any], float] | None = None
    options: dict[str, Any] = field(default_factory=dict)


DOUBLE = {"precision": "64-true"}
MEAN_OVER = "the loss is a mean over something other than samples"
CASES = {
    "mean": Case(Plain, options=DOUBLE),
    "mean in float32": Case(Plain),
    "mean in float32, float64 parameters": Case(SingleLoss, options=DOUBLE),
    "mean in bfloat16": Case(Plain, options={"precision": "bf16-mixed"}),
    "mean, parts weighted equally": Case(Plain, "equal", 'fits `weight_by="samples"`', len),
    "class weights": Case(ClassWeights, remedy=MEAN_OVER, fitting=sum_class_weights, options=DOUBLE),
    "class weights in bfloat16": Case(
        ClassWeights, remedy=MEAN_OVER, fitting=sum_class_weights, options={"precision": "bf16-mixed"}
    ),
    "class weights, counted": Case(ClassWeights, sum_class_weights, options=DOUBLE),
    "ignored labels": Case(IgnoreIndex, remedy=MEAN_OVER, fitting=count_labels, options=DOUBLE),
    "sum": Case(Sum, remedy='fits `weight_by="sum"`', options=DOUBLE),
    "sum, added up": Case(Sum, "sum", options=DOUBLE),
    "root of a mean": Case(RootMean, remedy="which do not add up to 1", options=DOUBLE),
    "two means": Case(TwoMeans, remedy="terms that are means over different things", options=DOUBLE),
    "batch normalisation": Case(Normalised, remedy="Batch normalisation computes", options=DOUBLE),
    "in-batch negatives": Case(InBatchNegatives, remedy="the forward pass mixes samples", options=DOUBLE),
    "random numbers": Case(Noisy, remedy="The step draws random numbers", options=DOUBLE),
}
# Ranks and chunks share the judgement, so that a few cases are enough on ranks.
ON_RANKS = [
    *((name, DDPJoinStrategy) for name in (
        "mean", "mean in float32", "class weights in bfloat16", "class weights, counted", "sum, added up",
        "random numbers",
    )),
    ("mean", DDPCheckpointStrategy),
    ("class weights", DDPCheckpointStrategy),
]  # fmt: skip


def samples(double: bool) -> TensorDataset:
    """Labels of both parts have other shares of ignored ones, and of each class."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(sum(SIZES), FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (sum(SIZES),), generator=generator)
    labels[4:8] = IGNORED
    return TensorDataset(features if double else features.float(), labels)


def part(data: TensorDataset, index: int) -> TensorDataset:
    start = sum(SIZES[:index])
    return TensorDataset(*(tensor[start : start + SIZES[index]] for tensor in data.tensors))


def loader(case: Case, rank: int | None = None) -> DataLoader[Any]:
    data = samples(case.options == DOUBLE)
    data = data if rank is None else part(data, rank)
    return DataLoader(data, batch_size=len(data))


def expected_weights(case: Case) -> list[float] | None:
    """The weights that fit, of the two parts."""
    if case.fitting is None:
        return None
    data = samples(double=True)
    counts = [
        case.fitting(part(data, index).tensors if case.fitting is not len else range(size))
        for index, size in enumerate(SIZES)
    ]
    return [count / sum(counts) for count in counts]


class Communicating(Plain):
    def loss(self, batch: Any) -> Tensor:
        dist.all_reduce(torch.ones(1))
        return super().loss(batch)


class Texts(Plain):
    """Rank 1 has longer ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.last(self.first(batch["tokens"].mean(1))).square().mean()

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        return DataLoader([{"tokens": torch.ones(3 + rank, FEATURES)}] * 4, batch_size=2)


class Streams(IgnoreIndex):
    """Rank 1 has fewer batches."""

    def train_dataloader(self) -> Any:
        number = [12, 4][self.trainer.global_rank]
        generator = torch.Generator().manual_seed(number)
        features = torch.randn(number, FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (number,), generator=generator)
        return DataLoader(list(zip(features, labels, strict=True)), batch_size=4)


class TimeFirst(Plain):
    """The loader draws the samples, which are in the second dimension of its batches."""

    def __init__(self, sizes: Sequence[int] = (4, 4)) -> None:
        super().__init__()
        self.sizes = sizes

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        number = self.sizes[rank]
        rows = torch.randn(number, 6, FEATURES, generator=torch.Generator().manual_seed(rank))
        return DataLoader(TensorDataset(rows), number, collate_fn=lambda rows: torch.stack([row for (row,) in rows], 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.last(self.first(batch[-1]).tanh()).square().mean()  # of the last time


class MadeByTheDataset(Plain):
    """Each entry of the dataset is a batch, which `collate_fn` converts."""

    def train_dataloader(self) -> Any:
        rows = part(samples(double=False), self.trainer.global_rank).tensors
        return DataLoader([rows], batch_size=1, collate_fn=lambda batches: [*batches[0]])


class Repeating(Plain):
    """A hook repeats the samples, once more on rank 1: samples weigh by another number than that of the loader."""

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        return DataLoader([{"rows": part(samples(double=False), rank).tensors[0]}], batch_size=None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch["rows"] = batch["rows"].repeat(1 + self.trainer.global_rank, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.last(self.first(batch["rows"]).tanh()).square().mean()


class Skipping(Streams):
    """Returns None in the first batch of rank 1, and in the second one of all ranks."""

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        rows = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(rank))
        first = torch.tensor([0.0, 1.0, 2.0]).repeat_interleave(4) + 3 * rank
        return DataLoader(TensorDataset(torch.cat([first[:, None], rows[:, 1:]], 1)), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = int(batch[0][0, 0])
        return None if first in (1, 3, 4) else self.last(self.first(batch[0]).tanh()).square().mean()


class Locked(Plain):
    """Cannot be copied on the last rank."""

    def setup(self, stage: str) -> None:
        if self.global_rank == self.trainer.world_size - 1:
            self.lock = threading.Lock()


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))


class Weights(Callback):
    """The weight of each batch in the gradient."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.seen.append(trainer.strategy.batch_weight)


def fit(module: LightningModule, callbacks: list[Any], strategy: Any, data: Any = None, **options: Any) -> Trainer:
    devices = 2 if isinstance(strategy, BalancedDataParallelStrategy) else int(os.environ.get("WORLD_SIZE", "1"))
    options = {"max_epochs": 1, "use_distributed_sampler": False, **options}
    trainer = quiet_trainer(strategy, devices, callbacks=callbacks, **options)
    trainer.fit(module, data)
    return trainer


def fit_chunks(module: LightningModule, callbacks: list[Any], data: Any = None, **options: Any) -> Trainer:
    strategy = BalancedDataParallelStrategy(split=SIZES, weight_by=options.pop("weight_by", "samples"))
    return fit(module, callbacks, strategy, loader(CASES["mean in float32"]) if data is None else data, **options)


def check(module: LightningModule, strategy: Any, data: Any = None, batches: int = 1, **options: Any) -> dict[str, Any]:
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

    def on_train_batch_end(self, *arguments: Any) -> None:
        torch.rand(1)


def state_of(module: Plain, trainer: Trainer) -> dict[str, Tensor]:
    """Return everything that a check could change, each value copied."""
    state = name_training_state(module, trainer.optimizers, buffers=True)
    logged = {f"logged {name}": value for name, value in trainer.callback_metrics.items()}
    more = {
        "random": torch.tensor([*repr(capture_rng_state()).encode()]),
        "steps": torch.tensor([module.steps, trainer.global_step]),
    }
    return {name: torch.as_tensor(value).clone() for name, value in {**state, **logged, **more}.items()}


class DrawingFromStreams(Drawing, Streams):
    pass


def check_on_rank() -> dict[Any, Any]:
    """Run everything that needs two ranks."""
    rank = int(os.environ["RANK"])
    found: dict[Any, Any] = {}
    for name, strategy in ON_RANKS:
        case = CASES[name]
        built = strategy(process_group_backend="gloo", weight_by=case.weight_by)
        found[name, strategy.__name__] = check(case.build(), built, loader(case, rank), **case.options)
    even = loader(CASES["mean in float32"], rank)
    for build, data, batches in [
        (Communicating, even, 1), (Locked, even, 1), (ByHand, even, 1), (Texts, None, 1), (Streams, None, 3),
        (TimeFirst, None, 1), (MadeByTheDataset, None, 1), (Repeating, None, 1), (Skipping, None, 2),
    ]:  # fmt: skip
        found[build.__name__] = check(build(), DDPJoinStrategy(process_group_backend="gloo"), data, batches)
    for weight_by in ("samples", "equal"):
        strategy = DDPJoinStrategy(process_group_backend="gloo", batch_dim=1, weight_by=weight_by)
        found["along `batch_dim`", weight_by] = check(TimeFirst(SIZES), strategy)
    found["states"] = []
    for callbacks in ([], [GradientCheck(batches=2)], [DrawsNumbers()]):
        module = DrawingFromStreams()  # two epochs, into the uneven phase of each
        trainer = fit(module, callbacks, DDPJoinStrategy(process_group_backend="gloo"), max_epochs=2)
        found["states"].append(state_of(module, trainer))
    return found


def assert_found(case, record):
    """The size of the difference, its remedy, and the weights that would fit."""
    assert record.batch == 0
    if case.remedy is None:
        assert record.remedy is None
        is_exact = case.options == {"precision": "64-true"} and case.build is not SingleLoss
        assert record.difference < (EXACT if is_exact else EXACT_IN_FLOAT32)
        return
    assert case.remedy in record.remedy
    assert record.difference > SURPRISE
    assert 0 < record.parameter_difference < 10
    expected = expected_weights(case)
    if expected is not None:
        assert record.fitted_weights == pytest.approx(expected, rel=1e-5)
        assert record.weights != pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_that_does_not_fit_the_weights_of_chunks_is_noticed(name):
    case, check = CASES[name], GradientCheck()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_chunks(case.build(), [check], loader(case), weight_by=case.weight_by, **case.options)
    (record,) = check.records
    assert_found(case, record)
    found = [str(one.message) for one in caught if "GradientCheck" in str(one.message)]
    assert len(found) == (case.remedy is not None)
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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Communicating", "`training_step` communicates between ranks"),
        ("Locked", "cannot be copied: TypeError: cannot pickle '_thread.lock' object (rank 1)"),
        ("ByHand", "under manual optimization"),
        ("TimeFirst", "drew 4 samples for a batch whose size along `batch_dim=0` is 6, so that"),
        ("Texts", "`batch['tokens']` cannot be joined, it is shape (2, 3, 5) and shape (2, 4, 5)"),
    ],
)
def test_what_cannot_be_checked_on_ranks_is_said_once_while_training_goes_on(by_rank, name, reason):
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
        (record,) = found["MadeByTheDataset"]["records"]  # samples are counted by the tensors
        assert record.weights == pytest.approx([size / sum(SIZES) for size in SIZES])
        assert record.remedy is None
        assert [record.batch for record in found["Streams"]["records"]] == [0]  # later, one rank alone has data
        assert (found["Streams"]["reason"], found["Streams"]["steps"]) == (None, 3)
        (record,) = found["Repeating"]["records"]  # the remedy is never the value that is already set
        assert record.fitted_weights == pytest.approx([size / sum(SIZES) for size in SIZES], rel=1e-4)
        assert "a mean over something other than samples" in record.remedy
        (record,) = found["Skipping"]["records"]  # the first batch in which the steps of both ranks return a loss
        assert (record.batch, record.remedy, record.weights) == (2, None, [0.5, 0.5])
        assert (found["Skipping"]["weights"], found["Skipping"]["reason"]) == ([[4, 0, 4], [0, 0, 4]][rank], None)


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
        module, logger = Drawing(), CSVLogger(tmp_path, name=None, version=str(len(rows)))
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

    def loss(self, batch):
        return None if batch[0][0, 0] == 9 else super().loss(batch)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


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


def compared(parts, whole):
    comparison = GradientComparison(len(parts))
    for name in whole:
        comparison.add(name, [part[name] for part in parts], whole[name])
    return comparison


def gradients(seed, weight=30):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"weight": weight, "bias": 1, "empty": 0}
    return {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}


def weighted(parts, weights):
    return {name: sum(w * part[name] for w, part in zip(weights, parts, strict=True)) for name in parts[0]}


def test_differences_are_differences_of_the_vectors_in_blocks_of_any_size(monkeypatch):
    parts, whole, weights = [gradients(seed) for seed in range(3)], gradients(7), [0.2, 0.3, 0.5]
    errors = {name: (value - whole[name]).norm() for name, value in weighted(parts, weights).items()}
    expected = torch.stack(list(errors.values())).norm() / torch.cat(list(whole.values())).norm()
    for rows in (1, 7, 1000):
        monkeypatch.setattr(gradient_check, "_ROWS", rows)
        comparison = compared(parts, whole)
        assert comparison.difference(weights) == pytest.approx(float(expected), rel=1e-12)
        name, difference = comparison.most_different(weights)
        assert name == "weight"
        assert difference == pytest.approx(float(errors["weight"] / whole["weight"].norm()), rel=1e-12)


def test_weights_are_fitted_only_if_they_are_unique():
    parts, weights = [gradients(seed) for seed in range(3)], [0.1, 2.0, 0.0]
    assert compared(parts, weighted(parts, weights)).fit() == pytest.approx(weights, abs=1e-12)
    twice = [parts[0], parts[0], parts[1]]
    assert compared(twice, weighted(twice, [1, 1, 1])).fit() is None
    assert compared([gradients(seed, weight=1) for seed in range(3)], gradients(7, weight=1)).fit() is None
    nothing = weighted(parts, [0, 0, 0])
    assert compared([nothing, nothing], nothing).difference([0.5, 0.5]) == 0
    assert compared([nothing, parts[0]], nothing).difference([0.5, 0.5]) == float("inf")
    parts[0]["weight"][4] = torch.nan
    comparison = compared(parts, gradients(7))
    assert comparison.fit() is None
    assert not comparison.difference([1, 1, 1]) <= 1
