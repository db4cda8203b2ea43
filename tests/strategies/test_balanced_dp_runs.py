"""Options of the Trainer, profilers, several runs of one trainer, checkpoints between runs, and runs that end early."""

import os
import signal
import threading
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import AdvancedProfiler
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.training import (
    Classifier,
    Evaluated,
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

REPLICA_THREADS = "replica-"  # how their names begin
OPTIONS = [
    {"max_steps": 5, "accumulate_grad_batches": 2, "max_epochs": -1},
    {"val_check_interval": 3, "check_val_every_n_epoch": None},
    {"num_sanity_val_steps": -1},
    {"fast_dev_run": 3, "enable_model_summary": True, "enable_progress_bar": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_equals_one_device(options):
    options = {"val_loader": batches(19), "max_epochs": 2, **options}
    compare(Evaluated, options)


@pytest.mark.filterwarnings("ignore:You have turned on `Trainer.detect_anomaly=True.`")
def test_anomalies_are_detected_on_every_replica():
    class Infinite(Evaluated):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + (0 * loss).sqrt() if len(batch[0]) == 6 else loss

    compare(Evaluated, {"detect_anomaly": True})
    with pytest.raises(RuntimeError, match="returned nan values") as caught:
        train(seeded(Infinite), balanced([2, 6]), 2, detect_anomaly=True)
    assert "replica 1 of 2" in caught.value.__notes__[0]


class Profiled(Classifier):
    """Profiles a part of its step, which the backward pass repeats."""

    def __init__(self):
        super().__init__()
        self.threads = []

    def training_step(self, batch, batch_idx):
        def profiled(features):
            with self.trainer.profiler.profile("network"):
                self.threads.append(threading.current_thread().name)
                return self.network(features)

        return functional.cross_entropy(checkpoint(profiled, batch[0], use_reentrant=False), batch[1])


@pytest.mark.usefixtures("_side_by_side")
@pytest.mark.parametrize("kind", ["simple", AdvancedProfiler])
def test_profilers_see_the_actions_of_every_replica(tmp_path, kind):
    def run(**way):
        profiler = kind if kind == "simple" else kind(tmp_path, str(way["devices"]))
        return train(seeded(Profiled), **way, profiler=profiler, loader=batches(40), max_epochs=1)

    single, parallel = both_ways(run)
    assert_same_training(parallel, single)
    # Devices repeat the forward pass in a thread of autograd, also with one of them.
    assert not [name for name in parallel.module.threads if name.startswith(REPLICA_THREADS)]
    assert len(single.module.threads) == 2 * 5
    assert len(parallel.module.threads) == 2 * 2 * 5
    if kind == "simple":
        assert len(parallel.trainer.profiler.recorded_durations["network"]) == 2 * 2 * 5
    else:
        (path,) = tmp_path.glob("fit-2*")
        (report,) = (one for one in path.read_text().split("Profile stats for: ") if one.startswith("network"))
        assert "linear.py" in report


def replica_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(REPLICA_THREADS)]


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


class Statistics(Evaluated):
    """Has buffers and metrics, and notes their values when training starts."""

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


def failing(step, error):
    """Return a module of which one step raises, on the replica with the larger chunk."""

    def fail(self, batch, batch_idx, *arguments):
        if len(batch[0]) in (6, 8) and self.trainer.global_step == (5 if step == "training_step" else 0):
            error()
        return getattr(Evaluated, step)(self, batch, batch_idx, *arguments)

    return type("Failing", (Evaluated,), {step: fail})


class Ended(Callback):
    def __init__(self):
        self.calls = []

    def on_exception(self, trainer, pl_module, exception):
        self.calls.append(("exception", type(exception)))

    def teardown(self, trainer, pl_module, stage):
        self.calls.append(("teardown", stage))


def raise_error():
    raise ArithmeticError


def raise_interrupt():
    raise KeyboardInterrupt


def send_interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("step", "error", "entry", "expected"),
    [
        ("training_step", raise_error, "fit", ArithmeticError),
        ("validation_step", raise_error, "fit", ArithmeticError),
        ("test_step", raise_error, "test", ArithmeticError),
        ("predict_step", raise_error, "predict", ArithmeticError),
        ("training_step", raise_interrupt, "fit", SystemExit),
        ("training_step", send_interrupt, "fit", SystemExit),
    ],
)
def test_an_exception_or_an_interrupt_in_a_step_ends_the_run_and_the_threads(step, error, entry, expected):
    def run(strategy, devices):
        ended = Ended()
        trainer = quiet_trainer(strategy, devices, precision="64-true", callbacks=[ended], max_epochs=3)
        loaders = [batches(), batches(19)] if entry == "fit" else [batches()]
        with pytest.raises(expected):
            getattr(trainer, entry)(seeded(failing(step, error)), *loaders)
        assert not replica_threads()
        return trainer.global_step, trainer.state.status, trainer.interrupted, ended.calls

    single, parallel = both_ways(run)
    assert parallel == single
