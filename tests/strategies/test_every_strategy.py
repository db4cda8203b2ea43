"""What every strategy supports or refuses in one process: arguments, steps that are switched off, Trainers, ends."""

import logging
from datetime import timedelta
from functools import partial

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_ddp_ext import (
    BalancedDataParallelStrategy,
    BalancedDDPStrategy,
    DDPCheckpointStrategy,
    DDPJoinStrategy,
    TokenCount,
    _output,
    fabric,
)
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.steps.trainer_watchdog import TrainerWatchdog
from tests.support.training import quiet_trainer

STRATEGIES = [BalancedDataParallelStrategy, DDPCheckpointStrategy, DDPJoinStrategy]
UNUSED = ["find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers"]
OF_CHUNKS = [
    ({"gpu0_batch_size": -1}, ValueError, "`gpu0_batch_size` must be at least 0, got -1. Use 0 to keep"),
    ({"gpu0_batch_size": 2.0}, TypeError, "`gpu0_batch_size` must be an integer, got 2.0"),
    ({"gpu0_batch_size": True}, TypeError, "`gpu0_batch_size` must be an integer, got True"),
    ({"gpu0_batch_size": 2, "split": [1, 2]}, ValueError, "exclude each other"),
    ({"balance": "even", "split": [1, 2]}, ValueError, "`split=.*` and `balance='even'` exclude each other"),
    ({"split": "12"}, TypeError, "`split` must be a sequence of numbers, got '12'"),
    ({"split": 3}, TypeError, "`split` must be a sequence of numbers, got 3"),
    ({"split": [1, -1]}, ValueError, "`split` must hold non-negative numbers"),
    ({"split": [0, 0]}, ValueError, "not all zero"),
    ({"split": [1, float("nan")]}, ValueError, "`split` must hold non-negative numbers"),
    ({"split": []}, ValueError, "`split` must hold non-negative numbers"),
    ({"balance": "odd"}, ValueError, '`balance` must be "even" or "auto", got \'odd\''),
]
OF_ALL = [
    ({"batch_dim": -1}, ValueError, "`batch_dim` must be at least 0, got -1"),
    ({"batch_dim": 0.5}, TypeError, "`batch_dim` must be"),
    ({"weight_by": "token"}, ValueError, "`weight_by` must be one of"),
    ({"weight_by": TokenCount}, TypeError, r"`weight_by` is the class `TokenCount`. Use an object: `TokenCount\(\)`"),
]
OF_RANKS = [
    *[({name: True}, TypeError, f"`{name}` is not needed: .* Delete the argument.") for name in UNUSED],
    *[({"bucket_cap_mb": size}, ValueError, "`bucket_cap_mb` must be above 0 MiB") for size in (0, -1, float("nan"))],
    *[
        ({"stall_timeout": timedelta(seconds=s)}, ValueError, "`stall_timeout` must be above 0 seconds")
        for s in (0, -1)
    ],
    ({"stall_timeout": "soon"}, TypeError, "`stall_timeout` must be a timedelta or a number of seconds, got 'soon'"),
]
# Ranks without data do not run a hook that keeps a state.
STATEFUL = {"ddp_comm_hook": powerSGD_hook.powerSGD_hook, "ddp_comm_state": object()}
REFUSED = {
    BalancedDataParallelStrategy: [*OF_ALL, *OF_CHUNKS],
    BalancedDDPStrategy: [*OF_ALL, *OF_CHUNKS, *OF_RANKS],
    DDPCheckpointStrategy: [*OF_ALL, *OF_RANKS],
    DDPJoinStrategy: [*OF_ALL, *OF_RANKS, (STATEFUL, ValueError, "must be one of torch's that keep no state")],
}


STARTS = [
    (lambda: BalancedDataParallelStrategy(gpu0_batch_size=1), 2, "the devices share each batch evenly, but at most 1"),
    (lambda: BalancedDataParallelStrategy(balance="auto"), 2, "the devices share each batch by their speed."),
    (DDPCheckpointStrategy, 1, "each rank draws its own batches, as many as the others."),
    (DDPJoinStrategy, 1, "each rank draws its own batches; ranks may have different numbers of them."),
    (lambda: BalancedDDPStrategy(split=[2]), 1, "the ranks share each batch of the loader in proportions of 2."),
]


def test_a_session_says_once_how_batches_are_divided_and_what_the_loss_is_taken_for(caplog, monkeypatch):
    monkeypatch.setattr(_output, "_started", set())
    caplog.set_level(logging.INFO, "lightning.pytorch")
    logging.getLogger("lightning.pytorch").addHandler(caplog.handler)
    loss = "The loss is taken for a mean over samples; `GradientCheck` verifies it."
    try:
        for make, devices, division in STARTS:
            strategy, module = make(), BoringModel()
            trainer = quiet_trainer(strategy, devices, fast_dev_run=2)
            caplog.clear()
            for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict, trainer.fit):
                run(module)
            (line,) = (one.message for one in caplog.records if one.message.startswith(type(strategy).__name__))
            assert division in line
            assert loss in line
    finally:
        logging.getLogger("lightning.pytorch").removeHandler(caplog.handler)


MEANT = [
    (BalancedDataParallelStrategy, "gpu0_bsz", "Did you mean `gpu0_batch_size`"),
    (BalancedDDPStrategy, "gpu0_bsz", "Did you mean `gpu0_batch_size`"),
    (DDPJoinStrategy, "uneven_input", "Did you mean `uneven_inputs`"),
    (DDPCheckpointStrategy, "bucket_cap", "Did you mean `bucket_cap_mb`"),
    (BalancedDDPStrategy, "uneven_inputs", "It is an argument of the strategy `ddp_join`"),
    (DDPJoinStrategy, "backend", "Did you mean `process_group_backend`"),
    (DDPJoinStrategy, "checkpointing", "Did you mean `activation_checkpointing`"),
    (DDPJoinStrategy, "gpu0_batch_size", "It is an argument of the strategies `balanced_dp` and `balanced_ddp`"),
    (DDPCheckpointStrategy, "uneven_inputs", "It is an argument of the strategy `ddp_join`"),
    (fabric.BalancedDDPStrategy, "weightby", "Did you mean `weight_by`"),
]


