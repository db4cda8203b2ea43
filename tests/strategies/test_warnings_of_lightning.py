"""Warnings about what Lightning 2 does otherwise, and warnings of Lightning that are wrong here."""

import warnings

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ddp_ext  # noqa: F401  registers the strategies
from tests.support.processes import run_processes


@pytest.mark.parametrize("hook", ["training_step_end", "validation_step_end"])
def test_a_hook_of_lightning_1_is_named_with_its_successor(hook):
    module = BoringModel()
    setattr(module, hook, lambda outputs: outputs)
    trainer = Trainer(strategy="dp", accelerator="cpu", devices=2, fast_dev_run=1)
    with pytest.warns(UserWarning, match=f"`{hook}` is a hook of Lightning 1.x.* in `{hook.removesuffix('_end')}`"):
        trainer.fit(module)


def validate(strategy):
    """Return whether Lightning has said that samples are repeated."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(strategy=strategy, accelerator="cpu", devices=2, fast_dev_run=1).validate(BoringModel(), verbose=False)
    return any("replicates some samples" in str(warning.message) for warning in caught)


@pytest.mark.parametrize(("strategy", "repeats"), [("ddp_join", False), ("ddp_checkpoint", True)])
def test_only_a_strategy_that_repeats_samples_warns_of_it(strategy, repeats):
    assert run_processes(validate, 2, strategy)[0] is repeats
