"""Refusals and steps of `balanced_dp`: chunks, errors of replicas, steps that return None."""

import importlib
import logging
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

import lightning_ddp_ext
from lightning_ddp_ext import BalancedDataParallelStrategy, UnsupportedFeatureError
from tests.support.devices import device, devices
from tests.support.training import (
    Classifier,
    balanced,
    batches,
    dataset,
    quiet_trainer,
    relative_difference,
    seeded,
    train,
)


def test_the_registered_name_makes_one_process_with_a_replica_per_device():
    trainer = quiet_trainer("balanced_dp", 3)
    assert isinstance(trainer.strategy, BalancedDataParallelStrategy)
    assert trainer.strategy.parallel_devices == devices(3)
    assert trainer.num_devices == 3
    assert trainer.world_size == 1
    assert trainer.strategy.launcher is None
    assert trainer.strategy.split_sizes(8) == [3, 3, 2]
    with pytest.raises(RuntimeError, match=r"`balanced_dp` has no devices yet\. Pass it to a Trainer first"):
        BalancedDataParallelStrategy().split_sizes(8)


def test_programs_of_lightning_1_get_equal_chunks_for_dp_and_a_line_that_says_so(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "handlers", [caplog.handler])
    for name, balance in (("balanced_dp", None), ("dp", "even")):
        caplog.clear()
        strategy = quiet_trainer(name, 3).strategy
        assert isinstance(strategy, BalancedDataParallelStrategy)
        assert strategy._division._rule.given["balance"] == balance
        assert any('is `"balanced_dp"` with equal chunks' in message for message in caplog.messages) is (name == "dp")


def test_arguments_that_do_not_fit_the_trainer_are_refused(monkeypatch):
    for arguments, options, error, message in (
        ({"split": [1, 2, 3]}, {}, ValueError, r"`split=\[1, 2, 3\]` has 3 entries for 2 devices"),
        ({}, {"sync_batchnorm": True}, UnsupportedFeatureError, "Remove `sync_batchnorm=True`"),
        ({}, {"num_nodes": 2}, UnsupportedFeatureError, "got `num_nodes=2`"),
    ):
        with pytest.raises(error, match=message):
            quiet_trainer(BalancedDataParallelStrategy(**arguments), 2, **options)
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedFeatureError, match="TorchElasticEnvironment reports 2"):
        quiet_trainer("balanced_dp", 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(UnsupportedFeatureError, match="an earlier strategy has started 3"):
        quiet_trainer("balanced_dp", 2)


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Fetching(Classifier):
    def training_step(self, dataloader_iter):
        raise AssertionError("must not run")


@pytest.mark.parametrize(
    ("module", "message"), [(Manual, "cannot run manual optimization"), (Fetching, "cannot cut batches that")]
)
def test_modules_it_cannot_train_are_refused_before_the_first_step(module, message):
    ran = []
    model = module()
    model.on_train_start = lambda: ran.append("train")
    model.on_sanity_check_start = lambda: ran.append("sanity")
    with pytest.raises(UnsupportedFeatureError, match=message):
        quiet_trainer("balanced_dp", 2, max_epochs=1).fit(model, batches(8, 4))
    assert not ran


def test_a_module_with_manual_optimization_can_be_tested():
    class Tested(Manual):
        def test_step(self, batch, batch_idx):
            self.log("rows", float(len(batch[0])), reduce_fx="sum")

    loader = DataLoader(dataset(10, torch.float32), batch_size=4)
    assert quiet_trainer("balanced_dp", 2).test(Tested(), loader, verbose=False) == [{"rows": 10.0}]


def test_an_exception_in_a_replica_keeps_its_type_names_the_chunk_and_leaves_the_strategy_usable():
    class FailsOnce(Classifier):
        failed = False

        def training_step(self, batch, batch_idx):
            if batch[0].size(0) == 6 and not FailsOnce.failed:
                FailsOnce.failed = True
                raise ArithmeticError("too much")
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(balanced([1, 3]), 2, max_epochs=1, precision="64-true")
    module = FailsOnce()
    with pytest.raises(ArithmeticError, match="too much") as caught:
        trainer.fit(module, batches(8))
    note = f"Raised in replica 1 of 2 on device {device(1)}, whose chunk is samples 2 to 7 of a batch of 8."
    assert caught.value.__notes__ == [note]
    assert caught.traceback[-1].name == "training_step"
    trainer.fit(module, batches(8))
    assert trainer.global_step == 1


def test_hooks_get_the_whole_batch_in_place_and_each_chunk_is_transferred_once():
    seen, transferred, values = [], [], []

    class Watching(Classifier):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            transferred.append((len(batch[0]), batch[0].data_ptr()))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_train_batch_start(self, batch, batch_idx):
            seen.append((len(batch[0]), batch[0].data_ptr()))
            batch[0].fill_(7.0)

        def training_step(self, batch, batch_idx):
            values.append(batch[0].unique().tolist())
            return super().training_step(batch, batch_idx)

    strategy = balanced([1, 3])
    assert strategy.chunk_sizes == strategy.replica_seconds == []
    train(Watching(), strategy, 2, max_epochs=1, loader=batches(8))
    ((size, place),) = seen
    (first_size, first), (second_size, second) = transferred
    assert [size, first_size, second_size] == [8, 2, 6]
    assert first == place < second  # the chunks are views of the loader's batch
    assert values == [[7.0], [7.0]]
    assert strategy.chunk_sizes == [2, 6]
    assert all(seconds > 0 for seconds in strategy.replica_seconds)


class Skipping(Classifier):
    """Returns None for chunks whose first sample is all zeros."""

    def __init__(self, as_mapping=False):
        super().__init__(torch.optim.SGD)
        self.as_mapping = as_mapping

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if (batch[0][0] == 0).all():
            return None
        return {"loss": loss, "labels": batch[1]} if self.as_mapping else loss


@pytest.mark.parametrize(
    ("weight_by", "as_mapping"),
    [("samples", True), ("equal", False), ("sum", False), (lambda chunk: len(chunk[1]) / 2, False)],
)
def test_replicas_whose_step_returns_none_have_no_weight(weight_by, as_mapping):
    data = dataset(6)
    data.tensors[0][1] = 0  # the first sample of the second replica

    def gradients(data, split, as_mapping=False, **options):
        loader = DataLoader(data, batch_size=len(data))
        trained = train(seeded(partial(Skipping, as_mapping)), balanced(split, **options), len(split), loader=loader)
        return trained.gradients.before_step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(data, [1, 3, 2], as_mapping, weight_by=weight_by)
    expected = gradients(Subset(data, [0, 4, 5]), [1, 2], weight_by=weight_by)  # the samples of the other replicas
    assert relative_difference(found, expected) < 1e-12
    assert relative_difference(found, gradients(dataset(6), [1, 5])) > 1e-3
    ours = [w for w in caught if "returned None on the replicas [1], whose samples have no weight" in str(w.message)]
    assert len(ours) == 1


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_all_replicas_skip_is_skipped_as_on_one_device():
    data = dataset(8)
    data.tensors[0][4:] = 0
    ways = {"strategy": "auto", "devices": 1}, {"strategy": balanced([1, 3]), "devices": 2}
    single, parallel = (train(seeded(Skipping), **way, loader=DataLoader(data, batch_size=4)) for way in ways)
    assert relative_difference(parallel.parameters, single.parameters) < 1e-12
    assert parallel.trainer.global_step == single.trainer.global_step


def test_importing_twice_is_harmless():
    importlib.reload(lightning_ddp_ext)
    assert isinstance(quiet_trainer("balanced_dp", 2).strategy, BalancedDataParallelStrategy)