def test_a_misspelt_argument_or_name_of_a_strategy_is_answered_with_the_right_one():
    for strategy, given, meant in MEANT:
        with pytest.raises(TypeError, match=rf"`{given}` is not an argument of this strategy\. {meant}"):
            strategy(**{given: 1})
    for make, given, meant in (
        (Trainer, "balanced_pd", "balanced_dp"), (Trainer, "DDP_jion", "ddp_join"), (Fabric, "ddp_jion", "ddp_join"),
        (Fabric, "balanced_dp", "balanced_ddp"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"`strategy='{given}'` does not exist. Did you mean `{meant}`"):
            make(strategy=given)
    with pytest.raises(ValueError, match="You selected an invalid strategy name: `strategy='nonsense'`"):
        Trainer(strategy="nonsense")


class PassesOn(DDPJoinStrategy):
    """Passes an argument on that the package does not have."""

    def __init__(self, mine=1, **options):
        super().__init__(mine=mine, **options)


class FabricPassesOn(fabric.DDPJoinStrategy):
    """The same for Fabric."""

    def __init__(self, mine=1, **options):
        super().__init__(mine=mine, **options)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (PassesOn, "mine"), (FabricPassesOn, "mine"),
        (partial(BalancedDataParallelStrategy, cluster_environment=None), "cluster_environment"),
    ],
)  # fmt: skip
def test_an_argument_of_another_class_in_the_chain_is_not_swallowed(make, given):
    with pytest.raises(TypeError, match=rf"`{given}` is not an argument of this strategy\."):
        make()


@pytest.mark.parametrize("strategy", REFUSED)
def test_wrong_arguments_are_refused_with_a_remedy(strategy):
    for arguments, error, message in REFUSED[strategy]:
        with pytest.raises(error, match=message):
            strategy(**arguments)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
@pytest.mark.parametrize("step", ["validation_step", "test_step", "predict_step"])
@pytest.mark.parametrize("make", STRATEGIES)
def test_a_step_is_switched_off_by_none(make, step):
    module = BoringModel()
    setattr(module, step, None)
    trainer = quiet_trainer(make(), 2 if make is BalancedDataParallelStrategy else 1, fast_dev_run=2)
    trainer.fit(module)
    assert trainer.global_step == 2
    (trainer.validate if step == "test_step" else trainer.test)(module, verbose=False)


@pytest.mark.cpu_only("names the CPU as the accelerator of the second Trainer")
@pytest.mark.parametrize("make", STRATEGIES)
def test_a_second_trainer_needs_a_strategy_of_its_own(make):
    strategy = make()
    first = quiet_trainer(strategy, 1, fast_dev_run=1)
    message = f"this `{make.__name__}` .* Create a new strategy for each Trainer"
    for options in ({"accelerator": "cpu"}, {}, {"precision": "64-true"}):
        with pytest.raises(UnsupportedFeatureError, match=message):
            Trainer(strategy=strategy, devices=1, logger=False, **options)
    first.fit(BoringModel())
    first.test(BoringModel(), verbose=False)
    assert first.strategy is strategy


@pytest.mark.parametrize("name", ["ddp_checkpoint", "ddp_join"])
def test_hooks_can_make_a_sampler_before_any_run(name, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    trainer = Trainer(strategy=name, accelerator="cpu", devices=2, num_nodes=2, logger=False)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 0}


@pytest.mark.parametrize("make", [DDPCheckpointStrategy, DDPJoinStrategy])
def test_a_batch_sampler_that_needs_its_own_sampler_is_refused(make):
    class Grouped(BatchSampler):
        def __init__(self, sampler, batch_size, drop_last):
            super().__init__(sampler, batch_size, drop_last)
            self.groups = sampler.data_source

    data = torch.randn(8, 32)
    loader = DataLoader(data, batch_sampler=Grouped(SequentialSampler(data), 2, False))
    message = r"`Grouped` cannot be made again with the sampler of one rank \(AttributeError: .*, or use `balanced_ddp`"
    with pytest.raises(UnsupportedFeatureError, match=message):
        quiet_trainer(make(), 1, fast_dev_run=True).fit(BoringModel(), loader)


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
    monkeypatch.setattr(TrainerWatchdog, "stop", lambda watch: stops.append(watch))
    strategy = DDPJoinStrategy(checkpoint_io=Failing())
    with pytest.raises(OSError, match="cannot be written"):
        quiet_trainer(strategy, 1, fast_dev_run=True).fit(BoringModel())
    assert strategy.reducer is None
    assert not strategy.is_shadow
    assert stops.count(strategy._watch) >= 2  # before the run, and after it


def test_a_batch_without_weight_leaves_earlier_gradients_unchanged():
    gradients, weights = [], iter([1.0, 0.0, 1.0])

    class Manual(BoringModel):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.layer(batch).sum())
            gradients.append(self.layer.weight.grad.clone())
            if batch_idx == 2:
                self.optimizers().step()

    strategy = DDPCheckpointStrategy(weight_by=lambda batch: next(weights))
    quiet_trainer(strategy, 1, max_steps=1, limit_train_batches=3).fit(Manual())
    assert gradients[0].equal(gradients[1])
    assert not gradients[1].equal(gradients[2])
