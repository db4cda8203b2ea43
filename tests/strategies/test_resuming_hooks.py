"""Checkpoints that any hook saves, resumed on one rank: what was due comes next, and nothing twice."""

import random

import numpy
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader, Dataset

from tests.strategies.ddp_ranks import quiet_trainer
from tests.strategies.join_ranks import samples
from tests.strategies.preemption_data import STRATEGIES, Augmented, Random, Tracing, Trail, dealt, streams

BATCHES = 4  # in an epoch
LOADERS = {"a loader": dealt(11), "a stream": streams(11)}


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


def make_trainer(strategy, trail, *callbacks, **options):
    return quiet_trainer(
        **{
            "strategy": STRATEGIES[strategy](process_group_backend="gloo"),
            "devices": 1,
            "precision": "64-true",
            "max_epochs": 3,
            "callbacks": [Tracing(trail, None), *callbacks],
            "use_distributed_sampler": True,
            **options,
        }
    )


def fit(trainer, kind=Random, make_loader=LOADERS["a loader"], ckpt_path=None):
    seed_everything(0 if ckpt_path is None else 1, verbose=False)  # deals the samples out
    own = 0 if ckpt_path is None else 1
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(own)
    validation = DataLoader(list(zip(*samples(5), strict=True)), batch_size=2)
    module = kind().double()
    trainer.fit(module, make_loader(), validation, ckpt_path=ckpt_path, weights_only=True)
    return module


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


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("hook", "batches"),
    [
        ("on_train_batch_end", 2),
        ("on_train_batch_end", BATCHES),
        ("on_validation_end", 2),
        ("on_validation_end", BATCHES),
        ("on_train_epoch_end", BATCHES),
    ],
)
def test_a_run_that_is_saved_in_a_hook_and_saved_again_ends_as_the_whole_one(strategy, loader, hook, batches, tmp_path):
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    whole = Trail()
    fit(
        make_trainer(strategy, whole, SaveOnce(hook, batches, f"{tmp_path}/1.ckpt"), **options),
        make_loader=LOADERS[loader],
    )
    first = Trail()
    again = SaveOnce("on_validation_end", batches if hook == "on_train_batch_end" else 2, f"{tmp_path}/2.ckpt")
    fit(make_trainer(strategy, first, again, **options), make_loader=LOADERS[loader], ckpt_path=f"{tmp_path}/1.ckpt")
    assert_is_the_same(first, whole)
    second = Trail()
    fit(make_trainer(strategy, second, **options), make_loader=LOADERS[loader], ckpt_path=f"{tmp_path}/2.ckpt")
    assert second.digests == first.digests[first.saved[0] :]
    assert second.validated == first.validated[first.saved[1] :]


@pytest.mark.parametrize("batches", [2, BATCHES])
@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_end", "on_validation_epoch_end"])
def test_a_validation_that_was_not_over_is_made_again(strategy, batches, hook, tmp_path):
    whole, resumed = Trail(), Trail()
    saving = SaveOnce(hook, batches, f"{tmp_path}/1.ckpt")
    fit(make_trainer(strategy, whole, saving, val_check_interval=2))
    fit(make_trainer(strategy, resumed, val_check_interval=2), ckpt_path=f"{tmp_path}/1.ckpt")
    assert_goes_on(resumed, whole)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_a_trainer_that_has_fitted_before_resumes(strategy, hook, tmp_path):
    trail = Trail()
    trainer = make_trainer(strategy, trail, SaveOnce(hook, BATCHES, f"{tmp_path}/1.ckpt"))
    fit(trainer)
    whole, resumed = Trail(**vars(trail)), Trail()
    trainer.callbacks[0] = Tracing(resumed, None)
    fit(trainer, ckpt_path=f"{tmp_path}/1.ckpt")
    assert_is_the_same(resumed, whole)


class CutShort(Random):
    """Its first epoch ends before its third batch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


@pytest.mark.parametrize("options", [{}, {"max_epochs": -1, "max_steps": 10}])
def test_an_epoch_that_was_cut_short_has_ended(strategy, options, tmp_path):
    whole, resumed = Trail(), Trail()
    saving = SaveOnce("on_train_epoch_end", 3, f"{tmp_path}/1.ckpt")
    options = {"limit_val_batches": 0, **options}
    fit(make_trainer(strategy, whole, saving, **options), CutShort)
    fit(make_trainer(strategy, resumed, **options), CutShort, ckpt_path=f"{tmp_path}/1.ckpt")
    assert_is_the_same(resumed, whole)


class LateValue(Random):
    """Logs what its schedule asks for after callbacks have saved; another schedule does not need that."""

    def on_train_epoch_end(self):
        self.log("late", 1.0, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedules = [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0) for _ in "ab"]
        return [optimizer], [
            {"scheduler": schedules[0], "monitor": "late"},
            {"scheduler": schedules[1], "monitor": "val_loss"},
        ]


def test_a_schedule_whose_value_is_not_there_yet_is_left_out_with_a_warning(strategy, tmp_path):
    whole, resumed = Trail(), Trail()
    module = fit(
        make_trainer(strategy, whole, SaveOnce("on_train_epoch_end", BATCHES, f"{tmp_path}/1.ckpt")), LateValue
    )
    with pytest.warns(RuntimeWarning, match="ReduceLROnPlateau conditioned on metric late which is not available"):
        found = fit(make_trainer(strategy, resumed), LateValue, ckpt_path=f"{tmp_path}/1.ckpt")
    assert_goes_on(resumed, whole)
    (late, other), expected = found.lr_schedulers(), module.lr_schedulers()
    assert late.last_epoch == expected[0].last_epoch - 1
    assert other.last_epoch == expected[1].last_epoch
    assert all(config.strict for config in found.trainer.lr_scheduler_configs)


@pytest.mark.parametrize(("saving", "resuming"), [("ddp_checkpoint", "ddp_join"), ("ddp_join", "ddp_checkpoint")])
@pytest.mark.parametrize("batches", [2, BATCHES])
def test_each_strategy_resumes_what_the_other_has_saved(saving, resuming, batches, tmp_path):
    whole, resumed = Trail(), Trail()
    fit(make_trainer(saving, whole, SaveOnce("on_train_batch_end", batches, f"{tmp_path}/1.ckpt")))
    fit(make_trainer(resuming, resumed), ckpt_path=f"{tmp_path}/1.ckpt")
    assert_is_the_same(resumed, whole)


class Breaking(Dataset):
    """Cannot give a sample, once."""

    def __init__(self, number):
        self.samples, self.is_broken, self.left = Augmented(number), True, 6

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.left -= 1
        if self.is_broken and self.left < 0:
            self.is_broken = False
            raise OSError("the file is gone")
        return self.samples[index]


class SaveOnException(Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint(self.path)


def test_an_exception_while_a_batch_is_fetched_leaves_nothing_due(strategy, tmp_path):
    """Neither the validation after the second batch nor what follows that."""
    whole, interrupted, resumed = Trail(), Trail(), Trail()
    options = {"val_check_interval": 2}
    fit(make_trainer(strategy, whole, **options))
    with pytest.raises(OSError, match="the file is gone"):
        fit(
            make_trainer(strategy, interrupted, SaveOnException(f"{tmp_path}/1.ckpt"), **options),
            make_loader=lambda: DataLoader(Breaking(11), batch_size=3, shuffle=True),
        )
    fit(make_trainer(strategy, resumed, **options), ckpt_path=f"{tmp_path}/1.ckpt")
    assert interrupted.steps + resumed.steps == whole.steps
    assert [step for step, _ in interrupted.validated + resumed.validated] == [step for step, _ in whole.validated]
