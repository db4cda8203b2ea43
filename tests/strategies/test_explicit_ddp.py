"""What `ddp_checkpoint` and its base say before any process starts."""

from datetime import timedelta

import pytest
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy, ExplicitDDPStrategy
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.ranks.stall_watch import StallWatch
from tests.parity import quiet_trainer


@pytest.mark.parametrize(
    "name", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers"]
)
def test_an_argument_that_torch_needs_can_be_deleted(name):
    with pytest.raises(TypeError, match=f"`{name}` is not needed: .* Delete the argument."):
        DDPCheckpointStrategy(**{name: True})


def test_an_unknown_argument_is_refused():
    with pytest.raises(
        TypeError, match=r"`bucket_cap` is not an argument of this strategy\. Did you mean `bucket_cap_mb`"
    ):
        DDPCheckpointStrategy(bucket_cap=1)


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_a_bucket_has_a_size(size):
    with pytest.raises(ValueError, match="`bucket_cap_mb` must be above 0 MiB"):
        DDPCheckpointStrategy(bucket_cap_mb=size)


def test_weights_are_checked():
    with pytest.raises(ValueError, match="`weight_by` must be one of"):
        DDPCheckpointStrategy(weight_by="tokens")


def test_a_step_that_fetches_its_batch_cannot_have_it_weighed():
    class Fetching(BoringModel):
        def training_step(self, dataloader_iter):
            raise AssertionError("must not run")

    strategy = DDPCheckpointStrategy(weight_by=len, process_group_backend="gloo")
    with pytest.raises(UnsupportedFeatureError, match="a callable `weight_by` has none to weigh"):
        quiet_trainer(strategy, 1).fit(Fetching())


def test_the_watch_ends_with_the_run_even_if_something_else_fails_at_its_end(monkeypatch):
    """Otherwise it would end the process of a program that has caught the error and goes on."""

    class Failing(TorchCheckpointIO):
        def teardown(self):
            raise OSError("cannot be written")

    stops = []
    monkeypatch.setattr(StallWatch, "stop", lambda watch: stops.append(watch))
    strategy = DDPJoinStrategy(process_group_backend="gloo", checkpoint_io=Failing())
    with pytest.raises(OSError, match="cannot be written"):
        quiet_trainer(strategy, 1, fast_dev_run=True).fit(BoringModel())
    assert strategy.reducer is None
    assert not strategy.is_shadow
    assert stops.count(strategy._watch) >= 2  # before the run, and after it


def test_a_batch_that_counts_nothing_leaves_gradients_of_batches_before():
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
    strategy = DDPCheckpointStrategy(weight_by=lambda batch: next(weights), process_group_backend="gloo")
    module = Manual()
    quiet_trainer(strategy, 1, max_steps=1, limit_train_batches=3).fit(module)
    first, second, third = module.gradients
    assert first.equal(second)
    assert not second.equal(third)


def test_the_registered_name_makes_the_strategy():
    trainer = Trainer(strategy="ddp_checkpoint", accelerator="cpu", devices=2, logger=False)
    assert type(trainer.strategy) is DDPCheckpointStrategy
    assert "ddp_checkpoint" in StrategyRegistry


@pytest.mark.parametrize("limit", [timedelta(), timedelta(seconds=-1)])
def test_a_stall_limit_is_above_0(limit):
    with pytest.raises(ValueError, match="`stall_timeout` must be above 0 seconds"):
        DDPCheckpointStrategy(stall_timeout=limit)


def test_a_stall_limit_is_a_time():
    with pytest.raises(TypeError, match="`stall_timeout` must be a timedelta or a number of seconds, got 'soon'"):
        DDPCheckpointStrategy(stall_timeout="soon")


def test_arguments_keep_lightnings_names():
    strategy = DDPCheckpointStrategy(process_group_backend="gloo", timeout=timedelta(seconds=5), start_method="fork")
    assert isinstance(strategy, ExplicitDDPStrategy)
    assert strategy.process_group_backend == "gloo"
    assert strategy.reducer is None
