"""Batches whose tensors do not tell their samples: gradients and logged values are those of one process."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPCheckpointStrategy
from tests.strategies import drawn_ranks as ranks
from tests.support.processes import run_processes

COUNTED = [case for case in ranks.CASES if not case.endswith("along another dimension")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(ranks.run, 2, str(tmp_path_factory.mktemp("uncounted")), timeout=240)


def difference(outcome, expected):
    return float((outcome.parameters - expected.parameters).norm() / expected.parameters.norm())


@pytest.mark.parametrize("strategy", ranks.STRATEGIES)
@pytest.mark.parametrize("case", COUNTED)
def test_gradients_are_those_of_one_process(found, case, strategy):
    expected = ranks.fit_alone(case, strategy)
    outcomes = [of_rank[0][case, strategy] for of_rank in found]
    assert outcomes[0].digest == outcomes[1].digest
    assert difference(outcomes[0], expected) < 1e-12


@pytest.mark.parametrize("strategy", ranks.STRATEGIES)
def test_the_dimension_of_time_fails_the_same_check(found, strategy):
    expected = ranks.fit_alone("series", strategy)
    assert difference(found[0][0]["ready series along another dimension", strategy], expected) > 1e-3


@pytest.mark.parametrize("strategy", ranks.STRATEGIES)
@pytest.mark.parametrize("case", [case for case in COUNTED if case != "ready graphs"])
def test_logged_values_are_those_of_one_process(found, case, strategy):
    expected = ranks.fit_alone(case, strategy).logged
    names = {name for values in expected for name in values}
    assert names == {"loss_step", "loss_epoch", "val_loss_step", "val_loss_epoch"}
    for of_rank in found:
        logged = of_rank[0][case, strategy].logged
        assert len(logged) == len(expected)
        for values, wanted in zip(logged, expected, strict=True):
            assert values == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("strategy", ranks.STRATEGIES)
def test_batches_that_cannot_be_counted_weigh_the_same_and_one_warning_says_so(found, strategy):
    for case in ranks.CASES:
        warned = [warning for of_rank in found for warning in of_rank[0][case, strategy].warned]
        if case == "ready graphs":
            (warning,) = warned
            assert warning.startswith("rank 0: the samples of a batch cannot be counted: `batch` of type `GraphBatch`")
            assert "All batches weigh the same. Pass a callable `weight_by`" in warning
        else:
            assert warned == []


@pytest.mark.parametrize(("name", "epochs"), [("late", ranks.LATE), ("whole", ranks.EARLY)])
def test_weights_are_equal_from_the_first_batch_that_cannot_be_counted(found, name, epochs):
    (first, weights), (second, _) = (of_rank[2][name] for of_rank in found)
    assert first.digest == second.digest
    assert difference(first, ranks.fit_epochs_alone(epochs)) < 1e-12
    assert difference(first, ranks.fit_epochs_alone(epochs, is_equal=False)) > 1e-3
    assert weights == [2.0, 2.0, 1.0, 1.0] if name == "late" else [1.0] * 6
    (warning,) = first.warned + second.warned
    assert warning.startswith("rank 1: the samples of a batch cannot be counted")
    assert "All batches weigh the same." in warning


def test_a_run_with_equal_weights_keeps_them_when_it_resumes_without_the_rank_that_cannot_count(found):
    for rank in range(2):
        (whole, of_whole), (resumed, weights) = found[rank][2]["whole"], found[rank][2]["resumed"]
        assert weights == of_whole[2:]
        assert resumed.digest == whole.digest
        assert [("continues with equal weights" in warning) for warning in resumed.warned] == [True] * (rank == 0)


@pytest.mark.parametrize("strategy", ["ddp", *ranks.STRATEGIES])
def test_a_sampler_of_the_users_own_stays(found, strategy):
    for rank in range(2):
        own = found[rank][1][strategy]
        assert own["predicted"] == own["seen"] == list(range(8))[rank::2][::-1]
        assert own["sampler"] == "Backwards"


@pytest.mark.parametrize("strategy", ["ddp", *ranks.STRATEGIES])
def test_lightning_and_users_see_the_class_of_the_loader(found, strategy):
    own = found[0][1][strategy]
    assert own["is a loader"] == [True, True, False]
    assert len(own["advice"]) == 1


@pytest.mark.parametrize("strategy", ["ddp", *ranks.STRATEGIES])
def test_arguments_of_a_sampler_are_known_before_a_run(strategy):
    options = {"accelerator": "cpu", "devices": 2, "num_nodes": 2, "logger": False}
    trainer = Trainer(strategy=strategy, **options)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 0}


def test_one_rank_has_the_loader_of_the_user():
    loader = DataLoader(ranks.Series(), batch_size=5)
    trainer = ranks.quiet_trainer(strategy="ddp_join", devices=1, max_epochs=1, precision="64-true")
    trainer.fit(ranks.Regression(), loader, loader)
    assert trainer.train_dataloader is trainer.val_dataloaders is loader


@pytest.mark.parametrize("strategy", ranks.STRATEGIES)
def test_the_number_that_was_drawn_for_a_batch_ends_with_it(strategy):
    within, after = [], []

    class Counting(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            within.append(trainer.strategy.count_samples(batch))

        def on_train_epoch_end(self, trainer, module):
            after.append(trainer.strategy.count_samples(torch.zeros(5, 3)))

        def on_validation_epoch_end(self, trainer, module):
            after.append(trainer.strategy.count_samples(torch.zeros(4, 3)))

    trainer = ranks.quiet_trainer(
        strategy=strategy, devices=1, max_epochs=1, precision="64-true", callbacks=[Counting()], num_sanity_val_steps=0
    )
    loader = DataLoader(ranks.Series(), batch_size=9, collate_fn=ranks.across_time)
    trainer.fit(ranks.Regression(), loader, loader)
    assert within == [9, 9, 4]  # not 7, the number of times
    assert after == [4, 5]


@pytest.mark.parametrize("value", [-1, 0.5])
def test_a_dimension_is_a_number(value):
    with pytest.raises((TypeError, ValueError), match="`batch_dim` must be"):
        DDPCheckpointStrategy(batch_dim=value)
