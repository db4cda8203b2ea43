"""Values that ranks log in lockstep; the ranks are threads of this process."""

import itertools
from contextlib import ExitStack
from functools import partial
from queue import Queue

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_ddp_ext._compat.lightning_logging import watch_logging
from lightning_ddp_ext.batches.sample_counts import BatchSamples
from lightning_ddp_ext.errors import LoggedKeysError
from lightning_ddp_ext.loaders.step_loader import Participation
from lightning_ddp_ext.reducer.control import ControlField
from lightning_ddp_ext.steps.logged_values import LoggedValues
from tests.support.fake_group import run_ranks
from tests.support.training import quiet_trainer

OPERATIONS = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}


class Rank:
    """A Trainer in a step, and the values that it logs."""

    def __init__(self, group, is_training=True):
        self.group = group
        self.trainer = quiet_trainer()
        self.trainer.state.fn = TrainerFn.FITTING if is_training else TrainerFn.VALIDATING
        self.trainer.training, self.trainer.validating = is_training, not is_training
        self.results = self.trainer._results
        self.trainer.strategy._lightning_module = LightningModule()
        self.values = LoggedValues(self.trainer, group, agrees=True, keys=ControlField())
        watch_logging(
            ExitStack(), self.trainer, self.values.updating, BatchSamples(0).rounded, lambda: None,
            self.values.end_epoch, self.values.check_epoch,
        )  # fmt: skip

    def begin(self, active):
        world_size = self.group.barrier.parties
        self.values.begin(Participation(active, self.group.rank not in active, len(active) < world_size))

    def log(self, hook, name, value, operation="mean", sync_dist=True, on_step=True):
        self.results.log(
            hook, name, torch.tensor(value), on_step=on_step, reduce_fx=OPERATIONS[operation], sync_dist=sync_dist,
            sync_dist_fn=self.reduce, batch_size=1,
        )  # fmt: skip

    def reduce(self, tensor, group, reduce_op):
        reduced = self.values.reduce(tensor, reduce_op)
        return tensor if reduced is None else reduced

    def latest(self):
        return {key.partition(".")[2]: float(metric._forward_cache) for key, metric in self.results.items()}


def step(rank, active, log, weight, messages):
    """Log in a step of the active ranks, of which the first one describes its keys to the others."""
    rank.begin(active)
    if rank.group.rank in active:
        with rank.values.step():
            log()
        if rank.group.rank == active[0]:
            for _ in range(rank.group.barrier.parties - len(active)):
                messages.put(rank.values.describe())
    else:
        rank.values.adopt(messages.get(timeout=30))
    rank.values.synchronize(weight)


@pytest.mark.parametrize(
    ("active", "weights", "expected"),
    [
        ((0, 1, 2), (1.0, 2.0, 5.0), {"mean": 20 / 8, "sum": 6, "max": 3, "min": 1}),
        ((0, 2), (1.0, 9.0, 3.0), {"mean": 10 / 4, "sum": 4, "max": 3, "min": 1}),
        ((1,), (1.0, 2.0, 5.0), {"mean": 2, "sum": 2, "max": 2, "min": 2}),
        ((0, 1, 2), (0.0, 0.0, 0.0), {"mean": 2, "sum": 6, "max": 3, "min": 1}),
        ((0, 2), (0.0, 7.0, 0.0), {"mean": 2, "sum": 4, "max": 3, "min": 1}),
        ((0, 1), (float("nan"), 7.0, 1.0), {"mean": 1.5, "sum": 3, "max": 2, "min": 1}),
    ],
)
@pytest.mark.parametrize("is_training", [True, False])
def test_values_of_a_step_are_those_of_active_ranks_on_all_ranks(is_training, active, weights, expected):
    messages = Queue()

    def run(group):
        rank = Rank(group, is_training)

        def log():
            for name in OPERATIONS:
                rank.log("training_step", name, group.rank + 1.0, name)
            rank.log("training_step", "own", group.rank + 1.0, sync_dist=False)

        step(rank, active, log, weights[group.rank], messages)
        return rank.latest()

    for number, found in enumerate(run_ranks(3, run)):
        assert found.pop("own") == (number if number in active else active[0]) + 1
        assert found == expected


def test_all_values_of_a_step_are_in_one_message():
    def run(group):
        rank, sizes = Rank(group), []
        exchange = group.exchange
        group.exchange = lambda tensor: sizes.append(tensor.numel()) or exchange(tensor)
        step(rank, (0, 1), lambda: [rank.log("training_step", str(number), 1.0) for number in range(9)], 1.0, Queue())
        return sizes

    # First the hash of the keys, then sums and weighted sums with their weights.
    assert run_ranks(2, run) == [[1, 20]] * 2


def fails(hook, is_training, active=(0, 1, 2), odd_step=0, is_known=False):
    """Return the error of three ranks, of which rank 1 logs an odd key in one of two steps, maybe all before it."""
    messages = Queue()

    def run(group):
        rank = Rank(group, is_training)

        def log(number):
            if (group.rank == 1 and number == odd_step) or (is_known and number < odd_step):
                rank.log(hook, "odd", 1.0)
            rank.log(hook, "even", 1.0)

        for number in range(2):
            step(rank, active, partial(log, number), 1.0, messages)
        rank.values.end_epoch()

    with pytest.raises(LoggedKeysError) as error:
        run_ranks(3, run)
    return str(error.value)


def test_keys_that_differ_are_named_with_their_ranks():
    hooks = {True: "training_step", False: "validation_step"}
    for is_training, number in itertools.product((True, False), (0, 1)):
        hook = hooks[is_training]
        message = fails(hook, is_training, odd_step=number)
        assert message.startswith(f"rank 1 logs `odd` with `sync_dist=True` in `{hook}`, rank 0 does not.")
        if number:
            assert fails(hook, is_training, odd_step=number, is_known=True) == message
        # A joined rank adopts the keys of the first active rank, and is not the one that is named.
        message = fails(hook, is_training, (1, 2), number)
        assert message.startswith(f"rank 1 logs `odd` with `sync_dist=True` in `{hook}`, rank 2 does not.")

    def run(group):
        rank = Rank(group)
        if group.rank == 2:
            rank.log("on_train_epoch_end", "odd", 1.0)
        rank.values.check_epoch()

    with pytest.raises(LoggedKeysError, match=r"rank 2 logs `odd` .* in `on_train_epoch_end`, rank 0 does not"):
        run_ranks(3, run)


def test_values_of_an_epoch_are_reduced_in_the_same_order_on_all_ranks():
    def run(group):
        rank = Rank(group, is_training=False)
        names = ["a", "b", "c"][:: -1 if group.rank else 1]
        with rank.values.step():
            for name in names:
                rank.log("validation_step", name, 1.0, on_step=False)
        rank.values.end_epoch()
        return list(rank.results)

    first, second = run_ranks(2, run)
    assert first == second == ["validation_step.a", "validation_step.b", "validation_step.c"]
