"""Errors and features of `ddp_checkpoint` and its base that need no other process."""

from datetime import timedelta

import pytest
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.ranks.stall_watch import StallWatch
from tests.parity import quiet_trainer

UNUSED = ["find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers"]
REFUSED = [
    *[({name: True}, TypeError, f"`{name}` is not needed: .* Delete the argument.") for name in UNUSED],
    ({"bucket_cap": 1}, TypeError, r"`bucket_cap` is not an argument of this strategy\. Did you mean `bucket_cap_mb`"),
    *[({"bucket_cap_mb": size}, ValueError, "`bucket_cap_mb` must be above 0 MiB") for size in (0, -1, float("nan"))],
    ({"batch_dim": -1}, ValueError, "`batch_dim` must be"),
    ({"batch_dim": 0.5}, TypeError, "`batch_dim` must be"),
    ({"weight_by": "tokens"}, ValueError, "`weight_by` must be one of"),
    ({"stall_timeout": timedelta()}, ValueError, "`stall_timeout` must be above 0 seconds"),
    ({"stall_timeout": timedelta(seconds=-1)}, ValueError, "`stall_timeout` must be above 0 seconds"),
    ({"stall_timeout": "soon"}, TypeError, "`stall_timeout` must be a timedelta or a number of seconds, got 'soon'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_wrong_arguments_are_refused_with_a_remedy(arguments, error, message):
    with pytest.raises(error, match=message):
        DDPCheckpointStrategy(**arguments)


def test_a_callable_weight_needs_a_step_that_takes_a_batch():
    class Fetching(BoringModel):
        def training_step(self, dataloader_iter):
            raise AssertionError("must not run")

    strategy = DDPCheckpointStrategy(weight_by=len)
    with pytest.raises(UnsupportedFeatureError, match="a callable `weight_by` has none to weigh"):
        quiet_trainer(strategy, 1).fit(Fetching())


def test_the_watchdog_stops_even_if_the_end_of_the_run_fails(monkeypatch):
    """Otherwise it would end the process of a program that has caught the error and continues."""

    class Failing(TorchCheckpointIO):
        def teardown(self):
            raise OSError("cannot be written")

    stops = []
    monkeypatch.setattr(StallWatch, "stop", lambda watch: stops.append(watch))
    strategy = DDPJoinStrategy(checkpoint_io=Failing())
    with pytest.raises(OSError, match="cannot be written"):
        quiet_trainer(strategy, 1, fast_dev_run=True).fit(BoringModel())
    assert strategy.reducer is None
    assert not strategy.is_shadow
    assert stops.count(strategy._watch) >= 2  # before the run, and after it


def test_a_batch_without_weight_leaves_earlier_gradients_unchanged():
    class Manual(BoringModel):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.gradients = []

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.layer(batch).sum())
            self.gradients.append(self.layer.weight.grad.clone())
            if batch_idx == 2:
                self.optimizers().step()

    weights = iter([1.0, 0.0, 1.0])
    strategy = DDPCheckpointStrategy(weight_by=lambda batch: next(weights))
    module = Manual()
    quiet_trainer(strategy, 1, max_steps=1, limit_train_batches=3).fit(module)
    first, second, third = module.gradients
    assert first.equal(second)
    assert not second.equal(third)
