"""Several runs of one trainer, checkpoints between runs, state kept between steps, and runs that end early."""

import os
import signal
import threading
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional

from tests.parity import (
    Classifier,
    Evaluated,
    Trained,
    assert_same_training,
    balanced,
    batches,
    both_ways,
    compare,
    quiet_trainer,
    relative_difference,
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


@pytest.mark.parametrize("order", [1, -1])
def test_a_checkpoint_resumes_on_the_other_number_of_devices(tmp_path, order):
    def run(strategy, devices, epochs, ckpt_path=None):
        module = seeded(Evaluated).double()  # before Lightning loads the checkpoint into it
        trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=epochs)
        trainer.fit(module, batches(), ckpt_path=ckpt_path)
        return module, trainer

    first, second = [("auto", 1), (balanced([2, 6]), 2)][::order]
    _, trainer = run(*first, epochs=2)
    path = tmp_path / "half.ckpt"
    trainer.save_checkpoint(path)
    resumed, resumed_trainer = run(*second, epochs=4, ckpt_path=path)
    reference, reference_trainer = run("auto", 1, epochs=4)
    assert resumed_trainer.global_step == reference_trainer.global_step
    assert relative_difference(list(resumed.parameters()), list(reference.parameters())) < 1e-12
    state = torch.load(path, weights_only=True)["state_dict"]
    assert state.keys() == Evaluated().state_dict().keys()


class Configured(Evaluated):
    def __init__(self, scale):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        return self.hparams.scale * super().training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.hparams.scale += 1


def test_hyperparameters_reach_the_replicas_and_the_checkpoint(tmp_path):
    def run(**way):
        trained = train(seeded(lambda: Configured(2.0)), **way)
        path = tmp_path / f"{way['devices']}.ckpt"
        trained.trainer.save_checkpoint(path)
        return trained, Configured.load_from_checkpoint(path)

    (single, expected), (parallel, found) = both_ways(run)
    assert_same_training(parallel, single)
    assert dict(found.hparams) == dict(expected.hparams)
    assert found.hparams.scale == 5


class Recurring(Classifier):
    """Keeps a state that a hook resets."""

    def __init__(self):
        super().__init__()
        self.state = None

    def on_train_epoch_start(self):
        self.state = None

    def training_step(self, batch, batch_idx):
        logits = self.network(batch[0])
        if self.state is not None:
            logits = logits + self.state
        self.state = logits.detach()
        return functional.cross_entropy(logits, batch[1])


@pytest.mark.filterwarnings("ignore:`self.state` was set inside a step")
def test_state_of_replicas_can_be_reset_by_a_hook():
    compare(Recurring, {"loader": batches(24)})


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
        (StoppingInside, {}, 4),
    ],
)
def test_should_stop_ends_training(build, options, steps):
    single, _ = compare(build, {"val_loader": batches(19), "max_epochs": 5, **options})
    assert single.trainer.global_step == steps


class Failing(Evaluated):
    """Raises in one of its steps, on the replica with the larger chunk."""

    def __init__(self, step, error):
        super().__init__()
        self.failing, self.error = step, error

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


class Ended(Callback):
    def __init__(self):
        self.calls = []

    def on_exception(self, trainer, pl_module, exception):
        self.calls.append(("exception", type(exception)))

    def teardown(self, trainer, pl_module, stage):
        self.calls.append(("teardown", stage))


def run_until_it_ends(build, expected, entry="fit"):
    """Run on one device and on replicas, and return how each run ended."""

    def run(strategy, devices):
        ended = Ended()
        trainer = quiet_trainer(strategy, devices, precision="64-true", callbacks=[ended], max_epochs=3)
        loaders = [batches(), batches(19)] if entry == "fit" else [batches()]
        with pytest.raises(expected):
            getattr(trainer, entry)(seeded(build), *loaders)
        assert not replica_threads()
        return trainer.global_step, trainer.state.status, trainer.interrupted, ended.calls

    return both_ways(run)


@pytest.mark.parametrize(
    ("step", "entry"), [("training", "fit"), ("validation", "fit"), ("test", "test"), ("predict", "predict")]
)
def test_an_exception_in_a_step_ends_the_run_and_the_threads(step, entry):
    single, parallel = run_until_it_ends(lambda: Failing(step, ArithmeticError()), ArithmeticError, entry)
    assert parallel == single


class Interrupted(Evaluated):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5 and len(batch[0]) in (6, 8):
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("build", [lambda: Failing("training", KeyboardInterrupt()), Interrupted])
def test_an_interrupt_ends_the_run_and_the_threads(build):
    single, parallel = run_until_it_ends(build, SystemExit)
    assert parallel == single
