"""`GradientCheck` says by how much the gradient of parts differs from that of the whole batch, and why."""

import threading
import warnings

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDataParallelStrategy
from lightning_ddp_ext.callbacks import GradientCheck
from tests.callbacks import gradient_check_ranks as ranks
from tests.callbacks.gradient_check_modules import CASES, SIZES, Drawing, Plain, SingleLoss, expected_weights, loader
from tests.parity import quiet_trainer
from tests.support.processes import run_processes

LAUNCHED = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}  # as torchrun does
ON_RANKS = [
    *((name, "ddp_join") for name in (
        "mean", "mean in float32", "mean in float32, float64 parameters",
        "class weights", "class weights in bfloat16", "class weights, counted",
        "ignored labels", "masked mean", "sum", "sum, added up", "batch normalisation", "in-batch negatives",
        "random numbers",
    )),
    ("mean", "ddp_checkpoint"), ("class weights", "ddp_checkpoint"), ("sum, added up", "ddp_checkpoint"),
]  # fmt: skip
SURPRISE, EXACT, EXACT_IN_FLOAT32 = 0.02, 1e-14, 1e-6


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


def fit(module, callbacks, data=None, **options):
    weight_by = options.pop("weight_by", "samples")
    strategy = BalancedDataParallelStrategy(split=SIZES, weight_by=weight_by)
    trainer = quiet_trainer(strategy, 2, callbacks=callbacks, **{"max_epochs": 1, **options})
    trainer.fit(module, loader(CASES["mean in float32"]) if data is None else data)
    return trainer


@pytest.mark.parametrize("name", CASES)
def test_a_loss_that_does_not_fit_the_weights_of_chunks_is_noticed(name):
    case, check = CASES[name], GradientCheck()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(case.build(), [check], loader(case), weight_by=case.weight_by, **case.options)
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
    return run_processes(ranks.run, 2, ON_RANKS, timeout=240, env=LAUNCHED)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("key", ON_RANKS, ids=" under ".join)
def test_a_loss_that_does_not_fit_the_weights_of_ranks_is_noticed(by_rank, key):
    first, second = (found[key] for found in by_rank)
    assert first["reason"] is None
    (record,) = first["records"]
    assert_found(CASES[key[0]], record)
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


def test_batches_that_the_dataset_makes_and_a_function_converts_are_counted_by_their_tensors(by_rank):
    for found in by_rank:
        (record,) = found["MadeByTheDataset"]["records"]
        assert record.weights == pytest.approx([size / sum(SIZES) for size in SIZES])
        assert record.remedy is None


def test_batches_that_one_rank_alone_has_are_skipped(by_rank):
    for found in by_rank:
        assert [record.batch for record in found["Streams"]["records"]] == [0]
        assert (found["Streams"]["reason"], found["Streams"]["steps"]) == (None, 3)


def test_samples_are_counted_and_joined_along_the_batch_dimension(by_rank):
    for found in by_rank:
        (fits,), (differs,) = (found["along `batch_dim`", weight_by]["records"] for weight_by in ("samples", "equal"))
        assert fits.weights == pytest.approx([size / sum(SIZES) for size in SIZES])
        assert fits.difference < EXACT_IN_FLOAT32
        assert differs.difference > SURPRISE
        assert 'fits `weight_by="samples"`' in differs.remedy


def test_a_remedy_is_never_the_value_that_is_already_set(by_rank):
    for found in by_rank:
        (record,) = found["Repeating"]["records"]
        assert record.fitted_weights == pytest.approx([size / sum(SIZES) for size in SIZES], rel=1e-4)
        assert "a mean over something other than samples" in record.remedy


def test_ranks_whose_step_returns_none_are_left_out(by_rank):
    """The check goes on to a batch of which two ranks have a part."""
    for rank, found in enumerate(by_rank):
        assert found["Skipping"]["reason"] is None
        (record,) = found["Skipping"]["records"]
        assert (record.batch, record.remedy, record.weights) == (2, None, [0.5, 0.5])
        assert found["Skipping"]["weights"] == [[4, 0, 4], [0, 0, 4]][rank]


def same_bits(one, other):
    assert one.keys() == other.keys()
    assert len(one) > 10
    return {name for name, value in one.items() if torch.equal(value, other[name])}


def test_a_check_changes_no_bit_of_a_training_on_ranks(by_rank):
    for found in by_rank:
        without, checked, disturbed = found["states"]
        assert same_bits(without, checked) == set(without)
        assert "parameter `first.weight`" not in same_bits(without, disturbed)


def state_after(folder, *callbacks):
    module, logger = Drawing(), CSVLogger(folder, name=None, version="")
    trainer = fit(module, [*callbacks], max_epochs=3, logger=logger, log_every_n_steps=1)
    return ranks.state_of(module, trainer), (folder / "metrics.csv").read_text()


@pytest.mark.filterwarnings("ignore")
def test_a_check_changes_no_bit_of_a_training_on_chunks(tmp_path):
    without, rows = state_after(tmp_path / "without")
    checked, rows_of_checked = state_after(tmp_path / "checked", GradientCheck(batches=2))
    disturbed, _ = state_after(tmp_path / "disturbed", ranks.DrawsNumbers())
    assert same_bits(without, checked) == set(without)
    assert rows == rows_of_checked
    assert rows.count("\n") == 4
    assert "parameter `first.weight`" not in same_bits(without, disturbed)


class Locked(Plain):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Skipping(Plain):
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
    trainer.fit(Skipping(), DataLoader(TensorDataset(features, labels), batch_size=12))
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
        fit(module, callbacks, data, accumulate_grad_batches=2)
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
        fit(Recurrent(), [check])
    assert check.records[0].remedy is None
    assert check.records[0].difference < EXACT_IN_FLOAT32
