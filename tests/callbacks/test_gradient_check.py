"""`GradientCheck` says by how much the gradient of parts differs from that of the whole batch, and why."""

import threading
import warnings

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy
from lightning_ddp_ext.callbacks import GradientCheck
from tests.callbacks import gradient_check_ranks as ranks
from tests.callbacks.gradient_check_modules import CASES, SIZES, Drawing, Plain, SingleLoss, expected_weights, loader
from tests.parity import quiet_trainer
from tests.processes import run_processes

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


def test_batches_that_one_rank_alone_has_are_skipped(by_rank):
    for found in by_rank:
        assert [record.batch for record in found["Streams"]["records"]] == [0]
        assert (found["Streams"]["reason"], found["Streams"]["steps"]) == (None, 3)


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
