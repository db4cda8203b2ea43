"""Callbacks of Lightning have the same effect as on one device."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm

from tests.parity import (
    Evaluated,
    assert_same_training,
    balanced,
    batches,
    both_ways,
    compare,
    dataset,
    normalised_network,
    quiet_trainer,
    relative_difference,
    seeded,
    train,
)


def test_accumulation_schedules():
    single, _ = compare(Evaluated, lambda: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]})
    assert len(single.gradients.before_step) == 4 + 2 + 2


def test_the_same_checkpoint_is_the_best(tmp_path):
    def run(**way):
        path = tmp_path / str(way["devices"])
        checkpoint = ModelCheckpoint(path, monitor="val_loss", save_top_k=2, filename="{epoch}-{step}")
        options = {"callbacks": [checkpoint], "enable_checkpointing": True, "max_epochs": 5}
        train(seeded(Evaluated), **way, val_loader=batches(19), **options)
        return checkpoint, path

    (single, single_path), (parallel, parallel_path) = both_ways(run)
    assert Path(parallel.best_model_path).name == Path(single.best_model_path).name
    assert {p.name for p in parallel_path.iterdir()} == {p.name for p in single_path.iterdir()}
    torch.testing.assert_close(parallel.best_model_score, single.best_model_score, rtol=1e-12, atol=0)
    states = [torch.load(c.best_model_path, weights_only=True)["state_dict"] for c in (parallel, single)]
    assert states[0].keys() == states[1].keys()
    assert relative_difference(*(list(state.values()) for state in states)) < 1e-12


def test_early_stopping_stops_in_the_same_epoch():
    def run(**way):
        stopping = EarlyStopping("val_loss", min_delta=0.05)
        return train(seeded(Evaluated), **way, val_loader=batches(19), callbacks=[stopping], max_epochs=30), stopping

    (single, expected), (parallel, found) = both_ways(run)
    assert 0 < expected.stopped_epoch < 29
    assert found.stopped_epoch == expected.stopped_epoch
    assert_same_training(parallel, single)


AVERAGES = {
    "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2, annealing_epochs=1),
    "mean": WeightAveraging,
    "ema": lambda: EMAWeightAveraging(decay=0.8, update_starting_at_step=2),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_of_weights(kind):
    def build():
        return Evaluated().double()  # before the callback copies it

    options = {"val_loader": batches(19), "max_epochs": 4}
    single, _ = compare(build, lambda: {**options, "callbacks": [AVERAGES[kind]()]})
    assert relative_difference(train(seeded(build), **options).parameters, single.parameters) > 1e-3


class KeepsHidden(Evaluated):
    """Keeps the input of batch normalisation for all samples, with the weights at the start of the last epoch."""

    def __init__(self):
        super().__init__()
        self.network = normalised_network()

    def on_train_epoch_start(self):
        self.hidden = self.network[0](dataset(32).tensors[0].to(self.device)).detach()


def test_swa_collects_the_statistics_of_batch_norm_for_the_averaged_weights():
    options = {"loader": batches(32), "callbacks": [AVERAGES["swa"]()], "max_epochs": 4}
    trained = train(seeded(KeepsHidden), balanced([2, 6]), 2, **options)
    norm = trained.module.network[1]
    # The mean over batches of equal size is the mean over all samples.
    torch.testing.assert_close(norm.running_mean.cpu(), trained.module.hidden.mean(0).cpu(), rtol=1e-12, atol=1e-12)
    assert norm.num_batches_tracked == 4


def test_pruning_masks_and_gradients():
    def run(**way):
        module = seeded(Evaluated)
        weights = [(module.network[0], "weight"), (module.network[2], "weight")]
        pruning = ModelPruning("l1_unstructured", weights, amount=0.3, use_lottery_ticket_hypothesis=False)
        return train(module, **way, callbacks=[pruning])

    single, parallel = both_ways(run)
    assert_same_training(parallel, single)
    assert sum((p == 0).sum() for p in parallel.parameters) > 10


class Writer(BasePredictionWriter):
    def __init__(self, interval):
        super().__init__(interval)
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((prediction, batch_indices, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append((predictions, batch_indices))


@pytest.mark.parametrize("return_predictions", [True, False])
def test_predictions_are_written_in_order(return_predictions):
    def run(strategy, devices):
        writer = Writer("batch_and_epoch")
        trainer = quiet_trainer(strategy, devices, precision="64-true", callbacks=[writer])
        loaders = [batches(19), batches(8)]
        return trainer.predict(seeded(Evaluated), loaders, return_predictions=return_predictions), writer

    (expected, single), (found, parallel) = both_ways(run)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(parallel.batches, single.batches)
    torch.testing.assert_close(parallel.epochs, single.epochs)
    assert len(single.batches) == 4


class Logged(CSVLogger):
    """Keeps logged metrics."""

    def __init__(self, path):
        super().__init__(path)
        self.entries = []

    def log_metrics(self, metrics, step=None):
        self.entries.append((step, dict(metrics)))


class NormLogging(Evaluated):
    flops_per_batch = 1000  # for the `ThroughputMonitor`

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.network, norm_type=2))


def test_monitors_log_the_same_and_norms_of_gradients_are_the_whole_batchs(tmp_path):
    def run(**way):
        logger = Logged(tmp_path)
        callbacks = [
            LearningRateMonitor(),
            DeviceStatsMonitor(cpu_stats=True),
            Timer("00:01:00:00"),
            ModelSummary(),
            RichModelSummary(),
            RichProgressBar(),
            ThroughputMonitor(lambda batch: len(batch[0])),
        ]
        options = {"callbacks": callbacks, "enable_progress_bar": True, "enable_model_summary": True}
        return train(seeded(NormLogging), **way, **options, logger=logger, log_every_n_steps=1), logger.entries

    (single, expected), (parallel, found) = both_ways(run)
    assert_same_training(parallel, single)
    assert [(step, sorted(metrics)) for step, metrics in found] == [(step, sorted(m)) for step, m in expected]
    for name in ("lr-Adam", "train/samples", "epoch", "grad_2.0_norm_total"):
        values = [[metrics[name] for _, metrics in entries if name in metrics] for entries in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-9) != []


# Lightning looks for a checkpoint to resume from whenever a callback writes checkpoints.
@pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model")
@pytest.mark.filterwarnings("ignore:.fit.ckpt_path=.last.. is set, but there is no last checkpoint")
def test_a_checkpoint_is_saved_on_an_exception(tmp_path):
    class FailsLate(Evaluated):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 5:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    def run(**way):
        path = tmp_path / str(way["devices"])
        with pytest.raises(ArithmeticError):
            train(seeded(FailsLate), **way, callbacks=[OnExceptionCheckpoint(path)], enable_checkpointing=True)
        return torch.load(path / "on_exception.ckpt", weights_only=True)

    single, parallel = both_ways(run)
    assert parallel["global_step"] == single["global_step"] == 5
    assert relative_difference(list(parallel["state_dict"].values()), list(single["state_dict"].values())) < 1e-12
