"""Common uses of Lightning that every strategy supports."""

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_ext import BalancedDataParallelStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext.errors import UnsupportedFeatureError
from tests.parity import quiet_trainer

STRATEGIES = {
    "balanced_dp": lambda: BalancedDataParallelStrategy(),
    "ddp_checkpoint": lambda: DDPCheckpointStrategy(),
    "ddp_join": lambda: DDPJoinStrategy(),
}


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
@pytest.mark.parametrize("step", ["validation_step", "test_step", "predict_step"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_is_switched_off_by_none(name, step):
    module = BoringModel()
    setattr(module, step, None)
    trainer = quiet_trainer(STRATEGIES[name](), 2 if name == "balanced_dp" else 1, fast_dev_run=2)
    trainer.fit(module)
    assert trainer.global_step == 2
    (trainer.validate if step == "test_step" else trainer.test)(module, verbose=False)


@pytest.mark.cpu_only("names the CPU as the accelerator of the second Trainer")
@pytest.mark.parametrize("options", [{"accelerator": "cpu"}, {}, {"precision": "64-true"}], ids=repr)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_second_trainer_needs_a_strategy_of_its_own(name, options):
    strategy = STRATEGIES[name]()
    first = quiet_trainer(strategy, 1, fast_dev_run=1)
    with pytest.raises(
        UnsupportedFeatureError, match=f"this `{type(strategy).__name__}` .* Create a new strategy for each Trainer"
    ):
        Trainer(strategy=strategy, devices=1, logger=False, **options)
    first.fit(BoringModel())
    first.test(BoringModel(), verbose=False)
    assert first.strategy is strategy
