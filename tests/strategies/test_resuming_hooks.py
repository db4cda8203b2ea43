"""Checkpoints that any hook saves, resumed on one rank: what was due comes next, and nothing twice."""

import random

import numpy
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader

from tests.strategies.ddp_ranks import quiet_trainer
from tests.strategies.join_ranks import samples
from tests.strategies.preemption_data import STRATEGIES, Augmented, Random, Tracing, Trail, dealt, streams

BATCHES = 4  # in an epoch


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


class Breaking(Augmented):
    """Cannot give its seventh sample, once."""

    left = 6

    def __getitem__(self, index):
        self.left -= 1
        if self.left == -1:
            raise OSError("the file is gone")
        return super().__getitem__(index)


LOADERS = {
    "a loader": dealt(11),
    "a stream": streams(11),
    "a loader that breaks": lambda: DataLoader(Breaking(11), batch_size=3, shuffle=True),
}


class SaveOnce(Callback):
    """Saves a checkpoint the first time that a hook is called after some batches of an epoch."""

    def __init__(self, hook, batches, path):
        self.batches, self.path, self.is_done = batches, path, False
        setattr(self, hook, self._save)

    def _save(self, trainer, *_):
        used = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if not self.is_done and not trainer.sanity_checking and used == self.batches:
            self.is_done = True
            trainer.save_checkpoint(self.path)


def fit(strategy, trail, *callbacks, kind=Random, loader="a loader", path=None, **options):
    """Train on one rank, from a checkpoint if there is a path; return the module."""
    trainer = quiet_trainer(
        **{
            "strategy": STRATEGIES[strategy](),
            "devices": 1,
            "precision": "64-true",
            "max_epochs": 3,
            "callbacks": [Tracing(trail, None), *callbacks],
            "use_distributed_sampler": True,
            **options,
        }
    )
    return fit_with(trainer, kind, LOADERS[loader], path)


def fit_with(trainer, kind=Random, make_loader=LOADERS["a loader"], path=None):
    seed_everything(0 if path is None else 1, verbose=False)  # deals the samples out
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0 if path is None else 1)
    validation = DataLoader(list(zip(*samples(5), strict=True)), batch_size=2)
    module = kind().double()
    trainer.fit(module, make_loader(), validation, ckpt_path=path, weights_only=True)
    return module


def save_and_resume(tmp_path, hook, batches, saving, resuming=None, **options):
    """Save once in a hook, and resume; return the trail and the module of both runs."""
    whole, resumed, path = Trail(), Trail(), f"{tmp_path}/1.ckpt"
    module = fit(saving, whole, SaveOnce(hook, batches, path), **options)
    return whole, resumed, module, fit(resuming or saving, resumed, path=path, **options)


def assert_goes_on(resumed, whole):
    batches, validations = whole.saved
    assert 0 < batches < len(whole.digests)
    assert resumed.steps == whole.steps[batches:]
    assert [step for step, _ in resumed.validated] == [step for step, _ in whole.validated[validations:]]


def assert_is_the_same(resumed, whole):
    assert_goes_on(resumed, whole)
    assert resumed.digests == whole.digests[whole.saved[0] :]
    assert resumed.validated == whole.validated[whole.saved[1] :]


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return request.param


@pytest.mark.parametrize(
    ("hook", "batches", "loader"),
    [
        ("on_train_batch_end", 2, "a loader"),
        slow("on_train_batch_end", 2, "a stream"),
        ("on_train_batch_end", BATCHES, "a loader"),
        ("on_validation_end", 2, "a loader"),
        ("on_validation_end", BATCHES, "a loader"),
        slow("on_validation_end", BATCHES, "a stream"),
        ("on_train_epoch_end", BATCHES, "a loader"),
        slow("on_train_epoch_end", BATCHES, "a stream"),
    ],
)
def test_a_run_that_is_saved_in_a_hook_and_saved_again_ends_as_the_whole_one(strategy, hook, batches, loader, tmp_path):
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None, "loader": loader}
    paths = [f"{tmp_path}/{number}.ckpt" for number in range(2)]
    whole, first, second = Trail(), Trail(), Trail()
    fit(strategy, whole, SaveOnce(hook, batches, paths[0]), **options)
    again = SaveOnce("on_validation_end", batches if hook == "on_train_batch_end" else 2, paths[1])
    fit(strategy, first, again, path=paths[0], **options)
    assert_is_the_same(first, whole)
    fit(strategy, second, path=paths[1], **options)
    assert second.digests == first.digests[first.saved[0] :]
    assert second.validated == first.validated[first.saved[1] :]


