"""Runs one after another with one trainer, and runs that end early."""

import os
import signal
import threading
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from tests.parity import (
    Evaluated,
    Trained,
    assert_same_training,
    balanced,
    batches,
    both_ways,
    quiet_trainer,
    seeded,
    train,
)


def replica_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("replica-")]


def test_fit_validate_test_predict_and_fit_again():
    def run(**way):
        trained = train(seeded(Evaluated), **way, val_loader=batches(19), max_epochs=2)
        trainer = trained.trainer
        results = [
            trainer.validate(trained.module, batches(19), verbose=False),
            trainer.test(trained.module, batches(21), verbose=False),
            trainer.predict(trained.module, batches(19)),
        ]
        trainer.fit_loop.max_epochs = 4
        trainer.fit(trained.module, batches(), batches(19))
        return trained, results

    (single, expected), (parallel, found) = both_ways(run)
    assert single.trainer.global_step == 16
    assert_same_training(parallel, single)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert not replica_threads()


def test_one_trainer_trains_another_module():
    def run(**way):
        first = train(seeded(Evaluated), **way, max_epochs=1)
        module = seeded(lambda: Evaluated(torch.optim.SGD))
        first.trainer.fit_loop.max_epochs = 2
        first.trainer.fit(module, batches())
        return Trained(module, first.trainer, first.gradients)

    assert_same_training(*reversed(both_ways(run)))


class Statistics(Evaluated):
    """Has buffers and metrics, and notes what they are when training starts."""

    def __init__(self):
        super().__init__()
        self.network.append(nn.BatchNorm1d(3))
        self.noted = []

    def on_validation_batch_end(self, *args):
        self.noted.append(self.trainer.sanity_checking)

    def on_train_start(self):
        buffers = [buffer.sum().item() for buffer in self.buffers()]
        metrics = [metric.update_count for metric in (self.accuracy, self.val_accuracy)]
        self.noted.append((buffers, metrics, dict(self.trainer.callback_metrics)))


def test_the_sanity_check_leaves_nothing_behind():
    def run(steps, **way):
        return train(seeded(Statistics), **way, val_loader=batches(19), num_sanity_val_steps=steps, max_epochs=1)

    single, parallel = both_ways(partial(run, 2))
    untouched = ([0, 3, 0], [0, 0], {})  # mean, variance and number of batches
    assert parallel.module.noted == single.module.noted == [True, True, untouched, False, False, False]
    without = run(0, strategy=balanced([2, 6]), devices=2)
    assert all(torch.equal(p, q) for p, q in zip(parallel.parameters, without.parameters, strict=True))
    assert parallel.trainer.callback_metrics == without.trainer.callback_metrics


class Stopping(Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step >= 3


class StoppingInside(Evaluated):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("build", "options", "steps"),
    [
        (Evaluated, {"callbacks": [Stopping()]}, 3),
        (Evaluated, {"callbacks": [Stopping()], "min_epochs": 2}, 8),
        (StoppingInside, {}, 4),
    ],
)
def test_should_stop_ends_training(build, options, steps):
    def run(**way):
        return train(seeded(build), **way, val_loader=batches(19), max_epochs=5, **options)

    single, parallel = both_ways(run)
    assert_same_training(parallel, single)
    assert single.trainer.global_step == steps


class Failing(Evaluated):
    """Raises in one of its steps, on the replica with the larger chunk."""

    def __init__(self, step, error):
        super().__init__()
        self.failing, self.error, self.ended = step, error, []

    def fail(self, step, batch):
        if step == self.failing and len(batch[0]) in (6, 8) and self.trainer.global_step in (0, 4, 5):
            raise self.error

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5:
            self.fail("training", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.fail("validation", batch)
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.fail("test", batch)

    def predict_step(self, batch, batch_idx):
        self.fail("predict", batch)

    def on_exception(self, exception):
        self.ended.append(exception)


class Ended(Callback):
    def __init__(self):
        self.calls = []

    def on_exception(self, trainer, pl_module, exception):
        self.calls.append(("exception", type(exception)))

    def teardown(self, trainer, pl_module, stage):
        self.calls.append(("teardown", stage))


@pytest.mark.parametrize("step", ["training", "validation", "test", "predict"])
def test_an_exception_in_a_step_ends_the_run_and_the_threads(step):
    def run(strategy, devices):
        ended = Ended()
        trainer = quiet_trainer(strategy, devices, precision="64-true", callbacks=[ended], max_epochs=3)
        module = seeded(lambda: Failing(step, ArithmeticError("too much")))
        loaders = [batches(), batches(19)] if step in ("training", "validation") else [batches()]
        with pytest.raises(ArithmeticError, match="too much"):
            (trainer.fit if len(loaders) == 2 else getattr(trainer, step))(module, *loaders)
        assert not replica_threads()
        return trainer.global_step, trainer.state.status, ended.calls

    single, parallel = both_ways(run)
    assert parallel == single


class Interrupted(Evaluated):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5 and len(batch[0]) in (6, 8):
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("raised", [False, True])
def test_an_interrupt_ends_the_run_and_the_threads(raised):
    def build():
        return Failing("training", KeyboardInterrupt()) if raised else Interrupted()

    def run(strategy, devices):
        ended = Ended()
        trainer = quiet_trainer(strategy, devices, precision="64-true", callbacks=[ended], max_epochs=3)
        with pytest.raises(SystemExit):
            trainer.fit(seeded(build), batches(), batches(19))
        assert not replica_threads()
        return trainer.global_step, trainer.state.status, trainer.interrupted, ended.calls

    single, parallel = both_ways(run)
    assert parallel == single