@pytest.mark.parametrize("batches", [2, slow(BATCHES)])
@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_end", "on_validation_epoch_end"])
def test_a_validation_that_was_not_over_is_made_again(strategy, batches, hook, tmp_path):
    whole, resumed, *_ = save_and_resume(tmp_path, hook, batches, strategy, val_check_interval=2)
    assert_goes_on(resumed, whole)


@pytest.mark.parametrize("hook", ["on_train_batch_end", slow("on_validation_end"), slow("on_train_epoch_end")])
def test_a_trainer_that_has_fitted_before_resumes(strategy, hook, tmp_path):
    whole, resumed, path = Trail(), Trail(), f"{tmp_path}/1.ckpt"
    trainer = fit(strategy, whole, SaveOnce(hook, BATCHES, path)).trainer
    trainer.callbacks[0] = Tracing(resumed, None)
    fit_with(trainer, path=path)
    assert_is_the_same(resumed, whole)


class CutShort(Random):
    """Its first epoch ends before its third batch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


@pytest.mark.parametrize("options", [{}, slow({"max_epochs": -1, "max_steps": 10})])
def test_an_epoch_that_was_cut_short_has_ended(strategy, options, tmp_path):
    options = {"kind": CutShort, "limit_val_batches": 0, **options}
    whole, resumed, *_ = save_and_resume(tmp_path, "on_train_epoch_end", 3, strategy, **options)
    assert_is_the_same(resumed, whole)


class LateValue(Random):
    """Logs what its schedule asks for after callbacks have saved; another schedule does not need that."""

    def on_train_epoch_end(self):
        self.log("late", 1.0, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedules = [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0) for _ in "ab"]
        return [optimizer], [
            {"scheduler": schedule, "monitor": name}
            for schedule, name in zip(schedules, ("late", "val_loss"), strict=True)
        ]


def test_a_schedule_whose_value_is_not_there_yet_is_skipped_with_a_warning(strategy, tmp_path):
    with pytest.warns(RuntimeWarning, match="ReduceLROnPlateau conditioned on metric late which is not available"):
        whole, resumed, module, found = save_and_resume(
            tmp_path, "on_train_epoch_end", BATCHES, strategy, kind=LateValue
        )
    assert_goes_on(resumed, whole)
    (late, other), expected = found.lr_schedulers(), module.lr_schedulers()
    assert late.last_epoch == expected[0].last_epoch - 1
    assert other.last_epoch == expected[1].last_epoch
    assert all(config.strict for config in found.trainer.lr_scheduler_configs)


@pytest.mark.parametrize(("saving", "resuming"), [("ddp_checkpoint", "ddp_join"), ("ddp_join", "ddp_checkpoint")])
@pytest.mark.parametrize("batches", [2, slow(BATCHES)])
def test_each_strategy_resumes_what_the_other_has_saved(saving, resuming, batches, tmp_path):
    whole, resumed, *_ = save_and_resume(tmp_path, "on_train_batch_end", batches, saving, resuming)
    assert_is_the_same(resumed, whole)


class SaveOnException(Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint(self.path)


def test_an_exception_while_a_batch_is_fetched_leaves_nothing_due(strategy, tmp_path):
    """Neither the validation after the second batch nor what follows that."""
    whole, interrupted, resumed, path = Trail(), Trail(), Trail(), f"{tmp_path}/1.ckpt"
    options = {"val_check_interval": 2}
    fit(strategy, whole, **options)
    with pytest.raises(OSError, match="the file is gone"):
        fit(strategy, interrupted, SaveOnException(path), loader="a loader that breaks", **options)
    fit(strategy, resumed, path=path, **options)
    assert interrupted.steps + resumed.steps == whole.steps
    assert [step for step, _ in interrupted.validated + resumed.validated] == [step for step, _ in whole.validated]
